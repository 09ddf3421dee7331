"""tierstore's counters as vLLM's connector statistics: log line and Prometheus."""

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from tierstore.metrics import Counters, Metric

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prometheus_client import Counter, Gauge

__all__ = ["StatsSource", "TierStorePromMetrics", "TierStoreStats"]


_GAUGES = {metric.metric_name for metric in Metric if metric.kind == "gauge"}
"""Exported from the start, since an alert cannot distinguish 0 from a missing gauge."""


@dataclass
class TierStoreStats(KVConnectorStats):
    """What was counted since the last report, by `name` or `name{label="value"}`."""

    def reset(self) -> None:
        """Forget all sums."""
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> "TierStoreStats":
        """Add the sums of another rank, of the scheduler, or of a later step."""
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the sums for the log line."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not self.data


class StatsSource:
    """Turns running sums into sums per report."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._change_count = -1  # so that gauges are reported before anything has changed
        self._reported: Mapping[str, float] = {}

    def take(self) -> TierStoreStats | None:
        """Return what was counted since the last call, or None."""
        change_count = self._counters.change_count
        if change_count == self._change_count:  # as in nearly every step
            return None
        # Read before the sums: a change in between triggers another report, without increments.
        self._change_count = change_count
        before, self._reported = self._reported, self._counters.snapshot()
        data = {
            name: amount - before.get(name, 0)
            for name, amount in self._reported.items()
            if amount != before.get(name, 0)
            or (name not in before and name.partition("{")[0] in _GAUGES)
        }
        return TierStoreStats(data=data) if data else None


class TierStorePromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter or gauge `vllm:tierstore_<name>` per row of the metric table."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._levels: defaultdict[tuple[str, int], float] = defaultdict(float)
        """The values of gauges, by name with label and engine: reports hold only changes."""
        for metric in Metric:
            facts = {
                "name": f"vllm:tierstore_{metric.metric_name}",
                "documentation": metric.help_text,
                "labelnames": [*labelnames, *([metric.label] if metric.label else [])],
            }
            if metric.kind == "counter":
                self._counters[metric.metric_name] = self._counter_cls(**facts)
            else:
                self._gauges[metric.metric_name] = self._gauge_cls(
                    **facts, multiprocess_mode="mostrecent"
                )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report of an engine."""
        for key, amount in transfer_stats_data.items():
            name, _, label = key.partition("{")
            values = [*self.per_engine_labelvalues[engine_idx]]
            if label:
                values.append(label.split('"')[1])
            if name in self._counters:
                self._counters[name].labels(*values).inc(amount)
            elif name in self._gauges:
                self._levels[key, engine_idx] += amount
                self._gauges[name].labels(*values).set(self._levels[key, engine_idx])
