"""Faults on demand: wrappers that let the n-th call of a backend, or of the kernel, fail.

Run a scenario with n = 1, 2, ... until `FaultSchedule.has_struck` stays False: then every call of
it has failed once.

    schedule = FaultSchedule(fail_at=n)
    with TierStore.open(config, manifest, open_backend=faulty_opener(schedule)) as store: ...

    system = FaultySystem(FaultSchedule(fail_at=n), errno.EIO)
    FileBackend(directory, rank=0, system=system)

    faults = ReadFaults()
    faults.hang(keys)
    TierStore.open(config, manifest, open_backend=unreadable_opener({"disk": faults}))
"""

import math
import os
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from tierstore.backend.opening import BackendOpener, open_backend
from tierstore.backend.protocol import Backend, RecordIo
from tierstore.config import SecondaryConfig
from tierstore.errors import BackendError
from tierstore.key import OffloadKey
from tierstore.layout import PAGE_BYTES
from tierstore.manifest import Manifest
from tierstore.system import DatabasePoint, SystemCalls
from tierstore.transfer import FailureReason, PageRun, Place

__all__ = [
    "FaultSchedule",
    "FaultyBackend",
    "FaultySystem",
    "ReadFaults",
    "ShortIoSystem",
    "UnreadableBackend",
    "faulty_opener",
    "faulty_system_opener",
    "unreadable_opener",
]


class FaultSchedule:
    """Counts calls and says which of them fail. Thread-safe; may be shared by many wrappers."""

    def __init__(self, fail_at: int, *, fail_count: float = 1) -> None:
        """Let calls number `fail_at` (from 1) and following fail, `fail_count` of them.

        `fail_count=math.inf`: the device is dead from then on, until `heal`.
        """
        self._lock = threading.Lock()
        self._fail_at = float(fail_at)
        self._fail_count = fail_count
        self._call_count = 0
        self._struck_count = 0

    @property
    def call_count(self) -> int:
        """How many calls were made so far."""
        return self._call_count

    @property
    def has_struck(self) -> bool:
        """Whether any call failed."""
        return self._struck_count > 0

    def strike(self) -> bool:
        """Count one call; True: it shall fail."""
        with self._lock:
            self._call_count += 1
            strikes = self._fail_at <= self._call_count < self._fail_at + self._fail_count
            self._struck_count += strikes
            return strikes

    def fail_from_now(self) -> None:
        """Let the next call fail, and `fail_count` of them in all."""
        with self._lock:
            self._fail_at = self._call_count + 1.0

    def heal(self) -> None:
        """Let no further call fail."""
        with self._lock:
            self._fail_at = math.inf


