"""One command on its way through the data plane."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tierstore.backend.record_batch import RecordBatch
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
    Promote,
    TransferDone,
)

__all__ = ["Copy", "Job", "PartIndex", "RecordSpan"]


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
    """Finds the engine blocks that wait for promoted chunks."""

    def __init__(self, load: Load) -> None:
        """Index the chunks that the load's promotes bring, by their slots; no work per chunk."""
        self._parts = load.parts
        self._rows: list[IntArray] = []
        """Per part, the row that waits for each promoted chunk of the job; negative: none."""
        if load.parts and load.promotes:
            promoted = np.concatenate([promote.slots for promote in load.promotes])
            self._rows = [_rows_of(part.slots, promoted) for part in load.parts]

    def resident_parts(self) -> list[LoadPart]:
        """Return the parts of the load that no promote has to fill first."""
        if not self._rows:
            return [part for part in self._parts if len(part.slots)]
        parts = []
        for part, rows in zip(self._parts, self._rows, strict=True):
            ready = np.ones(len(part.slots), bool)
            ready[rows[rows >= 0]] = False
            if ready.any():
                parts.append(_chosen(part, ready))
        return parts

    def parts_of(self, arrived: slice | IntArray) -> list[LoadPart]:
        """Return what may be copied now that these chunks, by index in the job, have arrived."""
        waiting = [
            (part, rows[arrived]) for part, rows in zip(self._parts, self._rows, strict=False)
        ]
        return [_chosen(part, rows[rows >= 0]) for part, rows in waiting if (rows >= 0).any()]


def _rows_of(slots: IntArray, wanted: IntArray) -> IntArray:
    """Return where each wanted slot is among some slots; -1: nowhere."""
    if not len(slots):
        return np.full(len(wanted), -1, np.int64)
    order = np.argsort(slots)
    rows = order[np.searchsorted(slots, wanted, sorter=order).clip(max=len(slots) - 1)]
    return np.where(slots[rows] == wanted, rows, -1)


def _chosen(part: LoadPart, rows: npt.NDArray[np.bool_] | IntArray) -> LoadPart:
    return LoadPart(
        group_idx=part.group_idx, block_ids=part.block_ids[rows], slots=part.slots[rows]
    )


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

    def arrived(self, failed: Collection[int]) -> slice | IntArray:
        """Return the index, within the job, of each record that did not fail."""
        indices = self.indices
        if not failed:
            return slice(indices.start, indices.stop)
        return np.delete(np.arange(indices.start, indices.stop), list(failed))
