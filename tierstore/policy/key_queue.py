"""Keys with a number each, oldest first, in pages."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, filterfalse, islice, pairwise
from typing import cast

from tierstore.key import OffloadKey
from tierstore.policy.key_index import KeyIndex, Page

__all__ = ["PAGE_KEYS", "KeyQueue"]

PAGE_KEYS = 2730
"""What fits in a `dict` of 4,096 places."""
_SPARE_PAGES = 8
_KEY_COUNT = 1 << 16


class KeyQueue:
    """Keys in order of their last use. No lock; the caller keeps the preconditions.

    A `dict` keeps the order of insertion in half the memory of an `OrderedDict` or less. But one of
    all keys would be rebuilt as a whole now and then, so the queue is a row of pages. Keys that
    come or are used go to the end of the youngest page; when that is full, another begins. Keys
    that leave make holes, and neighbours with many holes become one page.

        pages    |. . . d . f|  |g h . i . j|  |k l . m
        cold      a b c d e f                              the oldest page when it was looked at
                        `_cold_start`

    Looking at the oldest key of a `dict` scans the holes before it, hence `_cold`. No key comes to
    the page of `_cold`, so what left it is not in it again.
    """

    __slots__ = ("_cold", "_cold_page", "_cold_start", "_index", "_pages", "size")

    def __init__(self, index: KeyIndex | None = None) -> None:
        """Put the keys into `index`, which other queues may share."""
        self._index = index or KeyIndex(_KEY_COUNT)
        self._pages = [Page(self, PAGE_KEYS)]
        self.size = 0
        """How many keys there are. `KeyIndex.take` counts, others only read."""
        self._cold_page: Page | None = None
        self._cold: list[OffloadKey] = []
        self._cold_start = 0

    def __len__(self) -> int:
        return self.size

    def __contains__(self, key: OffloadKey) -> bool:
        page = self._index.tables[key[-1]].get(key)
        return page is not None and page.queue is self

    def __iter__(self) -> Iterator[OffloadKey]:
        return chain.from_iterable(self._pages)

    def push(self, keys: Sequence[OffloadKey], numbers: Iterable[int]) -> None:
        """Append keys that are in no queue of the index, in order, as the youngest."""
        page = self._pages[-1]
        if len(keys) <= page.room and page is not self._cold_page:
            page.update(zip(keys, numbers, strict=True))
            self._note(keys, page)
            return
        coming = iter(numbers)
        start = 0
        while start < len(keys):
            page = self._pages[-1]
            if not page.room or page is self._cold_page:
                page = self._begin_page()
            part = keys[start : start + page.room]
            start += len(part)
            page.update(zip(part, coming))  # noqa: B905 - the rest is for the next page
            self._note(part, page)

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
        page = self._coldest_page()
        cold, start = self._cold, self._cold_start
        found = cold[start : start + count]
        if len(page) < len(cold) - start:
            while start < len(cold) and cold[start] not in page:
                start += 1
            self._cold_start = start
            found = list(filter(page.__contains__, cold[start : start + 2 * count]))[:count]
        if len(found) == count and not (skip and any(map(skip.__contains__, found))):
            return found
        return list(islice(filterfalse(skip.__contains__, self), count))

    def _coldest_page(self) -> Page:
        """Return the oldest page that has keys, with its keys in `_cold`."""
        pages = self._pages
        while not pages[0] and len(pages) > 1:
            del pages[0]
        page = pages[0]
        if page is not self._cold_page or self._cold_start >= len(self._cold):
            self._cold_page, self._cold, self._cold_start = page, list(page), 0
        return page

    def _note(self, keys: Sequence[OffloadKey], page: Page) -> None:
        tables = self._index.tables
        for key in keys:
            tables[key[-1]][key] = page
        page.room -= len(keys)
        self.size += len(keys)

    def _begin_page(self) -> Page:
        pages = self._pages = [page for page in self._pages if page]
        if len(pages) > 2 * self.size // PAGE_KEYS + _SPARE_PAGES:
            self._merge()
        page = Page(self, PAGE_KEYS)
        pages.append(page)
        return page

    def _merge(self) -> None:
        """Make one page of the two oldest neighbours that have room in one. O(PAGE_KEYS)."""
        for position, (older, younger) in enumerate(pairwise(self._pages)):
            if len(older) + len(younger) <= PAGE_KEYS:
                if older is self._cold_page:
                    self._cold_page = None  # a key that left it may be in the other
                # A new table: the holes of the older one would count when it grows.
                merged = Page(self, PAGE_KEYS - len(older) - len(younger))
                merged.update(older)
                merged.update(younger)
                tables = self._index.tables
                for key in merged:
                    tables[key[-1]][key] = merged
                self._pages[position : position + 2] = [merged]
                return
