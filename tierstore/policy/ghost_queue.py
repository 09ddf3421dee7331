"""Keys that left, as numbers in the order in which they left."""

from collections.abc import Iterable, Iterator, Sequence
from sys import getsizeof

__all__ = ["GhostQueue"]

_TABLE_BYTES_PER_GHOST_MAX = 80
_TABLE_BYTES_SLACK = 4096
_SLACK = 1024
_PLACES_MIN = 256


class GhostQueue:
    """Distinct numbers, oldest first. No lock; the caller keeps the preconditions.

    A set and a list take less time than a `dict`, which has to be rebuilt for every third of its
    ghosts that come and go, and about the same memory.

        order    a b c d e b f      the ghosts as they came
                     |     |        before `start` the oldest, which were dropped
                     |     `gone` once: the first b left otherwise, then came again
    """

    __slots__ = ("_gone", "_order", "_start", "members")

    def __init__(self) -> None:
        self.members: set[int] = set()
        """Only to be read. Get it again after every change, which may replace it."""
        self._order: list[int] = []
        self._start = 0
        self._gone: dict[int, int] = {}
        """How many of a ghost's places in `_order` it has left: the first ones."""

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[int]:
        return iter(self.peek(len(self.members)))

    def push(self, ghosts: Sequence[int]) -> None:
        """Append ghosts that are not in the queue, in order, as the youngest."""
        members = self.members
        members.update(ghosts)
        self._order += ghosts
        if getsizeof(members) > _TABLE_BYTES_PER_GHOST_MAX * len(members) + _TABLE_BYTES_SLACK:
            self.members = set(members)  # a set grows fourfold

    def peek(self, count: int) -> list[int]:
        """Return the `count` oldest ghosts, fewer if there are fewer."""
        while True:
            oldest = self._order[self._start : self._start + count]
            if not self._gone or self._gone.keys().isdisjoint(oldest):
                return oldest
            self._forget_places(max(count, _PLACES_MIN))

    def drop_oldest(self, count: int) -> None:
        """Remove the `count` oldest ghosts, or all if there are fewer."""
        oldest = self.peek(count)
        self.members.difference_update(oldest)
        self._start += len(oldest)
        self._shorten()

    def remove(self, ghosts: Iterable[int]) -> None:
        """Remove those of the ghosts that are in the queue."""
        present = self.members.intersection(ghosts)
        if not present:
            return
        self.members -= present
        gone = self._gone
        for ghost in present:
            gone[ghost] = gone.get(ghost, 0) + 1
        self._shorten()

    def clear(self) -> None:
        """Remove all ghosts."""
        self.members = set()
        self._order, self._start = [], 0
        self._gone = {}

    def _shorten(self) -> None:
        """Keep half as many places more than ghosts, however often these left and came again."""
        if len(self._order) > len(self.members) * 3 // 2 + _SLACK:
            if self._gone:
                self._forget_places(len(self._order))
            del self._order[: self._start]
            self._start = 0

    def _forget_places(self, count: int) -> None:
        """Take the ghosts that have left out of the oldest `count` places."""
        gone = self._gone
        end = min(self._start + count, len(self._order))
        live = []
        for ghost in self._order[self._start : end]:
            left_count = gone.pop(ghost, 0)
            if left_count > 1:
                gone[ghost] = left_count - 1
            elif not left_count:
                live.append(ghost)
        self._start = end - len(live)
        self._order[self._start : end] = live
