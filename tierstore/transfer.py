"""The messages between the two planes.

The control plane (planner, or the embedded store) sends commands; the data plane (executor) moves
bytes and answers each command with a `TransferDone`. Messages cross a process boundary
once per engine step, so they hold flat arrays and raw bytes, and pickle small.

    Offload   GPU blocks -> slots                 Demote    slots -> records
    Load      [records -> slots ->] GPU blocks    Promote   the part of a load in brackets
    Release   the bytes of evicted records go back to the file system

A slot is named by the index of its first 4 KiB page in the primary pool, so that a slot's address
is `pool + slot * PAGE_BYTES` whatever its size class. A `Place` names a record; a command has the
places of its records as one array.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType, TypeAlias

import numpy as np
import numpy.typing as npt

from tierstore.key import OffloadKey

__all__ = [
    "Command",
    "Demote",
    "FailureReason",
    "IntArray",
    "JobId",
    "Load",
    "LoadPart",
    "Offload",
    "PageRun",
    "Place",
    "PlaceArray",
    "Promote",
    "Release",
    "StepPlan",
    "TransferDone",
    "place_array",
]

JobId = NewType("JobId", int)
IntArray = npt.NDArray[np.int64]

Place = NewType("Place", bytes)
"""Where a record lies in its tier: opaque to all but the two halves of that tier.

For a tier on this machine the 24 bytes of `record.PLACE_DTYPE`.
"""

PlaceArray: TypeAlias = npt.NDArray[np.void] | npt.NDArray[np.object_]
"""Places of records, shape (records,), not to be changed: items as wide as a place, or bytes
objects where a tier's places differ in width."""


def place_array(places: Sequence[Place] | PlaceArray) -> PlaceArray:
    """Return places as one array, in their order; an array is returned as it is.

    Costs about 20 ns per place of one width.
    """
    if isinstance(places, np.ndarray):
        return places
    if not places:
        return np.empty(0, "V1")
    width = len(places[0])
    if width and set(map(len, places)) == {width}:
        return np.frombuffer(b"".join(places), f"V{width}")
    each = np.empty(len(places), np.object_)
    each[:] = places
    return each


class FailureReason(Enum):
    """Why a chunk was not moved; the label of the metrics."""

    ABSENT = "absent"
    """The record is gone: evicted meanwhile, segment removed, file truncated."""
    CORRUPT = "corrupt"
    """Length, key or checksum do not match; the record is removed."""
    IO_ERROR = "io_error"
    FULL = "full"
    CROWDED = "crowded"
    """There is room, but not enough of it in one piece."""
    DEADLINE = "deadline"
    """The read makes no progress and may still write to its slot: a second answer settles it."""
    STALLED = "stalled"
    """The tier stands still: the read never began, and its slot is as it was."""
    CLOSED = "closed"
    LAYOUT = "layout"
    OUTDATED = "outdated"
    """The engine computes its request otherwise than the chunk was computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Copy GPU blocks to slots. The blocks must not be rewritten before the job is done."""

    job_id: JobId
    group_idx: int
    block_ids: IntArray
    """Shape (chunks, blocks_per_chunk)."""
    slots: IntArray
    """Shape (chunks,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promote:
    """The part of a load that fills slots from records, each verified before its slot is used."""

    tier_idx: int
    """Index into `StoreConfig.secondary`."""
    group_idx: int
    keys: tuple[OffloadKey, ...]
    places: PlaceArray
    """Of each key, in order; opaque to all but the backend of the tier."""
    slots: IntArray
    """Of each key, in order."""

    def into(self, slots: IntArray) -> "Promote":
        """Return the same promote with other slots."""
        return Promote(
            tier_idx=self.tier_idx,
            group_idx=self.group_idx,
            keys=self.keys,
            places=self.places,
            slots=slots,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPart:
    """Chunks of one group that a load copies from slots to GPU blocks."""

    group_idx: int
    block_ids: IntArray
    """Shape (chunks, blocks_per_chunk); a negative id means: this block is not wanted."""
    slots: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Copy slots to GPU blocks, after the promotes that fill some of them.

    All or nothing for the request: if any chunk fails, the job fails, but every promoted chunk
    that did arrive becomes resident (`TransferDone.failed` lists only those that did not).
    """

    job_id: JobId
    parts: tuple[LoadPart, ...]
    promotes: tuple[Promote, ...] = ()
    """The keys of all of them in order are what `failed` indexes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demote:
    """Write slots to records at reserved places."""

    job_id: JobId
    tier_idx: int
    group_idx: int
    keys: tuple[OffloadKey, ...]
    places: PlaceArray
    """Of each key, in order. Records of one extent are adjacent and in order."""
    slots: IntArray
    owner: int
    """Whose places these are (`catalog.owners`): nothing is written once it is taken for dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRun:
    """Half-open run of pages [first_page, first_page + page_count) of one segment."""

    segment: int
    first_page: int
    page_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Give the bytes of evicted or aborted records back: punch holes, unlink empty segments."""

    job_id: JobId
    tier_idx: int
    runs: tuple[PageRun, ...]
    empty_segments: tuple[int, ...] = ()
    """Segments without a live or reserved record: unlink them whole."""


Command = Offload | Load | Demote | Release


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What the data plane shall do around one engine step."""

    commands: tuple[Command, ...] = ()
    fence_job_ids: tuple[JobId, ...] = ()
    """Offloads that must have left the GPU before this step writes to any block."""

    def __bool__(self) -> bool:
        return bool(self.commands or self.fence_job_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferDone:
    """The answer to a command.

    `failed` indexes the command's chunks: the slots of an offload, the keys of a demote, the
    concatenated keys of a load's promotes. A load that could not reach the GPU at all
    has `ok` False even if `failed` is empty; index 0 of one without promotes only says why.

    Each command has one answer, with one exception: chunks of a load that are reported as
    `DEADLINE` are still being read, so their slots stay reserved. When the last of them has
    settled, a second answer of the same job says which of them failed in the end.
    """

    job_id: JobId
    ok: bool = True
    failed: dict[int, FailureReason] = field(default_factory=dict)
    cause: str = ""
    """What the system called the last failure, such as `EIO`; empty: it is not known."""