class FaultyBackend:
    """A backend whose calls fail as scheduled. See `Backend`.

    A failing write moves only its first half before it fails, so that torn extents occur.
    """

    def __init__(
        self,
        backend: Backend,
        fail_at: int | FaultSchedule,
        *,
        reason: FailureReason = FailureReason.IO_ERROR,
    ) -> None:
        """Wrap `backend`; `fail_at` counts its calls of all methods but `open` and `close`."""
        self._backend = backend
        self._reason = reason
        self.schedule = FaultSchedule(fail_at) if isinstance(fail_at, int) else fail_at

    def open(self) -> None:
        """Open the backend."""
        self._backend.open()

    def write(self, records: Sequence[RecordIo]) -> dict[int, FailureReason]:
        """Write, or write the first half and fail all."""
        if self.schedule.strike():
            self._backend.write(records[: len(records) // 2])
            return dict.fromkeys(range(len(records)), self._reason)
        return self._backend.write(records)

    def read(self, records: Sequence[RecordIo]) -> dict[int, FailureReason]:
        """Read, or fill the slots with garbage and fail all."""
        if self.schedule.strike():
            for record in records:
                record.slot[:] = b"\xee" * len(record.slot)
            return dict.fromkeys(range(len(records)), self._reason)
        return self._backend.read(records)

    def release(
        self, runs: Sequence[PageRun], empty_segments: Sequence[int]
    ) -> FailureReason | None:
        """Release, or release a part and fail."""
        if self.schedule.strike():
            self._backend.release(runs[: len(runs) // 2], ())
            return self._reason
        return self._backend.release(runs, empty_segments)

    def sync(self) -> None:
        """Flush, or refuse.

        Raises:
            BackendError: as scheduled.
        """
        if self.schedule.strike():
            raise BackendError("injected fault: sync")
        self._backend.sync()

    def close(self) -> None:
        """Close the backend."""
        self._backend.close()


def faulty_opener(
    schedule: FaultSchedule, *, reason: FailureReason = FailureReason.IO_ERROR
) -> BackendOpener:
    """Return what `TierStore.open` takes as `open_backend`; opening counts as a call too."""

    def open_faulty(
        config: SecondaryConfig, manifest: Manifest, *, rank: int, rank_count: int
    ) -> Backend:
        if schedule.strike():
            raise BackendError(f"injected fault: open {config.name}")
        backend = open_backend(config, manifest, rank=rank, rank_count=rank_count)
        return FaultyBackend(backend, schedule, reason=reason)

    return open_faulty


class ReadFaults:
    """Which records cannot be read, and why. Thread-safe; may change while reads are under way.

    A fault lies where the record is: written anew in another place, its chunk can be read.
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


class FaultySystem(SystemCalls):
    """System calls of which some raise an OSError as scheduled."""

    def __init__(self, schedule: FaultSchedule, code: int) -> None:
        """`code` is the errno of the failures."""
        self.schedule = schedule
        self.code = code

    def open(self, path: Path | str, flags: int, directory: int | None = None) -> int:
        """Open, or fail."""
        self._strike()
        return super().open(path, flags, directory)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read, or fail."""
        self._strike()
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write, or fail."""
        self._strike()
        return super().pwritev(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, size_bytes: int) -> None:
        """Reserve half of the blocks and fail, or reserve all."""
        if self.schedule.strike():
            super().allocate(fd, offset, size_bytes // 2)
            raise OSError(self.code, os.strerror(self.code))
        super().allocate(fd, offset, size_bytes)

    def punch_hole(self, fd: int, offset: int, size_bytes: int) -> None:
        """Punch, or fail."""
        self._strike()
        super().punch_hole(fd, offset, size_bytes)

    def flush(self, fd: int) -> None:
        """Flush, or fail."""
        self._strike()
        super().flush(fd)

    def unlink(self, path: Path | str, directory: int | None = None) -> None:
        """Unlink, or fail."""
        self._strike()
        super().unlink(path, directory)

    def truncate(self, fd: int, size_bytes: int) -> None:
        """Truncate, or fail."""
        self._strike()
        super().truncate(fd, size_bytes)

    def reach(self, point: DatabasePoint) -> None:
        """Pass, or fail."""
        self._strike()
        super().reach(point)

    def copy_mapped(self, address: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Copy, or fail."""
        self._strike()
        return super().copy_mapped(address, buffers, offset)

    def _strike(self) -> None:
        if self.schedule.strike():
            raise OSError(self.code, os.strerror(self.code))


def faulty_system_opener(schedule: FaultSchedule, code: int) -> BackendOpener:
    """Return what `TierStore.open` takes as `open_backend`: segment files over failing calls.

    One schedule counts the system calls of all tiers; `code` is the errno of the failures.
    """
    return partial(open_backend, system=FaultySystem(schedule, code))


class ShortIoSystem(SystemCalls):
    """A kernel that moves at most `bytes_max` bytes per call, as it may at any time."""

    def __init__(self, bytes_max: int = PAGE_BYTES) -> None:
        """`bytes_max` is at least 1; O_DIRECT wants whole pages."""
        self._bytes_max = bytes_max

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read the first bytes only."""
        return super().preadv(fd, self._first(buffers), offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write the first bytes only."""
        return super().pwritev(fd, self._first(buffers), offset)

    def copy_mapped(self, address: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Copy the first bytes only."""
        return super().copy_mapped(address, self._first(buffers), offset)

    def _first(self, buffers: Sequence[memoryview]) -> list[memoryview]:
        """Cut the buffers behind `bytes_max` bytes."""
        chosen: list[memoryview] = []
        left = self._bytes_max
        for buffer in buffers:
            chosen.append(buffer[:left])
            left -= len(chosen[-1])
            if not left:
                break
        return chosen
