"""How the commands of one tier are divided into I/O tasks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from tierstore.executor.job import RecordSpan
from tierstore.transfer import Demote, PlaceArray, Promote

__all__ = ["CutFinder", "Splitter"]

_BATCH_BYTES_MIN = 1 << 20
_BATCH_BYTES_MAX = 4 << 20

CutFinder: TypeAlias = Callable[[PlaceArray], Sequence[int]]
"""Returns where records may be divided: ascending indices, the last one is their count."""


@dataclass(frozen=True, slots=True)
class Splitter:
    """Divides the commands of one tier, so that all threads are busy, and reads overlap copies."""

    thread_count: int
    read_bytes_max: int = _BATCH_BYTES_MAX
    """What one read may hold, unless it is one chunk."""
    find_cuts: CutFinder | None = None
    """Where writes may be divided, and reads are if they are not too long; None: anywhere."""

    def split(
        self, command: Promote | Demote, first: int, chunk_bytes: int, *, has_others: bool = False
    ) -> list[RecordSpan]:
        """Split a command, whose first chunk has index `first` in its job; O(tasks, cuts).

        If the threads have other tasks already (`has_others`), these are as long as they may be:
        each costs a turn of the interpreter, and all threads are busy anyway.
        A read has at most `read_bytes_max`, or one chunk. It is cut within an extent too, at the
        cost of its header page: how long one read takes is what tells a slow device from one that
        hangs, so that none may be much longer than others.
        """
        batches = self.batches(command.places, chunk_bytes, has_others=has_others)
        if isinstance(command, Promote):
            count_max = max(1, min(_BATCH_BYTES_MAX, self.read_bytes_max) // chunk_bytes)
            batches = [
                (cut, min(cut + count_max, stop))
                for start, stop in batches
                for cut in range(start, stop, count_max)
            ]
        return [RecordSpan(command, start, stop, first) for start, stop in batches]

    def batches(
        self, places: PlaceArray, chunk_bytes: int, *, has_others: bool = False
    ) -> list[tuple[int, int]]:
        """Return half-open runs [start, stop) of records to write, one per I/O task."""
        count = len(places)
        target = count * chunk_bytes // (2 * self.thread_count)
        target = min(max(target, _BATCH_BYTES_MIN), _BATCH_BYTES_MAX)
        target = _BATCH_BYTES_MAX if has_others else target
        if self.find_cuts is None:
            return list(pairwise([*range(0, count, max(1, target // chunk_bytes)), count]))
        batches = []
        start = 0
        for cut in self.find_cuts(places):
            if (cut - start) * chunk_bytes >= target or cut == count:
                batches.append((start, cut))
                start = cut
        return batches
