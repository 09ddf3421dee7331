"""One command on its way through the data plane."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import numpy as np

from tierstore.backend.record_batch import RecordBatch
from tierstore.codec.record import parse_places
from tierstore.dma.protocol import ComputeMark
from tierstore.executor.progress import SpanRead
from tierstore.layout import PAGE_BYTES
from tierstore.transfer import (
    Demote,
    FailureReason,
    IntArray,
    JobId,
    Load,
    LoadPart,
    Place,
    Promote,
    TransferDone,
)

__all__ = ["Copy", "Job", "PartIndex", "RecordSpan", "split_batches", "split_spans"]

_BATCH_BYTES_MIN = 1 << 20
_BATCH_BYTES_MAX = 4 << 20


@dataclass(slots=True)
class Job:
    """What is still outstanding of a command, and what went wrong so far."""

    job_id: JobId
    reads: dict[int, SpanRead] = field(default_factory=dict)
    """Reads that have not ended, by their first index; only reads have a deadline."""
    tasks_left: int = 0
    copies_left: int = 0
    after: ComputeMark | None = None
    """The engine's work that a load's copies to blocks come after."""
    ok: bool = True
    failed: dict[int, FailureReason] = field(default_factory=dict)
    cause: str = ""
    """What the system called the last failure of a write."""
    abandoned: bool = False
    """Reads were given up: nothing more may be copied to the engine's blocks."""

    def is_settled(self) -> bool:
        """Return whether no task and no copy is outstanding."""
        return self.tasks_left == 0 and self.copies_left == 0

    def is_overdue(self, now: float) -> bool:
        """Return whether nothing is outstanding but reads that make no progress.

        A healthy read of another tier is waited for, since its own deadline bounds it; a copy too.
        """
        return (
            bool(self.reads)
            and not self.abandoned
            and self.tasks_left == len(self.reads)
            and self.copies_left == 0
            and all(read.is_overdue(now) for read in self.reads.values())
        )

    def abandon(self) -> None:
        """Give up the reads that make no progress.

        Those that wait for a thread never begin: their slots are free at once. The others may
        write to their slots for as long as they hang: a second answer follows when they have ended.
        """
        self.abandoned = True
        for first, read in list(self.reads.items()):
            if read.began_at is None:
                del self.reads[first]
                self.tasks_left -= 1
                self.failed.update(dict.fromkeys(read.indices, FailureReason.STALLED))

    def answer_late(self) -> TransferDone:
        """Return the first answer of an abandoned job: some of its reads still hang."""
        late = {i: FailureReason.DEADLINE for read in self.reads.values() for i in read.indices}
        return TransferDone(job_id=self.job_id, ok=False, failed=self.failed | late)

    def answer(self) -> TransferDone:
        """Return the last answer, that of a settled job."""
        return TransferDone(
            job_id=self.job_id,
            ok=self.ok and not self.failed,
            failed=dict(self.failed),
            cause=self.cause,
        )


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy on its way between GPU and slots."""

    job: Job
    offload_count: int
    """Chunks of an offload; 0 for a load."""


class PartIndex:
    """Finds the engine blocks that wait for promoted slots."""

    def __init__(self, load: Load) -> None:
        """Index the slots that the load's promotes fill. O(promoted chunks)."""
        promoted = {slot for promote in load.promotes for slot in promote.slots.tolist()}
        self._parts = load.parts
        self._rows = {
            slot: (part_idx, row)
            for part_idx, part in enumerate(load.parts)
            for row, slot in enumerate(part.slots.tolist())
            if slot in promoted
        }

    def resident_parts(self) -> list[LoadPart]:
        """Return the parts of the load that no promote has to fill first."""
        rows_waiting: dict[int, list[int]] = {}
        for part_idx, row in self._rows.values():
            rows_waiting.setdefault(part_idx, []).append(row)
        parts = []
        for part_idx, part in enumerate(self._parts):
            ready = np.ones(len(part.slots), bool)
            ready[rows_waiting.get(part_idx, [])] = False
            if ready.any():
                parts.append(
                    LoadPart(
                        group_idx=part.group_idx,
                        block_ids=part.block_ids[ready],
                        slots=part.slots[ready],
                    )
                )
        return parts

    def parts_of(self, slots: IntArray) -> list[LoadPart]:
        """Return what may be copied now that these slots are filled."""
        rows: dict[int, list[int]] = {}
        for slot in slots.tolist():
            found = self._rows.get(slot)
            if found is not None:
                rows.setdefault(found[0], []).append(found[1])
        return [
            LoadPart(
                group_idx=self._parts[part_idx].group_idx,
                block_ids=self._parts[part_idx].block_ids[chosen],
                slots=self._parts[part_idx].slots[chosen],
            )
            for part_idx, chosen in rows.items()
        ]


