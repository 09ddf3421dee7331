"""Keys with a number each, oldest first, built on a plain `dict`."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import filterfalse, islice, repeat
from sys import getsizeof

from tierstore.key import OffloadKey

__all__ = ["KeyQueue"]

_COLD_KEYS_MIN = 512
_COLD_COUNT_MAX = 1024
_TABLE_BYTES_PER_KEY_MAX = 80
_TABLE_BYTES_SLACK = 4096


class KeyQueue:
    """Keys in order of their last use. No lock; the caller keeps the preconditions.

    A `dict` keeps the order of insertion, and deleting and inserting a key again makes it the
    youngest. That is half the memory of an `OrderedDict` or less, with two catches that are handled
    here: deleted entries stay in the table until it is rebuilt, so looking at the oldest key scans
    all that were evicted since (hence `_cold`), and a table that fills up is replaced by one for
    three times its keys (hence `_compact`).

        _cold    a b c d e f g h i      the oldest keys when it was taken, a list
                     |                  behind `_cold_start` they left in their order
                       d     g          `_stale`: those that left otherwise, were used again,
                                        or were never in it
    """

    __slots__ = ("_cold", "_cold_start", "_stale", "table")

    def __init__(self) -> None:
        self.table: dict[OffloadKey, int] = {}
        """Only to be read. Get it again after every change: compaction replaces it."""
        self._cold: list[OffloadKey] = []
        self._cold_start = 0
        self._stale: set[OffloadKey] = set()

    def __len__(self) -> int:
        return len(self.table)

    def __contains__(self, key: object) -> bool:
        return key in self.table

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self.table)

    def push(self, keys: Sequence[OffloadKey], numbers: Iterable[int]) -> None:
        """Append keys that are not in the queue, in order, as the youngest."""
        table = self.table
        table.update(zip(keys, numbers, strict=True))
        if getsizeof(table) > _TABLE_BYTES_PER_KEY_MAX * len(table) + _TABLE_BYTES_SLACK:
            self._compact()

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Make keys of the queue its youngest, in order; a key's last place in `keys` counts."""
        table = self.table
        for key in keys:
            table[key] = table.pop(key)
        if self._cold:
            self._leave_cold(keys)
        if getsizeof(table) > _TABLE_BYTES_PER_KEY_MAX * len(table) + _TABLE_BYTES_SLACK:
            self._compact()

    def pop(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Remove distinct keys of the queue; return their numbers."""
        start = self._cold_start
        end = start + len(keys)
        if self._cold[start:end] == keys:
            self._cold_start = end
        elif self._cold:
            self._leave_cold(keys)
        return list(map(self.table.pop, keys))

    def pop_present(self, keys: Sequence[OffloadKey]) -> list[int | None]:
        """Remove those of the keys that are in the queue.

        None stands for the others, and for a key's places after its first.
        """
        if self._cold:
            self._leave_cold(keys)
        return list(map(self.table.pop, keys, repeat(None)))

    def peek(self, count: int, skip: Collection[OffloadKey] = ()) -> list[OffloadKey]:
        """Return the `count` oldest keys that are not in `skip`, fewer if there are fewer.

        O(count + skipped keys passed over), amortised.
        """
        if count <= 0:
            return []
        if count > _COLD_COUNT_MAX:
            # Enough keys to pay for the scan; a cold end for them would be as slow to scan itself.
            return list(islice(filterfalse(skip.__contains__, self.table), count))
        start = self._cold_start
        found = self._cold[start : start + count]
        if len(found) == count and not skip and not self._stale:
            return found
        found = self._coldest(count, skip)
        size = 0
        while len(found) < count and size < len(self.table):
            # The next look is for as many keys at least, so a large request pays for one scan.
            left = len(self._cold) - self._cold_start
            size = max(_COLD_KEYS_MIN, len(self.table) >> 8, 16 * count, 2 * left)
            self._cold, self._cold_start = list(islice(self.table, size)), 0
            self._stale.clear()
            found = self._coldest(count, skip)
        return found

    def clear(self) -> None:
        """Remove all keys."""
        self.table = {}
        self._cold, self._cold_start = [], 0
        self._stale.clear()

    def _coldest(self, count: int, skip: Collection[OffloadKey]) -> list[OffloadKey]:
        cold, start, stale = self._cold, self._cold_start, self._stale
        if stale:
            while start < len(cold) and cold[start] in stale:
                start += 1
            self._cold_start = start
        found = cold[start : start + count]
        is_stale = bool(stale) and not stale.isdisjoint(found)
        if is_stale or (skip and any(map(skip.__contains__, found))):
            oldest = filterfalse(stale.__contains__, islice(cold, start, None))
            found = list(islice(filterfalse(skip.__contains__, oldest), count))
        return found

    def _leave_cold(self, keys: Sequence[OffloadKey]) -> None:
        cold, start, stale = self._cold, self._cold_start, self._stale
        stale.update(keys)
        if len(stale) > len(cold) - start + _COLD_COUNT_MAX:
            self._cold = list(filterfalse(stale.__contains__, islice(cold, start, None)))
            self._cold_start = 0
            stale.clear()

    def _compact(self) -> None:
        old, self.table = self.table, {}
        self.table.update(old)
