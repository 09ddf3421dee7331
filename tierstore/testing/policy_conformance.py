"""What every eviction policy has to do, whatever its order: a suite to inherit from.

class TestMyPolicy(PolicyConformance):
    def make(self, capacity_chunks):
        return MyPolicy(capacity_chunks)
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.key import OffloadKey
from tierstore.policy.protocol import EvictionPolicy
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
        assert policy.victims(3, ()) == []

    def test_keys_never_touched_leave_in_order_of_arrival(self) -> None:
        """Without any use, the tail of a prefix, which came first, goes first."""
        assert self.full().victims(3, ()) == keys_of(0, 1, 2)

    def test_touched_key_outlives_untouched_ones(self) -> None:
        """One use is worth more than none."""
        policy = self.full()
        policy.touch(keys_of(0, 1))
        assert policy.victims(6, ()) == keys_of(2, 3, 4, 5, 6, 7)

    def test_repeated_key_in_one_touch_counts_at_its_last_place(self) -> None:
        """A batch of uses is its uses one by one."""
        batched, single = self.full(), self.full()
        batched.touch(keys_of(3, 5, 3))
        for key in keys_of(3, 5, 3):
            single.touch([key])
        assert batched.victims(_CAPACITY, ()) == single.victims(_CAPACITY, ())

    def test_pinned_keys_are_skipped_and_the_others_keep_their_order(self) -> None:
        """A pin forbids eviction, no more and no less."""
        assert self.full().victims(3, set(keys_of(0, 2, 3))) == keys_of(1, 4, 5)

    def test_fewer_victims_where_pins_leave_no_more(self) -> None:
        """The caller decides what too few victims mean."""
        pinned = set(keys_of(*range(1, _CAPACITY)))
        assert self.full().victims(3, pinned) == keys_of(0)

    def test_more_victims_than_incoming_keys_can_be_asked_for(self) -> None:
        """One large slot takes the place of several small ones."""
        policy = self.full()
        ghosts = policy.victims(2, (), keys_of(90, 91))
        slots = policy.evict(ghosts, keys_of(90, 91))
        policy.insert(keys_of(90, 91), slots)
        for incoming in (ghosts[:1], keys_of(99)):
            assert len(policy.victims(5, (), incoming)) == 5  # noqa: PLR2004 - literally five

    def test_naming_victims_changes_nothing(self) -> None:
        """Asked twice, the answer is the same."""
        policy = self.full()
        incoming = keys_of(90, 91)
        assert policy.victims(2, (), incoming) == policy.victims(2, (), incoming)
        assert len(policy) == _CAPACITY

    def test_evicted_keys_are_gone_and_may_come_back(self) -> None:
        """A ghost is not resident."""
        policy = self.full()
        victims = policy.victims(2, (), keys_of(90, 91))
        slots = policy.evict(victims, keys_of(90, 91))
        policy.insert(keys_of(90, 91), slots)
        assert len(policy) == _CAPACITY
        assert not set(victims) & set(policy.victims(_CAPACITY, ()))
        others = policy.victims(2, (), victims)
        policy.insert(victims, policy.evict(others, victims))
        assert set(victims) <= set(policy.victims(_CAPACITY, ()))

    def test_removed_keys_are_gone(self) -> None:
        """Removal takes keys from any place in the order."""
        policy = self.full()
        policy.touch(keys_of(4))
        assert policy.remove(keys_of(4, 0, 6)) == [4, 0, 6]
        assert set(policy.victims(_CAPACITY, ())) == set(keys_of(1, 2, 3, 5, 7))

    def test_clear_forgets_everything(self) -> None:
        """A cleared policy behaves like a new one."""
        policy = self.full()
        policy.evict(policy.victims(3, ()))
        policy.clear()
        assert len(policy) == 0
        policy.insert(keys_of(3, 2, 1), [0, 1, 2])
        assert policy.victims(3, ()) == keys_of(3, 2, 1)

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
        victims = policy.victims(count, pinned, misses)
        assert len(set(victims)) == len(victims)
        assert set(victims) <= resident.keys() - pinned
        assert len(victims) == min(count, len(resident.keys() - pinned))
        if len(victims) == count:
            slots = policy.evict(victims, misses)
            assert slots == [resident.pop(key) for key in victims]
            policy.insert(misses, numbers[: len(misses)])
            resident.update(zip(misses, numbers, strict=False))
        assert len(policy) == len(resident)
        assert set(policy.victims(2 * _CAPACITY, ())) == resident.keys()
        assert policy.locate([*resident, *keys_of(99)]) == [*resident.values(), None]
        for number in range(25):
            [key] = keys_of(number)
            assert policy.holds_any(keys_of(99, number)) == (key in resident)
            assert policy.holds_all([*resident, key]) == (key in resident)
            assert policy.holds_all([key, *resident]) == (key in resident)