@dataclass(frozen=True, slots=True)
class RecordSpan:
    """The records [start, stop) of a promote or demote: what one I/O task moves."""

    command: Promote | Demote
    start: int
    stop: int
    first: int
    """Index, within its job, of the command's first chunk."""

    @property
    def record_count(self) -> int:
        """How many records the span has."""
        return self.stop - self.start

    @property
    def indices(self) -> range:
        """The index of each record within the job."""
        return range(self.first + self.start, self.first + self.stop)

    def records(self, pool: memoryview, slot_bytes: Sequence[int]) -> RecordBatch:
        """Pair the records with their slots in `pool`; `slot_bytes` is indexed by group."""
        chosen = slice(self.start, self.stop)
        return RecordBatch.in_pool(
            self.command.keys[chosen],
            self.command.places[chosen],
            pool,
            self.command.slots[chosen] * PAGE_BYTES,
            slot_bytes[self.command.group_idx],
        )

    def all_failed(self) -> dict[int, FailureReason]:
        """Return all records by their index in the span, as if the device had refused them."""
        return dict.fromkeys(range(self.record_count), FailureReason.IO_ERROR)

    def slots_without(self, failed: Container[int]) -> IntArray:
        """Return the slots of the records that did not fail."""
        slots = self.command.slots[self.start : self.stop]
        return slots[[i for i in range(self.record_count) if i not in failed]]


def split_batches(
    places: tuple[Place, ...], chunk_bytes: int, thread_count: int
) -> list[tuple[int, int]]:
    """Split records into half-open runs [start, stop), one per I/O task.

    Cuts only between extents, so that an extent is written by one call and read with its header
    page. Batches are small enough to keep all threads busy and to overlap reads with copies.
    """
    fields = parse_places(places)  # of a damaged catalog they may be anything
    extents = fields["segment"].astype(np.int64) << 32 | fields["header_page"]
    cuts = [*(np.flatnonzero(extents[1:] != extents[:-1]) + 1).tolist(), len(places)]
    target = len(places) * chunk_bytes // (2 * thread_count)
    target = min(max(target, _BATCH_BYTES_MIN), _BATCH_BYTES_MAX)
    batches = []
    start = 0
    for cut in cuts:
        if (cut - start) * chunk_bytes >= target or cut == len(places):
            batches.append((start, cut))
            start = cut
    return batches


def split_spans(
    command: Promote | Demote,
    first: int,
    chunk_bytes: int,
    thread_count: int,
    read_bytes_max: int = _BATCH_BYTES_MAX,
) -> list[RecordSpan]:
    """Split a command, whose first chunk has index `first` in its job, by `split_batches`.

    A read has at most `read_bytes_max`, or one chunk. It is cut within an extent too, at the cost
    of its header page: how long one read takes is what tells a slow device from one that hangs, so
    that none may be much longer than others.
    """
    batches = split_batches(command.places, chunk_bytes, thread_count)
    if isinstance(command, Promote):
        count_max = max(1, min(_BATCH_BYTES_MAX, read_bytes_max) // chunk_bytes)
        batches = [
            (cut, min(cut + count_max, stop))
            for start, stop in batches
            for cut in range(start, stop, count_max)
        ]
    return [RecordSpan(command, start, stop, first) for start, stop in batches]
