"""Records that cannot be read, chosen by their key."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tierstore.backend.opening import BackendOpener, open_backend
from tierstore.backend.protocol import Backend, RecordIo
from tierstore.config import SecondaryConfig
from tierstore.key import OffloadKey
from tierstore.manifest import Manifest
from tierstore.testing.faults.backend import FaultyBackend
from tierstore.testing.faults.schedule import FaultSchedule
from tierstore.transfer import FailureReason, Place

__all__ = ["ReadFaults", "UnreadableBackend", "unreadable_opener"]


class ReadFaults:
    """Which records cannot be read, and why. Thread-safe; may change while reads are under way.

    A fault lies where the record is: written again in another place, its chunk can be read.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reasons: dict[OffloadKey, FailureReason] = {}
        self._hung: dict[OffloadKey, threading.Event] = {}
        self._places: dict[OffloadKey, Place] = {}
        self._read_counts: Counter[OffloadKey] = Counter()

    def fail(self, keys: Iterable[OffloadKey], reason: FailureReason) -> None:
        """Let the records of these keys fail; those that hang fail when they go on."""
        with self._lock:
            self._reasons.update(dict.fromkeys(keys, reason))

    def hang(self, keys: Iterable[OffloadKey]) -> None:
        """Let reads of these keys wait for `go_on` or `heal`, wherever their records lie."""
        gate = threading.Event()
        with self._lock:
            self._hung.update(dict.fromkeys(keys, gate))

    def go_on(self) -> None:
        """End all reads that hang; none hangs from now on."""
        with self._lock:
            for gate in self._hung.values():
                gate.set()
            self._hung.clear()

    def heal(self) -> None:
        """Let all records be read, those that hang now too."""
        with self._lock:
            self._reasons.clear()
            self._places.clear()
        self.go_on()

    def read_count(self, key: OffloadKey) -> int:
        """Return how often a read of a key was begun."""
        with self._lock:
            return self._read_counts[key]

    def reason_of(self, record: RecordIo) -> FailureReason | None:
        """Wait as long as the record hangs; return why it cannot be read, if it cannot."""
        with self._lock:
            self._read_counts[record.key] += 1
            gate = self._hung.get(record.key)
        if gate is not None:
            gate.wait()
        with self._lock:
            reason = self._reasons.get(record.key)
            if reason is None or self._places.setdefault(record.key, record.place) != record.place:
                return None
            return reason


class UnreadableBackend(FaultyBackend):
    """A backend of which some records cannot be read; one call may have several outcomes."""

    def __init__(self, backend: Backend, faults: ReadFaults) -> None:
        """Wrap `backend`; `faults` may be shared by many wrappers."""
        super().__init__(backend, FaultSchedule(1, fail_count=0))
        self._faults = faults

    def read(self, records: Sequence[RecordIo]) -> dict[int, FailureReason]:
        """Read; fill the slots of records that cannot be read with garbage."""
        reasons = [self._faults.reason_of(record) for record in records]
        failed = super().read(records)
        for i, (record, reason) in enumerate(zip(records, reasons, strict=True)):
            if reason is not None:
                record.slot[:] = b"\xee" * len(record.slot)
                failed[i] = reason
        return failed


def unreadable_opener(faults: Mapping[str, ReadFaults]) -> BackendOpener:
    """Return what `TierStore.open` takes as `open_backend`; `faults` are by the tier's name."""

    def open_unreadable(
        config: SecondaryConfig, manifest: Manifest, *, rank: int, rank_count: int
    ) -> Backend:
        backend = open_backend(config, manifest, rank=rank, rank_count=rank_count)
        return UnreadableBackend(backend, faults[config.name]) if config.name in faults else backend

    return open_unreadable
