"""Free and used slots of one or several sizes in one pool, as page numbers."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from tierstore.layout import PAGE_BYTES

__all__ = ["SlabSlots", "UniformSlots"]

_SLAB_SLOTS_MAX = 8
_SLAB_COUNT_MIN = 64
_REST_PER_SLOT = 2


class UniformSlots:
    """All slots have one size: a stack of free slots, and nothing per slab to count."""

    def __init__(self, pool_bytes: int, slot_bytes: int) -> None:
        """Divide the pool; what is left behind the last whole slot is not used."""
        self._slot_pages = slot_bytes // PAGE_BYTES
        self.slot_count = pool_bytes // slot_bytes
        self._free: list[int] = []
        self._fresh = 0
        """Slots from this one on were never used; they become numbers when they are."""

    def free_count(self, class_idx: int) -> int:  # noqa: ARG002 - one class
        """Return how many slots can be taken."""
        return len(self._free) + self.slot_count - self._fresh

    def take(self, class_idx: int, count: int) -> list[int]:  # noqa: ARG002 - one class
        """Return `count` free slots; the caller knows that there are as many."""
        free = self._free
        fresh_count = count - len(free)
        if fresh_count > 0:
            first = self._fresh * self._slot_pages
            self._fresh += fresh_count
            slots = free + list(range(first, self._fresh * self._slot_pages, self._slot_pages))
            self._free = []
            return slots
        slots = free[-count:] if count else []
        del free[len(free) - count :]
        return slots

    def give(self, slots: Sequence[int]) -> None:
        """Take slots back."""
        self._free.extend(slots)

    def check(self, used: Sequence[int]) -> list[str]:
        """Compare with the slots that are in use; return the violations in words."""
        problems = []
        known = sorted([*used, *self._free])
        expected = [number * self._slot_pages for number in range(self._fresh)]
        if known != expected:
            problems.append(
                f"slots: {len(used)} used and {len(self._free)} free ones are not the "
                f"{self._fresh} slots that were handed out"
            )
        return problems


class SlabSlots:
    """Slots of several sizes: equal slabs, each cut into slots of one size while any is used.

        pool   |slab 0          |slab 1          |slab 2          |  rest: unused
               |A   |A   |A   | |B  B  B  B  B  B| free          |

    A slab whose last slot was given back is free: it may be cut into slots of any size.
    """

    def __init__(self, pool_bytes: int, class_slot_bytes: Sequence[int]) -> None:
        """Divide the pool for slots of the given sizes; class i has the i-th size."""
        self._class_pages = [size // PAGE_BYTES for size in class_slot_bytes]
        self._slab_pages = _choose_slab_pages(pool_bytes // PAGE_BYTES, self._class_pages)
        slab_count = pool_bytes // PAGE_BYTES // self._slab_pages
        self._slots_per_slab = [self._slab_pages // pages for pages in self._class_pages]
        self._slab_class = [-1] * slab_count
        """-1: the slab is free."""
        self._slab_free: list[list[int]] = [[] for _ in range(slab_count)]
        """Free slots of a slab that belongs to a class."""
        self._free_slabs = list(range(slab_count - 1, -1, -1))
        self._open_slabs: list[dict[int, None]] = [{} for _ in self._class_pages]
        """Per class its slabs that have free slots, in the order in which they got them."""
        self._open_counts = [0] * len(self._class_pages)
        """Per class the free slots in its open slabs."""

    def free_count(self, class_idx: int) -> int:
        """Return how many slots of a class can be taken, free slabs included."""
        return self._open_counts[class_idx] + (
            len(self._free_slabs) * self._slots_per_slab[class_idx]
        )

    def take(self, class_idx: int, count: int) -> list[int]:
        """Return `count` free slots of a class; the caller knows that there are as many."""
        slots: list[int] = []
        open_slabs = self._open_slabs[class_idx]
        while len(slots) < count:
            if not open_slabs:
                self._cut_slab(class_idx)
            slab = next(iter(open_slabs))
            free = self._slab_free[slab]
            taken = free[-(count - len(slots)) :]
            del free[-len(taken) :]
            slots += taken
            if not free:
                del open_slabs[slab]
        self._open_counts[class_idx] -= count
        return slots

    def give(self, slots: Sequence[int]) -> None:
        """Take slots back; a slab that has all of them back becomes free."""
        for slot in slots:
            slab = slot // self._slab_pages
            class_idx = self._slab_class[slab]
            free = self._slab_free[slab]
            free.append(slot)
            self._open_counts[class_idx] += 1
            if len(free) == self._slots_per_slab[class_idx]:
                self._open_slabs[class_idx].pop(slab, None)
                self._open_counts[class_idx] -= len(free)
                free.clear()
                self._slab_class[slab] = -1
                self._free_slabs.append(slab)
            else:
                self._open_slabs[class_idx][slab] = None

    def choose(self, class_idx: int, shortage: int, slots: Sequence[int]) -> list[int] | None:
        """Return which of `slots`, given up in this order, yield `shortage` more slots of a class.

        They are positions in `slots`, ascending. None: all of them are not enough.

        Chosen are the slots of the class, those of other classes whose whole slab comes free, and
        the first of the rest, a few per slot asked for. Without the rest, the coldest chunks of a
        class that stores little would never leave, and every call would pass over them. With all of
        the rest, one slot could cost a large part of another class whose slabs are mixed hot and
        cold.
        """
        slab_pages, slab_class, slab_free = self._slab_pages, self._slab_class, self._slab_free
        gained = 0
        useful: list[int] = []
        foreign: dict[int, list[int]] = {}
        for position, slot in enumerate(slots):
            slab = slot // slab_pages
            if slab_class[slab] == class_idx:
                useful.append(position)
                gained += 1
            else:
                positions = foreign.setdefault(slab, [])
                positions.append(position)
                slot_count = self._slots_per_slab[slab_class[slab]]
                if len(positions) + len(slab_free[slab]) == slot_count:
                    useful += foreign.pop(slab)
                    gained += self._slots_per_slab[class_idx]
            if gained >= shortage:
                rest = sorted(chain.from_iterable(foreign.values()))
                return sorted(useful + rest[: _REST_PER_SLOT * shortage])
        return None

    def has_room(self, counts: Sequence[int], held: Sequence[int]) -> bool:
        """Return whether `counts[i]` slots of each class i can be had while `held` stay in use.

        Classes are served one after the other, in any order, with whatever victims `choose` takes.
        A slab without held slots serves any class, one with held slots its own class alone:

            class A   |A A A h| held: 3 for A     |A A A A| 4 for A, or 6 for B     |free| as well

        A class may spoil a slab of its own for the others with each slot that it takes there, and
        takes others whole; so much less is counted for them. With one class it is exact.
        """
        held_by_slab = Counter(slot // self._slab_pages for slot in held)
        unheld_by_class = Counter(self._slab_class)
        partly: Counter[int] = Counter()
        for slab, held_count in held_by_slab.items():
            class_idx = self._slab_class[slab]
            unheld_by_class[class_idx] -= 1
            partly[class_idx] += self._slots_per_slab[class_idx] - held_count
        unheld_count = unheld_by_class.total()
        spoilt = [
            min(count, unheld_by_class[i]) + -(-count // self._slots_per_slab[i])
            for i, count in enumerate(counts)
        ]
        for i, count in enumerate(counts):
            slab_count = max(0, unheld_count - (sum(spoilt) - spoilt[i]))
            if count > partly[i] + slab_count * self._slots_per_slab[i]:
                return False
        return True

    def could_hold(self, counts: Sequence[int]) -> bool:
        """Return whether `counts[i]` slots of each class i fit into the pool beside each other."""
        slab_counts = map(lambda count, each: -(-count // each), counts, self._slots_per_slab)
        return sum(slab_counts) <= len(self._slab_class)

    def check(self, used: Sequence[int]) -> list[str]:
        """Compare with the slots that are in use; return the violations in words."""
        problems = []
        if len(set(used)) != len(used):
            problems.append("slots: a slot is used twice")
        used_by_slab: dict[int, list[int]] = {}
        for slot in used:
            used_by_slab.setdefault(slot // self._slab_pages, []).append(slot)
        for slab, class_idx in enumerate(self._slab_class):
            slots = sorted(used_by_slab.get(slab, []) + self._slab_free[slab])
            expected = self._cut(slab, class_idx) if class_idx >= 0 else []
            if slots != expected:
                problems.append(f"slots: slab {slab} of class {class_idx} holds {slots}")
            is_open = class_idx >= 0 and slab in self._open_slabs[class_idx]
            if is_open != bool(self._slab_free[slab]):
                problems.append(f"slots: slab {slab} is listed as open: {is_open}")
        if sorted(self._free_slabs) != [s for s, c in enumerate(self._slab_class) if c < 0]:
            problems.append("slots: the list of free slabs is not that of slabs without class")
        for class_idx, count in enumerate(self._open_counts):
            actual = sum(len(self._slab_free[slab]) for slab in self._open_slabs[class_idx])
            if actual != count:
                problems.append(f"slots: class {class_idx} counts {count} free, has {actual}")
        return problems

    def _cut(self, slab: int, class_idx: int) -> list[int]:
        first = slab * self._slab_pages
        pages = self._class_pages[class_idx]
        return list(range(first, first + self._slots_per_slab[class_idx] * pages, pages))

    def _cut_slab(self, class_idx: int) -> None:
        slab = self._free_slabs.pop()
        self._slab_class[slab] = class_idx
        self._slab_free[slab] = self._cut(slab, class_idx)
        self._open_slabs[class_idx][slab] = None
        self._open_counts[class_idx] += self._slots_per_slab[class_idx]


def _choose_slab_pages(pool_pages: int, class_pages: Sequence[int]) -> int:
    """Return the size of a slab: a few of the largest slots, as the other sizes fit in best.

    A small pool gets slabs of one largest slot, since few slabs can hardly be shared.
    """
    largest = max(class_pages)
    best_pages, best_waste = largest, 1.0
    for slot_count in range(1, _SLAB_SLOTS_MAX + 1):
        slab_pages = slot_count * largest
        if slot_count > 1 and pool_pages // slab_pages < _SLAB_COUNT_MIN:
            break
        waste = max(slab_pages % pages for pages in class_pages) / slab_pages
        if waste < best_waste:
            best_pages, best_waste = slab_pages, waste
    return best_pages
