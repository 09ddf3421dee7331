"""PrimaryTier against a model that is a few plain dicts, for one and for several size classes."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tierstore.config import PrimaryConfig
from tierstore.key import OffloadKey
from tierstore.layout import PAGE_BYTES
from tierstore.testing.spread import spread_hash
from tierstore.tier.memory.primary import PrimaryTier

numbers = st.integers(0, 25)


def keys_of(group_idx, chosen):
    return [OffloadKey(b"%d" % group_idx + spread_hash(number)) for number in chosen]


def mostly(known):
    """Some keys, most of them known, so that calls are mostly legal and do something."""
    return st.lists(st.sampled_from([*sorted(known) * 4, b"absent"]), min_size=1, max_size=5)


NEW_NUMBERS = 1000
"""From here on, numbers that no rule draws."""


class PrimaryMachine(RuleBasedStateMachine):
    """Key -> slot, pins, and what the order of eviction must not do."""

    slot_pages = (1, 1, 1)
    capacity_pages = 12
    eviction = "lru"

    @initialize()
    def open(self):
        config = PrimaryConfig(
            capacity_bytes=self.capacity_pages * PAGE_BYTES, eviction=self.eviction
        )
        self.tier = PrimaryTier(config, [pages * PAGE_BYTES for pages in self.slot_pages])
        self.resident, self.arriving, self.pins = {}, {}, {}
        self.detached = {}  # slot -> the key that it was reserved for

    def evictable(self):
        return set(self.resident) - set(self.pins)

    @rule(group_idx=st.integers(0, 2), chosen=st.lists(numbers, max_size=9), asks=st.booleans())
    def reserve(self, group_idx, chosen, asks):
        keys = keys_of(group_idx, chosen)
        taken = self.resident.keys() | self.arriving.keys()
        is_new = len(set(keys)) == len(keys) and not taken & set(keys)
        if asks:
            assert self.tier.are_new(keys) == is_new
        if not is_new:
            self.refused(lambda: self.tier.reserve(group_idx, keys))
            return
        before = self.tier.coldest(len(self.resident))
        reservation = self.tier.reserve(group_idx, keys)
        if reservation is None:
            self.expect_no_room(group_idx, len(keys))
            assert self.tier.coldest(len(self.resident)) == before
            return
        assert set(reservation.evicted) <= self.evictable()
        for key in reservation.evicted:
            del self.resident[key]
        slots = reservation.slots.tolist()
        assert len(slots) == len(keys)
        self.arriving.update(zip(keys, slots, strict=True))
        if keys:
            self.refused(lambda: self.tier.reserve(group_idx, keys))

    def expect_no_room(self, group_idx, count):
        if len(set(self.slot_pages)) == 1:
            held = len(self.pins) + len(self.arriving) + len(self.detached)
            assert count > self.capacity_pages // self.slot_pages[0] - held
            return
        # With several classes: not even the slabs in which nothing is held would do.
        largest = max(self.slot_pages)
        held = {**self.arriving, **{key: self.resident[key] for key in self.pins}}
        held_slabs = {slot // largest for slot in [*held.values(), *self.detached]}
        free_slabs = self.capacity_pages // largest - len(held_slabs)
        assert count > free_slabs * (largest // self.slot_pages[group_idx])

    @rule(data=st.data(), keep=st.booleans())
    def commit_or_abort(self, data, keep):
        keys = data.draw(st.lists(st.sampled_from([*sorted(self.arriving), b"absent"]), max_size=6))
        call = self.tier.commit if keep else self.tier.abort
        if b"absent" in keys or len(set(keys)) != len(keys):
            self.refused(lambda: call(keys))
            return
        call(keys)
        for key in keys:
            slot = self.arriving.pop(key)
            if keep:
                self.resident[key] = slot

    @rule(
        counts=st.lists(st.integers(0, 9), min_size=3, max_size=3),
        staying=st.sets(numbers, max_size=4),
        order=st.permutations(range(3)),
    )
    def reserve_what_has_room(self, counts, staying, order):
        """A promise holds for all groups together, in any order, once `staying` is pinned."""
        of_group = {g: set(keys_of(g, staying)).intersection(self.resident) for g in order}
        staying = [key for g in order for key in of_group[g]]
        wanted = {g: keys_of(g, range(NEW_NUMBERS, NEW_NUMBERS + counts[g])) for g in order}
        both = {g: counts[g] + len(of_group[g]) for g in order}
        # To count what is resident as if it had to come is the quicker question.
        has_room = self.tier.has_room({g: counts[g] for g in order}, staying)
        has_room |= self.tier.has_room(both)
        if has_room:
            assert self.tier.could_hold({g: counts[g] for g in order})
        self.tier.pin(staying)
        reserved = []
        for g in order:
            reservation = self.tier.reserve(g, wanted[g])
            if reservation is None:
                break
            reserved.append(wanted[g])
            for key in reservation.evicted:
                del self.resident[key]
        else:
            is_exact = len(set(self.slot_pages)) == 1 or sum(map(bool, counts)) == 1
            assert has_room or not is_exact
        assert len(reserved) == 3 or not has_room
        for keys in reserved:
            self.tier.abort(keys)
        self.tier.unpin(staying)

    @precondition(lambda self: self.arriving)
    @rule()
    def commit_all(self):
        self.tier.commit(list(self.arriving))
        self.resident.update(self.arriving)
        self.arriving.clear()

    @rule(data=st.data())
    def detach(self, data):
        keys = data.draw(st.lists(st.sampled_from([*sorted(self.arriving), b"absent"]), max_size=6))
        if b"absent" in keys or len(set(keys)) != len(keys):
            self.refused(lambda: self.tier.detach(keys))
            return
        slots = [self.arriving.pop(key) for key in keys]
        assert self.tier.detach(keys) == slots
        self.detached.update(zip(slots, keys, strict=True))

    @precondition(lambda self: self.detached)
    @rule(data=st.data(), keep=st.booleans())
    def end_detachment(self, data, keep):
        slots = data.draw(st.lists(st.sampled_from([*self.detached, -1]), min_size=1, max_size=4))
        keys = [self.detached.get(slot, b"absent") for slot in slots]
        is_legal = -1 not in slots and len(set(slots)) == len(slots)
        if keep:
            is_legal &= len(set(keys)) == len(keys)
            is_legal &= not set(keys) & (self.resident.keys() | self.arriving.keys())
        before = self.observed()
        if not is_legal:
            with pytest.raises(ValueError, match="nothing was changed"):
                self.end(keys, slots, keep=keep)
            assert self.observed() == before
            return
        self.end(keys, slots, keep=keep)
        for slot, key in zip(slots, keys, strict=True):
            del self.detached[slot]
            if keep:
                self.arriving[key] = slot

    def end(self, keys, slots, *, keep):
        if keep:
            self.tier.reattach(keys, slots)
        else:
            self.tier.give_back(slots)

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def pin(self, data):
        keys = data.draw(mostly(self.resident))
        if b"absent" in keys:
            self.refused(lambda: self.tier.pin(keys))
            return
        self.tier.pin(keys)
        for key in keys:
            self.pins[key] = self.pins.get(key, 0) + 1

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def pin_resident(self, data):
        keys = data.draw(mostly(self.resident))
        assert self.tier.holds_all(keys) == (b"absent" not in keys)
        assert self.tier.pin_resident(keys) == [self.resident.get(key) for key in keys]
        for key in keys:
            if key in self.resident:
                self.pins[key] = self.pins.get(key, 0) + 1

    @precondition(lambda self: self.pins)
    @rule(data=st.data(), call=st.sampled_from(["unpin", "release"]))
    def unpin_or_release(self, data, call):
        keys = data.draw(mostly(self.pins))
        end = getattr(self.tier, call)
        if any(keys.count(key) > self.pins.get(key, 0) for key in keys):
            self.refused(lambda: end(keys))
            return
        before = self.tier.coldest(len(self.resident))
        end(keys)
        for key in keys:
            self.pins[key] -= 1
        self.pins = {key: count for key, count in self.pins.items() if count}
        if call == "unpin":
            assert self.tier.coldest(len(self.resident)) == before
        else:
            self.expect_used(keys)

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def touch(self, data):
        keys = data.draw(mostly(self.resident))
        if b"absent" in keys:
            self.refused(lambda: self.tier.touch(keys))
            return
        self.tier.touch(keys)
        self.expect_used(keys)

    def expect_used(self, keys):
        if self.eviction == "lru" and keys:
            last_uses = list(dict.fromkeys(reversed(keys)))[::-1]
            assert self.tier.coldest(len(self.resident))[-len(last_uses) :] == last_uses

    @rule(data=st.data())
    def remove(self, data):
        keys = data.draw(st.lists(st.sampled_from([*sorted(self.resident), b"absent"]), max_size=3))
        illegal = len(set(keys)) != len(keys) or set(keys) - self.evictable()
        if illegal:
            self.refused(lambda: self.tier.remove(keys))
            return
        self.tier.remove(keys)
        for key in keys:
            del self.resident[key]

    @rule()
    def clear(self):
        assert set(self.tier.clear()) == set(self.pins)
        self.resident = {key: self.resident[key] for key in self.pins}

    def refused(self, call):
        before = self.observed()
        with pytest.raises(ValueError, match=r"key [0-9a-f]+ .*nothing was changed"):
            call()
        assert self.observed() == before

    def observed(self):
        everything = sorted({*self.resident, *self.arriving, *self.pins})
        return (
            self.tier.locate(everything),
            dict(self.tier.arriving),
            self.tier.detached_count,
            self.tier.coldest(len(self.resident)),
        )

    @invariant()
    def tier_is_the_model(self):
        assert self.tier.check() == []
        known = [*self.resident, b"absent", *self.arriving]
        slots = [*self.resident.values(), None, *(None for _ in self.arriving)]
        assert self.tier.locate(known) == slots
        assert dict(self.tier.arriving) == self.arriving
        assert self.tier.detached_count == len(self.detached)
        coldest = self.tier.coldest(len(self.resident) + 1)
        assert len(coldest) == len(set(coldest))
        assert set(coldest) == set(self.resident)
        assert len(self.tier) == len(self.resident)

    @invariant()
    def slots_do_not_overlap(self):
        pages = []
        detached = [(key, slot) for slot, key in self.detached.items()]
        for key, slot in [*self.resident.items(), *self.arriving.items(), *detached]:
            count = self.slot_pages[int(key[:1])]
            pages += range(slot, slot + count)
        assert len(pages) == len(set(pages))
        assert all(0 <= page < self.capacity_pages for page in pages)


class ArcMachine(PrimaryMachine):
    eviction = "arc"
    slot_pages = (3, 3, 3)
    capacity_pages = 32


class ClassesMachine(PrimaryMachine):
    slot_pages = (1, 2, 4)
    capacity_pages = 19


class ArcClassesMachine(ClassesMachine):
    eviction = "arc"
    slot_pages = (4, 3, 1)


TestLru = PrimaryMachine.TestCase
TestArc = ArcMachine.TestCase
TestLruClasses = ClassesMachine.TestCase
TestArcClasses = ArcClassesMachine.TestCase
_MODEST = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLru.settings = TestArc.settings = _MODEST
TestLruClasses.settings = TestArcClasses.settings = _MODEST
