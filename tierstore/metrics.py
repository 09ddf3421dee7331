"""The one table of metrics, and the counters behind it.

Code names a row of `Metric`, never a string. Exporters read `Counters.snapshot()`.
"""

import threading
from enum import Enum
from typing import Literal

__all__ = ["Counters", "Metric", "Tally"]

Kind = Literal["counter", "gauge"]


class Metric(Enum):
    """One row per metric: name, kind, label name (empty: none), help."""

    OFFLOADED_CHUNKS = ("offloaded_chunks_total", "counter", "", "Chunks copied GPU -> slot")
    OFFLOADED_BYTES = ("offloaded_bytes_total", "counter", "", "Bytes copied GPU -> slot")
    LOADED_CHUNKS = ("loaded_chunks_total", "counter", "", "Chunks copied slot -> GPU")
    LOADED_BYTES = ("loaded_bytes_total", "counter", "", "Bytes copied slot -> GPU")
    DEMOTED_CHUNKS = ("demoted_chunks_total", "counter", "tier", "Chunks written, slot -> record")
    DEMOTED_BYTES = ("demoted_bytes_total", "counter", "tier", "Payload bytes, slot -> record")
    PROMOTED_CHUNKS = ("promoted_chunks_total", "counter", "tier", "Chunks read, record -> slot")
    PROMOTED_BYTES = ("promoted_bytes_total", "counter", "tier", "Payload bytes, record -> slot")
    HIT_CHUNKS = ("hit_chunks_total", "counter", "tier", "Chunks found, by the tier that had them")
    MISSES = ("misses_total", "counter", "reason", "Chunks that could not be served, by reason")
    EVICTED_CHUNKS = ("evicted_chunks_total", "counter", "tier", "Chunks evicted, by tier")
    DROPPED_DEMOTES = (
        "dropped_demotes_total",
        "counter",
        "reason",
        "Chunks not demoted: queue full, capacity, or I/O error",
    )
    REFUSED_OFFLOADS = (
        "refused_offloads_total",
        "counter",
        "reason",
        "Chunks not offloaded: pins leave no room, or the copy failed",
    )
    PINNED_BYTES = ("pinned_bytes", "gauge", "", "Host memory registered with the device")
    PIN_SECONDS = ("pin_seconds_total", "counter", "", "Time spent registering host memory")
    FAILED_LOADS = ("failed_loads_total", "counter", "reason", "Load jobs that were recomputed")

    STRAY_ANSWERS = ("stray_answers_total", "counter", "", "Answers to no job that is known")

    COLD_STARTS = (
        "cold_starts_total",
        "counter",
        "tier",
        "Tiers that knew other identities alone when they were opened",
    )
    DISCARDED_CATALOGS = (
        "discarded_catalogs_total",
        "counter",
        "tier",
        "Catalogs that were damaged when they were opened, and replaced by empty ones",
    )

    TIER_STATE = (
        "tier_state",
        "gauge",
        "tier",
        "Whether a tier is in use (0), tried again (1) or out of use (2)",
    )
    TIER_TRIPS = ("tier_trips_total", "counter", "tier", "Times a tier was put out of use")

    def __init__(self, metric_name: str, kind: Kind, label: str, help_text: str) -> None:
        self.metric_name = metric_name
        self.kind = kind
        self.label = label
        self.help_text = help_text

    __hash__ = object.__hash__
    """By identity: that of `Enum` is a call in Python, made twice per count."""


class _Shared:
    """What all sums of one `Counters` have in common."""

    __slots__ = ("change_count", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.change_count = 0


class Tally:
    """One sum of `Counters`, for those who add to it often. Thread-safe."""

    __slots__ = ("_shared", "amount", "name")

    def __init__(self, shared: _Shared, name: str) -> None:
        self._shared = shared
        self.name = name
        self.amount: float = 0

    def add(self, amount: float) -> None:
        """Add `amount`; call once per batch, not per chunk."""
        shared = self._shared
        with shared.lock:
            self.amount += amount
            shared.change_count += 1


class Counters:
    """Thread-safe sums per metric and label value."""

    def __init__(self) -> None:
        self._shared = _Shared()
        self._tallies: dict[tuple[Metric, str], Tally] = {}

    @property
    def change_count(self) -> int:
        """Grows with every change, so that whoever asks often sees at once that nothing changed."""
        return self._shared.change_count

    def tally(self, metric: Metric, *, label: str = "") -> Tally:
        """Return the sum of one metric and label value, which starts at 0."""
        name = metric.metric_name + (f'{{{metric.label}="{label}"}}' if label else "")
        with self._shared.lock:
            return self._tallies.setdefault((metric, label), Tally(self._shared, name))

    def add(self, metric: Metric, amount: float = 1, *, label: str = "") -> None:
        """Add `amount` to one metric; call once per batch, not per chunk."""
        if amount:
            tally = self._tallies.get((metric, label)) or self.tally(metric, label=label)
            tally.add(amount)

    def snapshot(self) -> dict[str, float]:
        """Return all sums so far, by `name` or `name{label="value"}`."""
        with self._shared.lock:
            return {tally.name: tally.amount for tally in self._tallies.values()}
