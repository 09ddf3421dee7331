"""The primary tier's index: which key lies in which slot, which are pinned, which leave next."""

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from tierstore.config import PrimaryConfig
from tierstore.key import OffloadKey
from tierstore.policy import make_policy
from tierstore.policy.plan import EvictionPlan
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.tier.memory.arrivals import Arrivals
from tierstore.tier.memory.eviction import plan_eviction
from tierstore.tier.memory.pin_counts import PinCounts
from tierstore.tier.memory.refusal import refusal, refusal_of_first, require_distinct
from tierstore.tier.memory.slot_pool import SlotPool
from tierstore.transfer import IntArray

__all__ = ["PrimaryTier", "Reservation"]


class Reservation(NamedTuple):
    """Slots set aside for incoming chunks, and the chunks that were evicted for them."""

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
        self._slots = SlotPool(config.capacity_bytes, slot_bytes)
        self._policy = make_policy(
            config.eviction, self._slots.capacity_chunks, config.eviction_options
        )
        self.needs_use = self._policy.needs_use
        """Whether the policy goes by uses; if not, callers leave them out."""
        self._arrivals = Arrivals()
        self._arriving_view = MappingProxyType(self._arrivals.arriving)
        self._pins = PinCounts()
        self._known_new: Sequence[OffloadKey] | None = None
        """The list of which `are_new` returned True. It stays true until the next `reserve` or
        `reattach`: no other call adds keys."""

    def __len__(self) -> int:
        return len(self._policy)

    def locate(self, keys: Sequence[OffloadKey]) -> list[int | None]:
        """Return the slot of each resident key, None for others. <= 0.1 us per key."""
        return self._policy.locate(keys)

    def holds_all(self, keys: Sequence[OffloadKey]) -> bool:
        """Return whether all of the keys are resident; half the cost of `locate`."""
        return self._policy.holds_all(keys)

    def are_new(self, keys: Sequence[OffloadKey]) -> bool:
        """Return whether no key is resident, arriving, or given twice, so that all can be reserved.

        The next `reserve` does not look again if it is of the same list; leave that as it is.
        """
        arriving = self._arrivals.arriving
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
        caller bug. The slots hold garbage until `commit`; no caller can pin them before. Policies
        see the keys miss in their order: pass the keys of a prefix tail first, as to `commit`.

        Raises:
            ValueError: a key came twice, is resident or arriving, or the group is not cached.
        """
        slot_pool = self._slots
        if not slot_pool.is_cached[group_idx]:
            raise ValueError(f"reserve: group {group_idx} is not cached")
        if keys is not self._known_new and not self.are_new(keys):
            raise self._refusal_of_known("reserve", keys)
        self._known_new = None
        count = len(keys)
        plan = plan_eviction(self._policy, slot_pool, self._pins, group_idx, keys, use=use)
        if plan is None:
            return None
        slots = self._policy.evict(plan)
        if slot_pool.uniform_slot_count is None or len(slots) < count:
            slot_pool.give(slots)
            # Keys come tail first, and the victims of a prefix too: the tail gets the last slot,
            # so that a prefix lies in the pool in its own order.
            slots = slot_pool.take(group_idx, count)[::-1]
        self._arrivals.begin(keys, slots)
        return Reservation(np.array(slots, np.int64), plan.keys)

    def has_room(self, counts: Mapping[int, int], staying: Sequence[OffloadKey] = ()) -> bool:
        """Return whether `reserve` would find so many slots per group, one group after the other.

        `staying` are resident keys that would be pinned before. Never true of what `reserve` would
        refuse; with several size classes it may be false of what it would grant. O(pins).
        """
        pins = self._pins
        others = pins.unpinned(staying) if pins else staying
        if self._slots.uniform_slot_count is not None:
            held_count = len(pins) + len(others) + len(self._arrivals)
            return sum(counts.values()) + held_count <= self._slots.uniform_slot_count
        located = self._policy.locate([*pins, *others])
        held = [slot for slot in located if slot is not None]
        return self._slots.has_room(counts, [*held, *self._arrivals.slots()])

    def could_hold(self, counts: Mapping[int, int]) -> bool:
        """Return whether so many chunks per group have room beside each other in the whole pool."""
        return self._slots.could_hold(counts)

    @property
    def is_room_held(self) -> bool:
        """Whether transfers hold chunks, whose room comes back when they end."""
        return bool(self._pins or self._arrivals.arriving)

    def commit(self, keys: Sequence[OffloadKey], *, use: UseContext = UNKNOWN_USE) -> None:
        """Make arriving keys resident; in order of eviction, so a prefix comes tail first.

        Raises:
            ValueError: a key came twice or is not arriving.
        """
        slots = self._arrivals.end("commit", keys)
        self._policy.insert(keys, slots, use)

    def abort(self, keys: Sequence[OffloadKey]) -> None:
        """Give the slots of arriving keys back.

        Raises:
            ValueError: a key came twice or is not arriving.
        """
        self._slots.give(self._arrivals.end("abort", keys))

    def detach(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Make arriving keys absent, and keep their slots reserved; return the slots.

        For a read that does not end: its bytes may still come, and its keys must not wait for it.
        The slots come back by `reattach` or `give_back`.

        Raises:
            ValueError: a key came twice or is not arriving.
        """
        return self._arrivals.detach("detach", keys)

    def reattach(
        self, keys: Sequence[OffloadKey], slots: Sequence[int], *, use: UseContext = UNKNOWN_USE
    ) -> None:
        """Let new keys, tail first, arrive in detached slots.

        Raises:
            ValueError: a key came twice, is resident or arriving, or a slot is not detached.
        """
        if not self.are_new(keys):
            raise self._refusal_of_known("reattach", keys)
        self._known_new = None
        self._arrivals.end_detachment("reattach", slots)
        # The keys miss, and their slots are free.
        self._policy.evict(EvictionPlan([], keys, use))
        self._arrivals.begin(keys, slots)

    def give_back(self, slots: Sequence[int]) -> None:
        """Give detached slots back to the pool.

        Raises:
            ValueError: a slot came twice or is not detached.
        """
        self._arrivals.end_detachment("give_back", slots)
        self._slots.give(slots)

    @property
    def detached_count(self) -> int:
        """How many slots are reserved under no key."""
        return self._arrivals.detached_count

    def pin(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Forbid the eviction of resident keys once more (counted); return their slots.

        A key has the same slot for as long as it is pinned.

        Raises:
            ValueError: a key is not resident.
        """
        slots = self._require_resident("pin", keys)
        self._pins.add(keys)
        return slots

    def pin_resident(self, keys: Sequence[OffloadKey]) -> list[int | None]:
        """Pin those of the keys that are resident; return their slots, None for the others."""
        slots = self._policy.locate(keys)
        if None in slots:
            keys = [key for key, slot in zip(keys, slots, strict=True) if slot is not None]
        self._pins.add(keys)
        return slots

    def unpin(self, keys: Sequence[OffloadKey]) -> None:
        """Undo one `pin` per key.

        Raises:
            ValueError: a key is not pinned as often as it is given.
        """
        missing = self._pins.remove(keys)
        if missing is not None:
            raise refusal("unpin", "is not pinned as often", missing)

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
        return self._policy.victims(count, ()).keys

    def victims(self, count: int, held: AbstractSet[OffloadKey]) -> list[OffloadKey]:
        """Name the next `count` victims as if the one pin of each in `held` was gone. O(pins)."""
        pins = {
            key: pin_count for key, pin_count in self._pins.counts() if pin_count > (key in held)
        }
        return self._policy.victims(count, pins).keys

    def free_count(self, group_idx: int) -> int:
        """Return how many chunks of a cached group find room without an eviction."""
        return self._slots.free_count(group_idx)

    def remove(self, keys: Collection[OffloadKey]) -> None:
        """Forget resident, unpinned keys whose bytes are worthless.

        Raises:
            ValueError: a key came twice, is not resident, or is pinned.
        """
        gone = list(keys)
        require_distinct("remove", gone)
        self._require_resident("remove", gone)
        if len(self._pins.unpinned(gone)) < len(gone):
            raise refusal_of_first("remove", "is pinned", gone, self._pins.__contains__)
        self._slots.give(self._policy.remove(gone))

    def discard(self, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        """Forget those of the keys that are not pinned; return those that stay because they are.

        Keys that are not resident are ignored.
        """
        resident = [key for key in keys if self._is_resident(key)]
        self.remove(self._pins.unpinned(resident))
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
        both = slot_by_key.keys() & self._arrivals.arriving.keys()
        if both:
            problems.append(f"{len(both)} keys are resident and arriving")
        lost = set(self._pins) - slot_by_key.keys()
        if lost:
            problems.append(f"{len(lost)} keys are pinned but not resident")
        if any(count < 1 for _, count in self._pins.counts()):
            problems.append("a pin count is not positive")
        problems += self._slots.check([*slot_by_key.values(), *self._arrivals.slots()])
        return problems

    def _slot_by_key(self) -> dict[OffloadKey, int]:
        order = self._policy.victims(len(self._policy) + 1, ()).keys
        slots = self._policy.locate(order)
        return {key: slot for key, slot in zip(order, slots, strict=True) if slot is not None}

    def _refusal_of_known(self, what: str, keys: Sequence[OffloadKey]) -> ValueError:
        """Return the error that names the key because of which `are_new` returned False."""
        require_distinct(what, keys)
        if self._policy.holds_any(keys):
            return refusal_of_first(what, "is resident", keys, self._is_resident)
        return refusal_of_first(what, "is arriving", keys, self.arriving.__contains__)

    def _require_resident(self, what: str, keys: Sequence[OffloadKey]) -> list[int]:
        slots = self._policy.locate(keys)
        if None in slots:
            raise refusal_of_first(
                what, "is not resident", keys, lambda key: not self._is_resident(key)
            )
        return slots  # type: ignore[return-value]  # it would be a copy

    def _is_resident(self, key: OffloadKey) -> bool:
        return self._policy.locate([key]) != [None]
