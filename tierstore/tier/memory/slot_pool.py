"""The slots of all groups of an engine in one pool."""

from collections.abc import Mapping, Sequence

from tierstore.errors import ConfigError
from tierstore.layout import PAGE_BYTES
from tierstore.tier.memory.slabs import SlabSlots, UniformSlots

__all__ = ["SlotPool"]


class SlotPool:
    """Which slots of a pool are free, by group; groups whose chunks have one size share a class.

    Page numbers only: the bytes are the data plane's. A slot is named by its first page, not by its
    class and index there: the data plane finds the address without knowing the classes.
    """

    def __init__(self, capacity_bytes: int, slot_bytes: Sequence[int]) -> None:
        """Divide the pool for slots of `slot_bytes[g]` per group g, 0: not cached.

        Raises:
            ConfigError: the capacity holds less than one slot of the largest group.
            ValueError: a slot size is not a number of whole pages.
        """
        if any(size < 0 or size % PAGE_BYTES for size in slot_bytes):
            raise ValueError(f"slot_bytes: expected multiples of {PAGE_BYTES}, got {slot_bytes}")
        sizes = sorted({size for size in slot_bytes if size})
        largest = max(sizes, default=PAGE_BYTES)
        if capacity_bytes < largest:
            raise ConfigError(
                f"primary.capacity: {capacity_bytes} bytes hold no chunk of the largest "
                f"group; give {largest} bytes or, better, some thousand times as much"
            )
        self._group_class = [sizes.index(size) if size else -1 for size in slot_bytes]
        self._class_count = max(1, len(sizes))
        self.is_cached = [size > 0 for size in slot_bytes]
        """Per group: it has slots."""
        self._slots: UniformSlots | SlabSlots = (
            SlabSlots(capacity_bytes, sizes)
            if len(sizes) > 1
            else UniformSlots(capacity_bytes, largest)
        )
        # Groups of an engine grow side by side, so the mean of their sizes says how many chunks
        # the pool will hold.
        cached_groups = [size for size in slot_bytes if size] or [largest]
        self.capacity_chunks = capacity_bytes * len(cached_groups) // sum(cached_groups)
        """About how many chunks the pool holds."""
        self.uniform_slot_count = None if len(sizes) > 1 else capacity_bytes // largest
        """How many slots there are, if all have one size and serve any group; else None."""

    def free_count(self, group_idx: int) -> int:
        """Return how many chunks of a cached group find room without an eviction."""
        return self._slots.free_count(self._group_class[group_idx])

    def take(self, group_idx: int, count: int) -> list[int]:
        """Return `count` free slots for a group; the caller knows that there are as many."""
        return self._slots.take(self._group_class[group_idx], count)

    def give(self, slots: Sequence[int]) -> None:
        """Take slots back."""
        self._slots.give(slots)

    def choose(self, group_idx: int, shortage: int, slots: Sequence[int]) -> list[int] | None:
        """Return which of `slots`, given up in this order, yield `shortage` more for a group.

        Positions in `slots`, ascending; None: all of them are not enough. See `SlabSlots.choose`.
        """
        if isinstance(self._slots, UniformSlots):
            return list(range(shortage)) if len(slots) >= shortage else None
        return self._slots.choose(self._group_class[group_idx], shortage, slots)

    def has_room(self, counts: Mapping[int, int], held: Sequence[int]) -> bool:
        """Return whether so many slots per group can be had while `held` stay in use."""
        wanted = self._count_by_class(counts)
        if isinstance(self._slots, UniformSlots):
            return wanted[0] + len(held) <= self._slots.slot_count
        return self._slots.has_room(wanted, held)

    def could_hold(self, counts: Mapping[int, int]) -> bool:
        """Return whether so many chunks per group have room beside each other in the whole pool."""
        wanted = self._count_by_class(counts)
        if isinstance(self._slots, UniformSlots):
            return wanted[0] <= self._slots.slot_count
        return self._slots.could_hold(wanted)

    def check(self, used: Sequence[int]) -> list[str]:
        """Compare with the slots that are in use; return the violations in words."""
        return self._slots.check(used)

    def _count_by_class(self, counts: Mapping[int, int]) -> list[int]:
        wanted = [0] * self._class_count
        for group_idx, count in counts.items():
            wanted[self._group_class[group_idx]] += count
        return wanted
