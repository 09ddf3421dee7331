"""What every eviction policy has to do: a suite to inherit from.

The tests of order ask for the least recently used key, at first sight; a policy with another order
overrides them.

class TestMyPolicy(PolicyConformance):
    def make(self, capacity_chunks):
        return MyPolicy(capacity_chunks)
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.key import OffloadKey
from tierstore.policy.plan import EvictionPlan
from tierstore.policy.protocol import EvictionPolicy
from tierstore.policy.use import UseContext
from tierstore.testing.spread import spread_hashes

__all__ = ["PolicyConformance", "keys_of"]

_CAPACITY = 8


def keys_of(*numbers: int) -> list[OffloadKey]:
    """Return one key per number."""
    return [OffloadKey(block_hash) for block_hash in spread_hashes(numbers)]


class PolicyConformance(ABC):
    """Inherit, name the class `Test...`, implement `make`; pytest does the rest."""

    @abstractmethod
    def make(self, capacity_chunks: int) -> EvictionPolicy:
        """Return a new policy."""

    def full(self) -> EvictionPolicy:
        """Return a policy over the keys 0 to 7, its capacity, inserted in this order."""
        policy = self.make(_CAPACITY)
        policy.insert(keys_of(*range(_CAPACITY)), range(_CAPACITY))
        return policy

    def test_new_policy_names_no_victim(self) -> None:
        """Nothing is resident, nothing can go."""
        policy = self.make(_CAPACITY)
        assert len(policy) == 0
        assert policy.victims(3, ()).keys == []

    def test_keys_never_touched_leave_in_order_of_arrival(self) -> None:
        """Without any use, the tail of a prefix, which came first, goes first."""
        assert self.full().victims(3, ()).keys == keys_of(0, 1, 2)

    def test_touched_key_outlives_untouched_ones(self) -> None:
        """One use is worth more than none."""
        policy = self.full()
        policy.touch(keys_of(0, 1))
        assert policy.victims(6, ()).keys == keys_of(2, 3, 4, 5, 6, 7)

    def test_repeated_key_in_one_touch_counts_at_its_last_place(self) -> None:
        """A batch of uses is its uses one by one."""
        batched, single = self.full(), self.full()
        batched.touch(keys_of(3, 5, 3))
        for key in keys_of(3, 5, 3):
            single.touch([key])
        assert batched.victims(_CAPACITY, ()).keys == single.victims(_CAPACITY, ()).keys

    def test_pinned_keys_are_skipped_and_the_others_keep_their_order(self) -> None:
        """A pin forbids eviction, no more and no less."""
        assert self.full().victims(3, set(keys_of(0, 2, 3))).keys == keys_of(1, 4, 5)

    def test_fewer_victims_where_pins_leave_no_more(self) -> None:
        """The caller decides what too few victims mean."""
        pinned = set(keys_of(*range(1, _CAPACITY)))
        assert self.full().victims(3, pinned).keys == keys_of(0)

    def test_more_victims_than_incoming_keys_can_be_asked_for(self) -> None:
        """One large slot takes the place of several small ones."""
        policy = self.full()
        plan = policy.victims(2, (), keys_of(90, 91))
        policy.insert(keys_of(90, 91), policy.evict(plan))
        for incoming in (plan.keys[:1], keys_of(99)):
            assert len(policy.victims(5, (), incoming).keys) == 5  # noqa: PLR2004 - literally five

    def test_naming_victims_changes_nothing(self) -> None:
        """Asked twice, the answer is the same."""
        policy = self.full()
        incoming = keys_of(90, 91)
        assert policy.victims(2, (), incoming).keys == policy.victims(2, (), incoming).keys
        assert len(policy) == _CAPACITY

    def test_evicted_keys_are_gone_and_may_come_back(self) -> None:
        """A ghost is not resident."""
        policy = self.full()
        plan = policy.victims(2, (), keys_of(90, 91))
        victims = plan.keys
        policy.insert(keys_of(90, 91), policy.evict(plan))
        assert len(policy) == _CAPACITY
        assert not set(victims) & set(policy.victims(_CAPACITY, ()).keys)
        policy.insert(victims, policy.evict(policy.victims(2, (), victims)))
        assert set(victims) <= set(policy.victims(_CAPACITY, ()).keys)

    def test_part_of_a_plan_can_be_evicted(self) -> None:
        """With slots of several sizes, some victims are of no use to the caller."""
        policy = self.full()
        incoming = keys_of(90, 91)
        victims = policy.victims(4, (), incoming).keys
        slots = policy.locate(victims)
        chosen = EvictionPlan([victims[1], victims[3]], incoming)
        assert policy.evict(chosen) == [slots[1], slots[3]]
        assert policy.locate(victims) == [slots[0], None, slots[2], None]

    def test_own_plan_and_the_same_one_of_the_caller_do_the_same(self) -> None:
        """What a policy has noted in its plan spares it work, and changes nothing."""

        @given(batches=st.lists(st.lists(st.integers(0, 24), min_size=1, unique=True), max_size=30))
        @settings(max_examples=50, deadline=None)
        def check(batches: Sequence[list[int]]) -> None:
            own, other = self.make(_CAPACITY), self.make(_CAPACITY)
            for numbers in batches:
                keys = keys_of(*numbers[:_CAPACITY])
                for policy in (own, other):
                    policy.touch([key for key in keys if policy.holds_all([key])])
                misses = [key for key in keys if not own.holds_all([key])]
                count = max(len(own) + len(misses) - _CAPACITY, 0)
                plan = own.victims(count, keys, misses)
                assert other.victims(count, keys, misses).keys == plan.keys
                if len(plan.keys) == count:
                    slots = own.evict(plan)
                    assert other.evict(EvictionPlan(list(plan.keys), misses)) == slots
                    own.insert(misses, range(len(misses)))
                    other.insert(misses, range(len(misses)))
                assert own.victims(_CAPACITY, ()).keys == other.victims(_CAPACITY, ()).keys

        check()

    def test_slots_that_were_free_take_no_victim(self) -> None:
        """Misses are told by a plan without victims."""
        policy = self.full()
        assert policy.evict(EvictionPlan([], keys_of(90))) == []
        assert len(policy) == _CAPACITY

    def test_uses_are_told_to_every_call(self) -> None:
        """A policy may go by them or not; a plan carries the use for which it was made."""
        policy = self.make(_CAPACITY)
        use = UseContext.of("a", depth=3, priority=-1, hints=(("keep", "long"),))
        policy.insert(keys_of(1, 2), [1, 2], use)
        policy.touch(keys_of(1), UseContext.of("b", parent_id="a", turn=1))
        plan = policy.victims(1, (), keys_of(90), use)
        assert (plan.incoming, plan.use) == (keys_of(90), use)
        [slot] = policy.locate(plan.keys)
        assert policy.evict(plan) == [slot]
        policy.insert(keys_of(90), [slot or 0])
        assert len(policy) == len(policy.victims(3, ()).keys)

    def test_removed_keys_are_gone(self) -> None:
        """Removal takes keys from any place in the order."""
        policy = self.full()
        policy.touch(keys_of(4))
        assert policy.remove(keys_of(4, 0, 6)) == [4, 0, 6]
        assert set(policy.victims(_CAPACITY, ()).keys) == set(keys_of(1, 2, 3, 5, 7))

    def test_clear_forgets_everything(self) -> None:
        """A cleared policy behaves like a new one."""
        policy = self.full()
        policy.evict(policy.victims(3, ()))
        policy.clear()
        assert len(policy) == 0
        policy.insert(keys_of(3, 2, 1), [0, 1, 2])
        assert policy.victims(3, ()).keys == keys_of(3, 2, 1)

    def test_victims_are_distinct_resident_unpinned_and_as_many_as_possible(self) -> None:
        """Random use, with a set of resident keys as the model."""

        # Not a decorated method: Hypothesis refuses one that several subclasses inherit.
        @given(
            batches=st.lists(
                st.tuples(
                    st.sampled_from(["use", "use", "use", "remove"]),
                    st.lists(st.integers(0, 24), min_size=1, max_size=_CAPACITY, unique=True),
                    st.sets(st.integers(0, 24), max_size=3),
                ),
                max_size=50,
            )
        )
        @settings(max_examples=150, deadline=None)
        def check(batches: Sequence[tuple[str, list[int], set[int]]]) -> None:
            _compare_with_a_set(self.make(_CAPACITY), batches)

        check()


def _compare_with_a_set(
    policy: EvictionPolicy, batches: Sequence[tuple[str, list[int], set[int]]]
) -> None:
    resident: dict[OffloadKey, int] = {}
    for action, numbers, pinned_numbers in batches:
        keys, pinned = keys_of(*numbers), set(keys_of(*pinned_numbers))
        hits = [key for key in keys if key in resident]
        if action == "remove":
            assert policy.remove(hits) == [resident.pop(key) for key in hits]
            continue
        policy.touch(hits)
        misses = [key for key in keys if key not in resident]
        count = max(len(resident) + len(misses) - _CAPACITY, 0)
        plan = policy.victims(count, pinned, misses)
        victims = plan.keys
        assert len(set(victims)) == len(victims)
        assert set(victims) <= resident.keys() - pinned
        assert len(victims) == min(count, len(resident.keys() - pinned))
        if len(victims) == count:
            slots = policy.evict(plan)
            assert slots == [resident.pop(key) for key in victims]
            policy.insert(misses, numbers[: len(misses)])
            resident.update(zip(misses, numbers, strict=False))
        assert len(policy) == len(resident)
        assert set(policy.victims(2 * _CAPACITY, ()).keys) == resident.keys()
        assert policy.locate([*resident, *keys_of(99)]) == [*resident.values(), None]
        for number in range(25):
            [key] = keys_of(number)
            assert policy.holds_any(keys_of(99, number)) == (key in resident)
            assert policy.holds_all([*resident, key]) == (key in resident)
            assert policy.holds_all([key, *resident]) == (key in resident)
