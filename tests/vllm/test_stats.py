"""What Prometheus shows of tierstore's sums."""

import types

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from tierstore.metrics import Counters, Metric
from tierstore_vllm.stats import StatsSource, TierStorePromMetrics

pytestmark = pytest.mark.vllm


def test_every_metric_is_shown_and_a_gauge_goes_down_again():
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    registry = CollectorRegistry()
    shown = TierStorePromMetrics(
        types.SimpleNamespace(kv_transfer_config=None),
        {
            Gauge: lambda **facts: Gauge(**facts, registry=registry),
            Counter: lambda **facts: Counter(**facts, registry=registry),
            Histogram: None,
        },
        ["engine"],
        {0: ["0"]},
    )
    counters = Counters()
    source = StatsSource(counters)

    def observe(amount):
        for metric in Metric:
            counters.add(metric, amount, label="x" if metric.label else "")
        shown.observe(source.take().data)

    def value_of(metric):
        labels = {"engine": "0"} | ({metric.label: "x"} if metric.label else {})
        return registry.get_sample_value(f"vllm:tierstore_{metric.metric_name}", labels)

    observe(5)
    observe(2)
    assert {metric: value_of(metric) for metric in Metric} == dict.fromkeys(Metric, 7)
    counters.add(Metric.PINNED_BYTES, -7)
    shown.observe(source.take().data)
    assert value_of(Metric.PINNED_BYTES) == 0
    counters.add(Metric.TIER_STATE, 2, label="y")
    counters.add(Metric.TIER_STATE, -6, label="x")
    shown.observe(source.take().data)
    labels = {"engine": "0", "tier": "y"}
    assert registry.get_sample_value("vllm:tierstore_tier_state", labels) == 2
    assert value_of(Metric.TIER_STATE) == 1
    assert source.take() is None


def test_gauges_are_reported_before_they_change_and_counters_are_not():
    counters = Counters()
    counters.tally(Metric.TIER_STATE, label="x")
    counters.tally(Metric.TIER_TRIPS, label="x")
    source = StatsSource(counters)
    report = source.take()
    assert report is not None
    assert report.data == {'tier_state{tier="x"}': 0}
    assert source.take() is None
    counters.add(Metric.TIER_STATE, 2, label="x")
    assert source.take().data == {'tier_state{tier="x"}': 2}
