"""Backends whose calls fail, hang or lie, whatever they ask their device through."""

import errno
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from tierstore.backend.opening import BackendOpener, offer_pool, open_backend
from tierstore.backend.protocol import Backend, PoolRegion, RecordIo
from tierstore.config import SecondaryConfig
from tierstore.errors import BackendError
from tierstore.faults import Call, FaultPlan, Strike
from tierstore.manifest import Manifest
from tierstore.testing.faults.schedule import FaultSchedule
from tierstore.transfer import FailureReason, PageRun

__all__ = [
    "BACKEND_CALLS",
    "FaultyBackend",
    "PlannedBackend",
    "faulty_backend_opener",
    "faulty_opener",
]

BACKEND_CALLS = (
    "backend.open",
    "backend.read",
    "backend.release",
    "backend.sync",
    "backend.write",
)
"""Names of the calls of a backend, in rules."""

_FULL = {errno.ENOSPC, errno.EDQUOT}
_GARBAGE = b"\xee"


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

    def lost_segments(self, relied_on: AbstractSet[int] = frozenset()) -> AbstractSet[int]:
        """Return what the backend says."""
        return self._backend.lost_segments(relied_on)

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


class PlannedBackend:
    """A backend whose calls go wrong by a plan. See `Backend`; any one may be wrapped.

    A write that fails or is torn moves its first half. A write or a release that is lost reports
    success: no record may be served wrong for it, and no check of a store can excuse it.
    """

    def __init__(self, backend: Backend, plan: FaultPlan, *, tier: str) -> None:
        """Wrap `backend`; `tier` is the name of its tier in the plan's trace."""
        self._backend = backend
        self._plan = plan
        self._tier = tier

    def open(self) -> None:
        """Open the backend.

        Raises:
            BackendError: by the plan.
        """
        self._require("open")
        self._backend.open()

    def write(self, records: Sequence[RecordIo]) -> dict[int, FailureReason]:
        """Write all, the first half, or nothing."""
        strike = self._ask("write", sum(len(record.slot) for record in records))
        if strike is None:
            return self._backend.write(records)
        if strike.kind == "lose":
            return {}
        self._backend.write(records[: len(records) // 2])
        return dict.fromkeys(range(len(records)), _reason_of(strike))

    def read(self, records: Sequence[RecordIo]) -> dict[int, FailureReason]:
        """Read, or fill the slots with garbage and fail all."""
        strike = self._ask("read")
        if strike is None:
            return self._backend.read(records)
        for record in records:
            record.slot[:] = _GARBAGE * len(record.slot)
        return dict.fromkeys(range(len(records)), _reason_of(strike))

    def release(
        self, runs: Sequence[PageRun], empty_segments: Sequence[int]
    ) -> FailureReason | None:
        """Release all, a part, or nothing."""
        strike = self._ask("release")
        if strike is None:
            return self._backend.release(runs, empty_segments)
        if strike.kind == "lose":
            return None
        self._backend.release(runs[: len(runs) // 2], ())
        return _reason_of(strike)

    def sync(self) -> None:
        """Flush, or refuse, or only say so.

        Raises:
            BackendError: by the plan.
        """
        if self._require("sync") is None:
            self._backend.sync()

    def lost_segments(self, relied_on: AbstractSet[int] = frozenset()) -> AbstractSet[int]:
        """Return what the backend says."""
        return self._backend.lost_segments(relied_on)

    def close(self) -> None:
        """Close the backend."""
        self._backend.close()

    def _require(self, name: str) -> Strike | None:
        strike = self._ask(name)
        if strike is not None and strike.kind != "lose":
            raise BackendError(f"injected fault: {name} {self._tier}")
        return strike

    def _ask(self, name: str, size_bytes: int = 0) -> Strike | None:
        strike = self._plan.strike(Call(f"backend.{name}", self._tier, "", size_bytes))
        if strike is not None and strike.kind in {"memory", "kill", "exit"}:
            strike.fail()
        return strike


def faulty_backend_opener(
    plan: FaultPlan, open_backend: BackendOpener = open_backend
) -> BackendOpener:
    """Return what `TierStore.open` takes as `open_backend`; opening is a call of the plan, too."""

    def open_planned(
        config: SecondaryConfig,
        manifest: Manifest,
        *,
        rank: int,
        rank_count: int,
        pool: PoolRegion | None = None,
    ) -> Backend:
        opener = open_backend if pool is None else offer_pool(open_backend, pool)
        if not plan.applies_to(config.name):
            return opener(config, manifest, rank=rank, rank_count=rank_count)
        strike = plan.strike(Call("backend.open", config.name))
        if strike is not None:
            raise BackendError(f"injected fault: open {config.name}")
        backend = opener(config, manifest, rank=rank, rank_count=rank_count)
        return PlannedBackend(backend, plan, tier=config.name)

    return open_planned


def _reason_of(strike: Strike) -> FailureReason:
    return FailureReason.FULL if strike.code in _FULL else FailureReason.IO_ERROR
