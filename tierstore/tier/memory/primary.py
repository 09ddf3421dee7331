"""The primary tier's index: which key lies in which slot, who is pinned, who goes next."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import NamedTuple, NoReturn

import numpy as np

from tierstore.config import PrimaryConfig
from tierstore.errors import ConfigError
from tierstore.key import OffloadKey
from tierstore.layout import PAGE_BYTES
from tierstore.policy import make_policy
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.tier.memory.slabs import SlabSlots, UniformSlots
from tierstore.transfer import IntArray

__all__ = ["PrimaryTier", "Reservation"]

_NO_SLOT = -1


class Reservation(NamedTuple):
    """Slots set aside for incoming chunks, and what had to go for them."""

    slots: IntArray
    evicted: list[OffloadKey]


class PrimaryTier:
    """Control half of the pool in host memory. Moves no bytes, takes no lock, one thread.

    A key is absent, arriving (slot reserved, bytes on the way) or resident. A slot may also be
    detached: reserved under no key, for a read that does not end. Slots are page numbers:
    a slot's bytes start at `slot * PAGE_BYTES` in the pool. Size classes share the pool by slabs.

    Calls that break a precondition raise `ValueError`, name the first offending key, and change
    nothing.
    """

    def __init__(self, config: PrimaryConfig, slot_bytes: Sequence[int]) -> None:
        """Divide `config.capacity_bytes` for slots of `slot_bytes[g]` per group g, 0: not cached.

        Raises:
            ConfigError: the capacity holds less than one slot of the largest group.
            ValueError: a slot size is not a number of whole pages.
        """
        if any(size < 0 or size % PAGE_BYTES for size in slot_bytes):
            raise ValueError(f"slot_bytes: expected multiples of {PAGE_BYTES}, got {slot_bytes}")
        sizes = sorted({size for size in slot_bytes if size})
        largest = max(sizes, default=PAGE_BYTES)
        if config.capacity_bytes < largest:
            raise ConfigError(
                f"primary.capacity: {config.capacity_bytes} bytes hold no chunk of the largest "
                f"group; give {largest} bytes or, better, some thousand times as much"
            )
        self._group_class = [sizes.index(size) if size else -1 for size in slot_bytes]
        self._class_count = len(sizes)
        self._slots: UniformSlots | SlabSlots = (
            SlabSlots(config.capacity_bytes, sizes)
            if len(sizes) > 1
            else UniformSlots(config.capacity_bytes, largest)
        )
        # Groups of an engine grow side by side, so the mean of their sizes says how many chunks
        # the pool will hold.
        cached_groups = [size for size in slot_bytes if size] or [largest]
        capacity_chunks = config.capacity_bytes * len(cached_groups) // sum(cached_groups)
        self._policy = make_policy(config.eviction, capacity_chunks)
        self.needs_use = self._policy.needs_use
        """Whether the policy goes by uses; if not, callers leave them out."""
        self._arriving: dict[OffloadKey, int] = {}
        self._arriving_view = MappingProxyType(self._arriving)
        self._detached: set[int] = set()
        self._pins: dict[OffloadKey, int] = {}
        self._known_new: Sequence[OffloadKey] | None = None
        """What `are_new` said yes to; true until the next `reserve`, for nothing else adds keys."""

    def __len__(self) -> int:
        return len(self._policy)

    def locate(self, keys: Sequence[OffloadKey]) -> list[int | None]:
        """Return the slot of each resident key, None for others. <= 0.1 us per key."""
        return self._policy.locate(keys)

    def holds_all(self, keys: Sequence[OffloadKey]) -> bool:
        """Say whether all of the keys are resident; half the cost of `locate`."""
        return self._policy.holds_all(keys)

    def are_new(self, keys: Sequence[OffloadKey]) -> bool:
        """Say whether no key is resident, arriving, or given twice, so that all can be reserved.

        The next `reserve` does not look again if it is of the same list; leave that as it is.
        """
        arriving = self._arriving
        is_new = (
            (len(keys) == 1 or len(set(keys)) == len(keys))
            and not self._policy.holds_any(keys)
            and (not arriving or arriving.keys().isdisjoint(keys))
        )
        self._known_new = keys if is_new else None
        return is_new

    @property
    def arriving(self) -> Mapping[OffloadKey, int]:
        """Slots that are reserved but not yet readable, by key (a live view)."""
        return self._arriving_view

    def reserve(
        self, group_idx: int, keys: Sequence[OffloadKey], *, use: UseContext = UNKNOWN_USE
    ) -> Reservation | None:
        """Set aside one slot of the group's class per key, evicting unpinned chunks as needed.

        All or nothing: on None nothing was evicted. Duplicate, resident or arriving keys are a
        caller bug. The slots hold garbage until `commit`; nobody can pin them before. Policies see
        the keys miss in their order: pass the keys of a prefix tail first, as to `commit`.

        Raises:
            ValueError: a key came twice, is resident or arriving, or the group is not cached.
        """
        class_idx = self._group_class[group_idx]
        if class_idx < 0:
            raise ValueError(f"reserve: group {group_idx} is not cached")
        if keys is not self._known_new and not self.are_new(keys):
            self._refuse_known("reserve", keys)
        self._known_new = None
        count = len(keys)
        victims = self._choose_victims(class_idx, keys, use)
        if victims is None:
            return None
        slots = self._policy.evict(victims, keys, use)
        if self._class_count > 1 or len(slots) < count:
            self._slots.give(slots)
            # Keys come tail first, and the victims of a prefix too: the tail gets the last slot,
            # so that a prefix lies in the pool in its own order.
            slots = self._slots.take(class_idx, count)[::-1]
        self._arriving.update(zip(keys, slots, strict=True))
        return Reservation(np.array(slots, np.int64), victims)

    def has_room(self, counts: Mapping[int, int], staying: Sequence[OffloadKey] = ()) -> bool:
        """Return whether `reserve` would find so many slots per group, one group after the other.

        `staying` are resident keys that would be pinned before. Never true of what `reserve` would
        refuse; with several size classes it may be false of what it would grant. O(pins).
        """
        wanted = self._count_by_class(counts)
        pins = self._pins
        others = [key for key in staying if key not in pins] if pins else staying
        if isinstance(self._slots, UniformSlots):
            evictable_count = len(self._policy) - len(pins) - len(others)
            return wanted[0] <= self._slots.free_count(0) + evictable_count
        located = self._policy.locate([*pins, *others])
        held = [slot for slot in located if slot is not None]
        return self._slots.has_room(wanted, [*held, *self._arriving.values(), *self._detached])

    def could_hold(self, counts: Mapping[int, int]) -> bool:
        """Return whether so many chunks per group have room beside each other in the whole pool."""
        wanted = self._count_by_class(counts)
        if isinstance(self._slots, UniformSlots):
            return wanted[0] <= self._slots.slot_count
        return self._slots.could_hold(wanted)

    @property
    def is_room_held(self) -> bool:
        """Whether transfers hold chunks, whose room comes back when they end."""
        return bool(self._pins or self._arriving)

    def commit(self, keys: Sequence[OffloadKey], *, use: UseContext = UNKNOWN_USE) -> None:
        """Make arriving keys resident; in order of eviction, so a prefix comes tail first.

        Raises:
            ValueError: a key came twice or is not arriving.
        """
        slots = self._end_arrival("commit", keys)
        self._policy.insert(keys, slots, use)

    def abort(self, keys: Sequence[OffloadKey]) -> None:
        """Give the slots of arriving keys back.

        Raises:
            ValueError: a key came twice or is not arriving.
        """
        self._slots.give(self._end_arrival("abort", keys))

    def detach(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Make arriving keys absent, and keep their slots from everybody; return the slots.

        For bytes that may still come, nobody knows when, while the key shall not wait for them.
        The slots come back by `reattach` or `give_back`.

        Raises:
            ValueError: a key came twice or is not arriving.
        """
        slots = self._end_arrival("detach", keys)
        self._detached.update(slots)
        return slots

    def reattach(
        self, keys: Sequence[OffloadKey], slots: Sequence[int], *, use: UseContext = UNKNOWN_USE
    ) -> None:
        """Let new keys, tail first, arrive in detached slots after all.

        Raises:
            ValueError: a key came twice, is resident or arriving, or a slot is not detached.
        """
        if not self.are_new(keys):
            self._refuse_known("reattach", keys)
        self._known_new = None
        self._end_detachment("reattach", slots)
        self._policy.evict((), keys, use)  # they miss, and find free slots
        self._arriving.update(zip(keys, slots, strict=True))

    def give_back(self, slots: Sequence[int]) -> None:
        """Give detached slots back to the pool.

        Raises:
            ValueError: a slot came twice or is not detached.
        """
        self._end_detachment("give_back", slots)
        self._slots.give(slots)

    @property
    def detached_count(self) -> int:
        """How many slots are reserved under no key."""
        return len(self._detached)

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        """Forbid the eviction of resident keys once more (counted).

        Raises:
            ValueError: a key is not resident.
        """
        self._require_resident("pin", keys)
        self._add_pins(keys)

    def pin_resident(self, keys: Sequence[OffloadKey]) -> list[int | None]:
        """Pin those of the keys that are resident; return their slots, None for the others."""
        slots = self._policy.locate(keys)
        if None in slots:
            keys = [key for key, slot in zip(keys, slots, strict=True) if slot is not None]
        self._add_pins(keys)
        return slots

    def unpin(self, keys: Sequence[OffloadKey]) -> None:
        """Undo one `pin` per key.

        Raises:
            ValueError: a key is not pinned as often as it is given.
        """
        pins = self._pins
        counts = [pins.pop(key, 0) for key in keys]
        if counts.count(1) == len(keys):
            return
        # Some key is pinned more than once, comes twice, or is not pinned: put the counts back
        # and go key by key. A key's later places popped nothing, hence 0.
        pins.update((key, count) for key, count in zip(keys, counts, strict=True) if count)
        left: dict[OffloadKey, int] = {}
        for key in keys:
            left[key] = left.get(key, pins.get(key, 0)) - 1
        if min(left.values()) < 0:
            _refuse("unpin", "is not pinned as often", list(left), lambda key: left[key] < 0)
        for key, count in left.items():
            if count:
                pins[key] = count
            else:
                del pins[key]

    def release(self, keys: Sequence[OffloadKey], *, use: UseContext = UNKNOWN_USE) -> None:
        """Undo one `pin` per key and record one use of each, tail first.

        Raises:
            ValueError: a key is not pinned as often as it is given.
        """
        self.unpin(keys)
        self._policy.touch(keys, use)  # what was pinned is resident

    def touch(self, keys: Sequence[OffloadKey], *, use: UseContext = UNKNOWN_USE) -> None:
        """Record one use of each resident key, tail first.

        Raises:
            ValueError: a key is not resident.
        """
        self._require_resident("touch", keys)
        self._policy.touch(keys, use)

    def coldest(self, count: int) -> list[OffloadKey]:
        """Name the next `count` victims in order, as if nothing was pinned; changes nothing."""
        return self._policy.victims(count, ())

    def victims(self, count: int, held: AbstractSet[OffloadKey]) -> list[OffloadKey]:
        """Name the next `count` victims as if the one pin of each in `held` was gone. O(pins)."""
        pins = {
            key: pin_count for key, pin_count in self._pins.items() if pin_count > (key in held)
        }
        return self._policy.victims(count, pins)

    def free_count(self, group_idx: int) -> int:
        """Return how many chunks of a cached group find room without an eviction."""
        return self._slots.free_count(self._group_class[group_idx])

    def remove(self, keys: Collection[OffloadKey]) -> None:
        """Forget resident, unpinned keys whose bytes are worthless.

        Raises:
            ValueError: a key came twice, is not resident, or is pinned.
        """
        gone = list(keys)
        self._require_distinct("remove", gone)
        self._require_resident("remove", gone)
        if not self._pins.keys().isdisjoint(gone):
            _refuse("remove", "is pinned", gone, self._pins.__contains__)
        self._slots.give(self._policy.remove(gone))

    def discard(self, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        """Forget those of the keys that are not pinned; return those that stay because they are.

        Keys that are not resident are ignored.
        """
        resident = [key for key in keys if self._is_resident(key)]
        self.remove([key for key in resident if key not in self._pins])
        return [key for key in resident if key in self._pins]

    def clear(self) -> list[OffloadKey]:
        """Forget all resident, unpinned keys; return those that stay because they are pinned.

        The policy forgets its ghosts too. Arriving keys are not resident: they stay.
        """
        slot_by_key = self._slot_by_key()
        staying = [key for key in slot_by_key if key in self._pins]
        staying_slots = [slot_by_key.pop(key) for key in staying]
        self._slots.give(list(slot_by_key.values()))
        self._policy.clear()
        self._policy.insert(staying, staying_slots)
        return staying

    def check(self) -> list[str]:
        """Verify every internal invariant; return the violations in words (empty: sound)."""
        problems = []
        slot_by_key = self._slot_by_key()
        if len(slot_by_key) != len(self._policy):
            problems.append(f"the policy orders {len(slot_by_key)} of its {len(self._policy)} keys")
        both = slot_by_key.keys() & self._arriving.keys()
        if both:
            problems.append(f"{len(both)} keys are resident and arriving")
        lost = self._pins.keys() - slot_by_key.keys()
        if lost:
            problems.append(f"{len(lost)} keys are pinned but not resident")
        if any(count < 1 for count in self._pins.values()):
            problems.append("a pin count is not positive")
        held = [*self._arriving.values(), *self._detached]
        problems += self._slots.check([*slot_by_key.values(), *held])
        return problems

    def _add_pins(self, keys: Sequence[OffloadKey]) -> None:
        pins = self._pins
        if pins and not pins.keys().isdisjoint(keys):
            for key in keys:
                pins[key] = pins.get(key, 0) + 1
            return
        count = len(pins) + len(keys)
        for key in keys:
            pins[key] = 1
        if len(pins) != count:
            pins.update(Counter(keys))

    def _slot_by_key(self) -> dict[OffloadKey, int]:
        order = self._policy.victims(len(self._policy) + 1, ())
        slots = self._policy.locate(order)
        return {key: slot for key, slot in zip(order, slots, strict=True) if slot is not None}

    def _count_by_class(self, counts: Mapping[int, int]) -> list[int]:
        wanted = [0] * max(1, self._class_count)
        for group_idx, count in counts.items():
            wanted[self._group_class[group_idx]] += count
        return wanted

    def _choose_victims(
        self, class_idx: int, keys: Sequence[OffloadKey], use: UseContext
    ) -> list[OffloadKey] | None:
        slots = self._slots
        shortage = len(keys) - slots.free_count(class_idx)
        if shortage <= 0:
            return []
        if isinstance(slots, UniformSlots):
            victims = self._policy.victims(shortage, self._pins, keys, use)
            return victims if len(victims) == shortage else None
        asked = shortage
        while True:
            victims = self._policy.victims(asked, self._pins, keys, use)
            victim_slots = [slot for slot in self._policy.locate(victims) if slot is not None]
            chosen = slots.choose(class_idx, shortage, victim_slots)
            if chosen is not None:
                return [victims[position] for position in chosen]
            if len(victims) < asked:
                return None
            asked *= 2

    def _end_arrival(self, what: str, keys: Sequence[OffloadKey]) -> list[int]:
        arriving = self._arriving
        slots = [arriving.pop(key, _NO_SLOT) for key in keys]
        if _NO_SLOT in slots:
            # Put them back before naming the key: a repeated key popped its slot only once.
            popped = zip(keys, slots, strict=True)
            arriving.update((key, slot) for key, slot in popped if slot != _NO_SLOT)
            self._require_distinct(what, keys)
            _refuse(what, "is not arriving", keys, lambda key: key not in arriving)
        return slots

    def _end_detachment(self, what: str, slots: Sequence[int]) -> None:
        if len(set(slots)) != len(slots) or not self._detached.issuperset(slots):
            raise ValueError(f"{what}: {list(slots)} are not all detached; nothing was changed")
        self._detached.difference_update(slots)

    def _refuse_known(self, what: str, keys: Sequence[OffloadKey]) -> NoReturn:
        """Name the key because of which `are_new` said no."""
        self._require_distinct(what, keys)
        if self._policy.holds_any(keys):
            _refuse(what, "is resident", keys, self._is_resident)
        _refuse(what, "is arriving", keys, self._arriving.__contains__)

    def _require_distinct(self, what: str, keys: Sequence[OffloadKey]) -> None:
        if len(keys) > 1 and len(set(keys)) != len(keys):
            _refuse(what, "came twice", keys, lambda key: keys.count(key) > 1)

    def _require_resident(self, what: str, keys: Sequence[OffloadKey]) -> None:
        if None in self._policy.locate(keys):
            _refuse(what, "is not resident", keys, lambda key: not self._is_resident(key))

    def _is_resident(self, key: OffloadKey) -> bool:
        return self._policy.locate([key]) != [None]


def _refuse(
    what: str,
    why: str,
    keys: Sequence[OffloadKey],
    offends: Callable[[OffloadKey], bool],
) -> NoReturn:
    key = next(filter(offends, keys))
    raise ValueError(f"{what}: key {key.hex()} {why}; nothing was changed")
