"""Keys with a number each, oldest first, in stretches."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, filterfalse, islice, pairwise
from typing import cast

from tierstore.key import OffloadKey
from tierstore.policy.key_index import KeyIndex, Stretch

__all__ = ["STRETCH_KEYS", "KeyQueue"]

STRETCH_KEYS = 2730
"""What fits in a `dict` of 4,096 places."""
_SPARE_STRETCHES = 8
_KEY_COUNT = 1 << 16


class KeyQueue:
    """Keys in order of their last use. No lock; the caller keeps the preconditions.

    A `dict` keeps the order of insertion in half the memory of an `OrderedDict` or less. But one of
    all keys would be rebuilt as a whole now and then, so the queue is a row of stretches. Keys that
    come or are used go to the end of the youngest stretch; when that is full, another begins. Keys
    that leave make holes, and neighbours with many holes become one stretch.

        stretches    |. . . d . f|  |g h . i . j|  |k l . m
        cold      a b c d e f                              the oldest stretch when it was looked at
                        `_cold_start`

    Looking at the oldest key of a `dict` scans the holes before it, hence `_cold`. No key comes to
    the stretch of `_cold`, so what left it is not in it again.
    """

    __slots__ = ("_cold", "_cold_start", "_cold_stretch", "_index", "_stretches", "size")

    def __init__(self, index: KeyIndex | None = None) -> None:
        """Put the keys into `index`, which other queues may share."""
        self._index = index or KeyIndex(_KEY_COUNT)
        self._stretches = [Stretch(self, STRETCH_KEYS)]
        self.size = 0
        """How many keys there are. `KeyIndex.take` counts, others only read."""
        self._cold_stretch: Stretch | None = None
        self._cold: list[OffloadKey] = []
        self._cold_start = 0

    def __len__(self) -> int:
        return self.size

    def __contains__(self, key: OffloadKey) -> bool:
        stretch = self._index.tables[key[-1]].get(key)
        return stretch is not None and stretch.queue is self

    def __iter__(self) -> Iterator[OffloadKey]:
        return chain.from_iterable(self._stretches)

    def push(self, keys: Sequence[OffloadKey], numbers: Iterable[int]) -> None:
        """Append keys that are in no queue of the index, in order, as the youngest."""
        stretch = self._stretches[-1]
        if len(keys) <= stretch.room and stretch is not self._cold_stretch:
            stretch.update(zip(keys, numbers, strict=True))
            self._note(keys, stretch)
            return
        coming = iter(numbers)
        start = 0
        while start < len(keys):
            stretch = self._stretches[-1]
            if not stretch.room or stretch is self._cold_stretch:
                stretch = self._begin_stretch()
            part = keys[start : start + stretch.room]
            start += len(part)
            stretch.update(zip(part, coming))  # noqa: B905 - the rest is for the next stretch
            self._note(part, stretch)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Make keys of the index the youngest of this queue, in order; their last places count."""
        numbers = self._index.take(keys)
        if None in numbers:  # a repeated key was taken once
            taken = {
                key: number for key, number in zip(keys, numbers, strict=True) if number is not None
            }
            keys = list(dict.fromkeys(reversed(keys)))[::-1]
            numbers = list(map(taken.__getitem__, keys))
        self.push(keys, cast("list[int]", numbers))

    def pop(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Remove distinct keys of the index; return their numbers."""
        start = self._cold_start
        end = start + len(keys)
        if self._cold[start:end] == keys:
            self._cold_start = end
        numbers = self._index.take(keys)
        tables = self._index.tables
        for key in keys:
            del tables[key[-1]][key]
        return cast("list[int]", numbers)

    def peek(self, count: int, skip: Collection[OffloadKey] = ()) -> list[OffloadKey]:
        """Return the `count` oldest keys that are not in `skip`, fewer if there are fewer.

        O(count + skipped keys passed over), amortised.
        """
        if count <= 0:
            return []
        stretch = self._coldest_stretch()
        cold, start = self._cold, self._cold_start
        found = cold[start : start + count]
        if len(stretch) < len(cold) - start:
            while start < len(cold) and cold[start] not in stretch:
                start += 1
            self._cold_start = start
            found = list(filter(stretch.__contains__, cold[start : start + 2 * count]))[:count]
        if len(found) == count and not (skip and any(map(skip.__contains__, found))):
            return found
        return list(islice(filterfalse(skip.__contains__, self), count))

    def _coldest_stretch(self) -> Stretch:
        """Return the oldest stretch that has keys, with its keys in `_cold`."""
        stretches = self._stretches
        while not stretches[0] and len(stretches) > 1:
            del stretches[0]
        stretch = stretches[0]
        if stretch is not self._cold_stretch or self._cold_start >= len(self._cold):
            self._cold_stretch, self._cold, self._cold_start = stretch, list(stretch), 0
        return stretch

    def _note(self, keys: Sequence[OffloadKey], stretch: Stretch) -> None:
        tables = self._index.tables
        for key in keys:
            tables[key[-1]][key] = stretch
        stretch.room -= len(keys)
        self.size += len(keys)

    def _begin_stretch(self) -> Stretch:
        stretches = self._stretches = [stretch for stretch in self._stretches if stretch]
        if len(stretches) > 2 * self.size // STRETCH_KEYS + _SPARE_STRETCHES:
            self._merge()
        stretch = Stretch(self, STRETCH_KEYS)
        stretches.append(stretch)
        return stretch

    def _merge(self) -> None:
        """Make one stretch of the two oldest neighbours that have room in one. O(STRETCH_KEYS)."""
        for position, (older, younger) in enumerate(pairwise(self._stretches)):
            if len(older) + len(younger) <= STRETCH_KEYS:
                if older is self._cold_stretch:
                    self._cold_stretch = None  # a key that left it may be in the other
                # A new table: the holes of the older one would count when it grows.
                merged = Stretch(self, STRETCH_KEYS - len(older) - len(younger))
                merged.update(older)
                merged.update(younger)
                tables = self._index.tables
                for key in merged:
                    tables[key[-1]][key] = merged
                self._stretches[position : position + 2] = [merged]
                return
