"""System calls that fail by a schedule, or move less than they are asked for."""

from collections.abc import Sequence
from functools import partial

from tierstore.backend.opening import BackendOpener, open_backend
from tierstore.device.system import SystemCalls
from tierstore.faults import Call, Strike, StruckSystem
from tierstore.layout import PAGE_BYTES
from tierstore.testing.faults.schedule import FaultSchedule

__all__ = ["FaultySystem", "ShortIoSystem", "faulty_system_opener"]


class FaultySystem(StruckSystem):
    """System calls of which some raise an OSError as scheduled; half of an allocation is done."""

    def __init__(self, schedule: FaultSchedule, code: int) -> None:
        """`code` is the errno of the failures."""
        self.schedule = schedule
        self.code = code
        super().__init__(_Scheduled(self))


class _Scheduled:
    def __init__(self, system: FaultySystem) -> None:
        self._system = system

    def strike(self, call: Call) -> Strike | None:
        """Count a call; say whether it fails."""
        if not self._system.schedule.strike():
            return None
        if call.name == "database.committed":
            return None  # nothing fails there: it has happened
        if call.name == "allocate":
            return Strike("torn", self._system.code, call.size_bytes // 2)
        return Strike("error", self._system.code)


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
