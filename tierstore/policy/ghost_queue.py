"""Keys that left, as numbers in the order in which they left."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise

from tierstore.policy.small_tables import small_tables

__all__ = ["STRETCH_GHOSTS", "GhostIndex", "GhostQueue", "GhostStretch"]

STRETCH_GHOSTS = 2730
_SPARE_STRETCHES = 8
_GHOST_COUNT = 1 << 16


class GhostStretch:
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
    """The stretches of the ghosts of one queue or several; a ghost is in one of them."""

    __slots__ = ("tables",)

    def __init__(self, ghost_count: int) -> None:
        """Make room for about so many ghosts."""
        self.tables: list[dict[int, GhostStretch]] = small_tables(ghost_count)
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
        stretches = [tables[number & 255].get(number) for number in numbers]
        return [None if stretch is None else stretch.queue for stretch in stretches]

    def remove(self, ghosts: Iterable[int]) -> None:
        """Remove those of the numbers that are ghosts, of whatever queue."""
        tables = self.tables
        for ghost in ghosts:
            stretch = tables[ghost & 255].pop(ghost, None)
            if stretch is not None:
                stretch.live_count -= 1
                stretch.queue.size -= 1
                if stretch.young is not None:
                    del stretch.young[ghost]


class GhostQueue:
    """Distinct numbers, spread like hashes, oldest first. No lock; the caller keeps the rules.

    Stretches and an index, like the keys of a `KeyQueue`, in two thirds of the memory: a stretch to
    which no ghost comes any more is a list. What has left is still in it, but the index does not
    name the stretch for it.
    """

    __slots__ = ("_index", "_stretches", "size")

    def __init__(self, index: GhostIndex | None = None) -> None:
        """Put the ghosts into `index`, which other queues may share."""
        self._index = index or GhostIndex(_GHOST_COUNT)
        self._stretches = [GhostStretch(self)]
        self.size = 0
        """How many ghosts there are. `GhostIndex.remove` counts, others only read."""

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(map(self._ghosts, self._stretches))

    def push(self, ghosts: Sequence[int]) -> None:
        """Append ghosts that are in no queue of the index, in order, as the youngest."""
        tables = self._index.tables
        start = 0
        while start < len(ghosts):
            stretch = self._stretches[-1]
            if stretch.live_count >= STRETCH_GHOSTS or stretch.young is None:
                stretch = self._begin_stretch()
            part = ghosts[start : start + STRETCH_GHOSTS - stretch.live_count]
            start += len(part)
            young = stretch.young
            assert young is not None
            for ghost in part:
                young[ghost] = None
                tables[ghost & 255][ghost] = stretch
            stretch.live_count += len(part)
            self.size += len(part)

    def peek(self, count: int) -> list[int]:
        """Return the `count` oldest ghosts, fewer if there are fewer."""
        self._drop_empty()
        stretch = self._stretches[0]
        if stretch.young is None:
            start = stretch.start
            found = stretch.ghosts[start : start + count]
            if len(found) == count and stretch.live_count == len(stretch.ghosts) - start:
                return found
        return list(islice(self, count))

    def drop_oldest(self, count: int) -> None:
        """Remove the `count` oldest ghosts, or all if there are fewer."""
        self._drop_empty()
        stretch = self._stretches[0]
        start, tables = stretch.start, self._index.tables
        if stretch.young is None and count <= stretch.live_count == len(stretch.ghosts) - start:
            for ghost in stretch.ghosts[start : start + count]:
                del tables[ghost & 255][ghost]
            stretch.start += count
            stretch.live_count -= count
            self.size -= count
            return
        self._index.remove(self.peek(count))
        ghosts = stretch.ghosts
        while start < len(ghosts) and tables[ghosts[start] & 255].get(ghosts[start]) is not stretch:
            start += 1
        stretch.start = start

    def _ghosts(self, stretch: GhostStretch) -> Iterable[int]:
        if stretch.young is not None:
            return stretch.young
        tables = self._index.tables
        oldest = islice(stretch.ghosts, stretch.start, None)
        return (ghost for ghost in oldest if tables[ghost & 255].get(ghost) is stretch)

    def _drop_empty(self) -> None:
        stretches = self._stretches
        while not stretches[0].live_count and len(stretches) > 1:
            del stretches[0]

    def _begin_stretch(self) -> GhostStretch:
        youngest = self._stretches[-1]
        if youngest.young is not None:
            youngest.ghosts, youngest.young = list(youngest.young), None
        stretches = self._stretches = [stretch for stretch in self._stretches if stretch.live_count]
        if len(stretches) > 2 * self.size // STRETCH_GHOSTS + _SPARE_STRETCHES:
            self._merge()
        stretch = GhostStretch(self)
        stretches.append(stretch)
        return stretch

    def _merge(self) -> None:
        """Join the two oldest neighbours that have room in one stretch. O(STRETCH_GHOSTS)."""
        for position, (older, younger) in enumerate(pairwise(self._stretches)):
            if older.live_count + younger.live_count <= STRETCH_GHOSTS:
                merged = GhostStretch(self)
                merged.young = None
                merged.ghosts = [*self._ghosts(older), *self._ghosts(younger)]
                merged.live_count = len(merged.ghosts)
                for ghost in merged.ghosts:
                    self._index.tables[ghost & 255][ghost] = merged
                self._stretches[position : position + 2] = [merged]
                return
