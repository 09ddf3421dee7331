"""All tiers of one engine, as one place to ask and one place to reserve.

The stack is the control plane below the planner and the embedded store: it knows keys, slots and
places, never bytes. It takes no lock and is called by one thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tierstore.key import OffloadKey
from tierstore.transfer import Command, IntArray, JobId, Promote, TransferDone

__all__ = ["ChunkState", "LoadReservation", "OffloadReservation", "TierStack"]


class ChunkState(IntEnum):
    """Where a chunk is."""

    ABSENT = 0
    ARRIVING = 1
    """Reserved in the primary tier, bytes on the way: ask again later."""
    RECORDED = 2
    """Only in a secondary tier; can be loaded."""
    RESIDENT = 3
    """In a primary slot; can be loaded."""


@dataclass(frozen=True, slots=True)
class OffloadReservation:
    """Slots for the keys that were neither resident nor arriving nor refused."""

    indices: tuple[int, ...]
    """Positions in the asked keys, ascending."""
    keys: tuple[OffloadKey, ...]
    slots: IntArray


@dataclass(frozen=True, slots=True)
class LoadReservation:
    """Pinned or arriving slots for every asked key, and the promotes that fill the arriving ones."""

    job_id: JobId
    slots: tuple[IntArray, ...]
    """Per asked group, in the order of its keys."""
    promotes: tuple[Promote, ...]
    pinned: tuple[OffloadKey, ...]


class TierStack:
    """Primary tier over secondary tiers, with the cascade between them."""

    def new_job_id(self) -> JobId:
        """Return an id that was not used before."""
        raise NotImplementedError

    def locate(self, keys: Sequence[OffloadKey]) -> list[ChunkState]:
        """Say where each chunk is; changes nothing, touches nothing."""
        raise NotImplementedError

    def match_prefix(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many leading chunks can be loaded now (resident or recorded)."""
        raise NotImplementedError

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Record a use of chunks of one prefix, given head first."""
        raise NotImplementedError

    def reserve_offload(self, group_idx: int, keys: Sequence[OffloadKey]) -> OffloadReservation:
        """Reserve slots for chunks that are not in the primary tier yet.

        Chunks of one prefix come head first. What finds no room (pins) is left out from the tail.
        """
        raise NotImplementedError

    def finish_offload(
        self, reservation: OffloadReservation, failed: Sequence[int] | set[int] | dict[int, object]
    ) -> None:
        """Commit the chunks that arrived, abort the failed ones (indices into the reservation)."""
        raise NotImplementedError

    def reserve_load(
        self, groups: Sequence[tuple[int, Sequence[OffloadKey]]]
    ) -> LoadReservation | None:
        """Pin resident chunks and reserve slots for recorded ones, all or nothing.

        `groups` are (group index, keys head first). None: a chunk is absent or arriving, or pins
        leave no room; nothing was changed then, but for evictions.
        """
        raise NotImplementedError

    def finish_load(self, reservation: LoadReservation, done: TransferDone) -> None:
        """Unpin, commit what was promoted, abort and quarantine what failed, touch the chunks."""
        raise NotImplementedError

    def commands(self) -> list[Command]:
        """Return the demotes and releases that became possible since the last call."""
        raise NotImplementedError

    def complete(self, done: TransferDone) -> bool:
        """Take the answer to a command of `commands`; False: it is not one of them."""
        raise NotImplementedError

    def has_work(self) -> bool:
        """Say whether demotes or releases are waiting for `commands` or `complete`."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget the primary tier's unpinned chunks and make all recorded chunks of this namespace
        unreachable (weights changed).
        """
        raise NotImplementedError
