"""What the tier stack answers: where chunks are, and what was set aside for a transfer."""

from dataclasses import dataclass
from enum import IntEnum

from tierstore.key import OffloadKey
from tierstore.transfer import IntArray, JobId, Promote

__all__ = ["ChunkState", "LoadReservation", "OffloadReservation"]


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

    group_idx: int
    indices: tuple[int, ...]
    """Positions in the asked keys, ascending."""
    keys: tuple[OffloadKey, ...]
    slots: IntArray


@dataclass(frozen=True, slots=True)
class LoadReservation:
    """Pinned or arriving slots for every asked key, and the promotes that fill the latter."""

    job_id: JobId
    slots: tuple[IntArray, ...]
    """Per asked group, in the order of its keys."""
    promotes: tuple[Promote, ...]
    pinned: tuple[OffloadKey, ...]
    """The chunks that were resident already, head first."""
