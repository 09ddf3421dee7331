"""Keys that left, as numbers in the order in which they left."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise

from tierstore.policy.small_tables import small_tables

__all__ = ["PAGE_GHOSTS", "GhostIndex", "GhostPage", "GhostQueue"]

PAGE_GHOSTS = 2730
_SPARE_PAGES = 8
_GHOST_COUNT = 1 << 16


class GhostPage:
    """Ghosts that came one after the other, oldest first."""

    __slots__ = ("ghosts", "live_count", "queue", "start", "young")

    def __init__(self, queue: "GhostQueue") -> None:
        self.queue = queue
        self.young: dict[int, None] | None = {}
        """The ghosts, as long as others may come: one that left may be among these."""
        self.ghosts: list[int] = []
        """The ghosts from then on, and those that left since; before `start` all have left."""
        self.start = 0
        self.live_count = 0


class GhostIndex:
    """The pages of the ghosts of one queue or several; a ghost is in one of them."""

    __slots__ = ("tables",)

    def __init__(self, ghost_count: int) -> None:
        """Make room for about so many ghosts."""
        self.tables: list[dict[int, GhostPage]] = small_tables(ghost_count)
        """By the lowest byte of the ghost. Queues set and delete entries."""

    def holds_any(self, numbers: Sequence[int]) -> bool:
        """Return whether any of the numbers is a ghost."""
        tables = self.tables
        for number in numbers:  # noqa: SIM110 - a generator takes twice the time
            if number in tables[number & 255]:
                return True
        return False

    def present(self, numbers: Iterable[int]) -> set[int]:
        """Return those of the numbers that are ghosts."""
        tables = self.tables
        return {number for number in numbers if number in tables[number & 255]}

    def queues(self, numbers: Sequence[int]) -> list["GhostQueue | None"]:
        """Return in which queue each number is a ghost, None if it is none."""
        tables = self.tables
        pages = [tables[number & 255].get(number) for number in numbers]
        return [None if page is None else page.queue for page in pages]

    def remove(self, ghosts: Iterable[int]) -> None:
        """Remove those of the numbers that are ghosts, of whatever queue."""
        tables = self.tables
        for ghost in ghosts:
            page = tables[ghost & 255].pop(ghost, None)
            if page is not None:
                page.live_count -= 1
                page.queue.size -= 1
                if page.young is not None:
                    del page.young[ghost]


class GhostQueue:
    """Distinct numbers, spread like hashes, oldest first. No lock; the caller keeps the rules.

    Pages and an index, like the keys of a `KeyQueue`, in two thirds of the memory: a page to which
    no ghost comes any more is a list. What has left is still in it, but the index does not name the
    page for it.
    """

    __slots__ = ("_index", "_pages", "size")

    def __init__(self, index: GhostIndex | None = None) -> None:
        """Put the ghosts into `index`, which other queues may share."""
        self._index = index or GhostIndex(_GHOST_COUNT)
        self._pages = [GhostPage(self)]
        self.size = 0
        """How many ghosts there are. `GhostIndex.remove` counts, others only read."""

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(map(self._ghosts, self._pages))

    def push(self, ghosts: Sequence[int]) -> None:
        """Append ghosts that are in no queue of the index, in order, as the youngest."""
        tables = self._index.tables
        start = 0
        while start < len(ghosts):
            page = self._pages[-1]
            if page.live_count >= PAGE_GHOSTS or page.young is None:
                page = self._begin_page()
            part = ghosts[start : start + PAGE_GHOSTS - page.live_count]
            start += len(part)
            young = page.young
            assert young is not None
            for ghost in part:
                young[ghost] = None
                tables[ghost & 255][ghost] = page
            page.live_count += len(part)
            self.size += len(part)

    def peek(self, count: int) -> list[int]:
        """Return the `count` oldest ghosts, fewer if there are fewer."""
        self._drop_empty()
        page = self._pages[0]
        if page.young is None:
            start = page.start
            found = page.ghosts[start : start + count]
            if len(found) == count and page.live_count == len(page.ghosts) - start:
                return found
        return list(islice(self, count))

    def drop_oldest(self, count: int) -> None:
        """Remove the `count` oldest ghosts, or all if there are fewer."""
        self._drop_empty()
        page = self._pages[0]
        start, tables = page.start, self._index.tables
        if page.young is None and count <= page.live_count == len(page.ghosts) - start:
            for ghost in page.ghosts[start : start + count]:
                del tables[ghost & 255][ghost]
            page.start += count
            page.live_count -= count
            self.size -= count
            return
        self._index.remove(self.peek(count))
        ghosts = page.ghosts
        while start < len(ghosts) and tables[ghosts[start] & 255].get(ghosts[start]) is not page:
            start += 1
        page.start = start

    def _ghosts(self, page: GhostPage) -> Iterable[int]:
        if page.young is not None:
            return page.young
        tables = self._index.tables
        oldest = islice(page.ghosts, page.start, None)
        return (ghost for ghost in oldest if tables[ghost & 255].get(ghost) is page)

    def _drop_empty(self) -> None:
        pages = self._pages
        while not pages[0].live_count and len(pages) > 1:
            del pages[0]

    def _begin_page(self) -> GhostPage:
        youngest = self._pages[-1]
        if youngest.young is not None:
            youngest.ghosts, youngest.young = list(youngest.young), None
        pages = self._pages = [page for page in self._pages if page.live_count]
        if len(pages) > 2 * self.size // PAGE_GHOSTS + _SPARE_PAGES:
            self._merge()
        page = GhostPage(self)
        pages.append(page)
        return page

    def _merge(self) -> None:
        """Make one page of the two oldest neighbours that have room in one. O(PAGE_GHOSTS)."""
        for position, (older, younger) in enumerate(pairwise(self._pages)):
            if older.live_count + younger.live_count <= PAGE_GHOSTS:
                merged = GhostPage(self)
                merged.young = None
                merged.ghosts = [*self._ghosts(older), *self._ghosts(younger)]
                merged.live_count = len(merged.ghosts)
                for ghost in merged.ghosts:
                    self._index.tables[ghost & 255][ghost] = merged
                self._pages[position : position + 2] = [merged]
                return
