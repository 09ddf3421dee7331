"""ArcPolicy against the paper, written down literally and slowly."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.key import OffloadKey
from tierstore.policy.arc import ArcPolicy, _digests
from tierstore.policy.plan import EvictionPlan
from tierstore.testing.spread import spread_hash


class TextbookArc:
    """Megiddo & Modha, FAST'03, Fig. 4, line by line; lists run from LRU to MRU."""

    def __init__(self, c):
        self.c = c
        self.p = 0.0
        self.t1, self.t2, self.b1, self.b2 = [], [], [], []

    def request(self, x, pinned=()):
        if x in self.t1 or x in self.t2:  # case I
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.append(x)
            return True
        if x in self.b1:  # case II
            self.p = min(self.c, self.p + max(1.0, len(self.b2) / len(self.b1)))
            self.replace(x, pinned)
            self.b1.remove(x)
            self.t2.append(x)
        elif x in self.b2:  # case III
            self.p = max(0.0, self.p - max(1.0, len(self.b1) / len(self.b2)))
            self.replace(x, pinned)
            self.b2.remove(x)
            self.t2.append(x)
        else:  # case IV
            l1 = len(self.t1) + len(self.b1)
            total = l1 + len(self.t2) + len(self.b2)
            if l1 == self.c:
                if len(self.t1) < self.c:
                    self.b1.pop(0)
                    self.replace(x, pinned)
                else:
                    self.t1.remove(next(key for key in self.t1 if key not in pinned))
            elif total >= self.c:
                if total == 2 * self.c:
                    self.b2.pop(0)
                self.replace(x, pinned)
            self.t1.append(x)
        return False

    def replace(self, x, pinned):
        if len(self.t1) + len(self.t2) < self.c:
            return  # only after keys were removed, of which the paper knows nothing
        cold1 = [key for key in self.t1 if key not in pinned]
        cold2 = [key for key in self.t2 if key not in pinned]
        t1_first = self.t1 and (len(self.t1) > self.p or (x in self.b2 and len(self.t1) == self.p))
        if (t1_first and cold1) or not cold2:
            self.t1.remove(cold1[0])
            self.b1.append(cold1[0])
        else:
            self.t2.remove(cold2[0])
            self.b2.append(cold2[0])

    def state(self):
        return self.p, self.t1, self.t2, _digests(self.b1), _digests(self.b2)


def state_of(policy):
    return policy._p, *(list(queue) for queue in (policy._t1, policy._t2, policy._b1, policy._b2))


def miss(policy, capacity, keys, pinned=()):
    """Make room and insert, as the primary tier does."""
    count = max(len(policy) + len(keys) - capacity, 0)
    plan = policy.victims(count, pinned, keys)
    if len(plan.keys) < count:
        return False
    policy.evict(plan)
    policy.insert(keys, range(len(keys)))
    return True


def key_of(number):
    return OffloadKey(spread_hash(number))


@st.composite
def long_traces(draw):
    """Lists that Hypothesis draws are short: most end before p and the ghosts have settled."""
    key_count, seed = draw(st.integers(2, 31)), draw(st.integers(0, 1 << 32))
    return [key_of(number) for number in random.Random(seed).choices(range(key_count), k=300)]


accesses = st.lists(st.integers(0, 30).map(key_of), max_size=300) | long_traces()


@given(capacity=st.integers(1, 12), trace=accesses)
@settings(max_examples=300, deadline=None)
def test_one_key_at_a_time_it_is_the_algorithm_of_the_paper(capacity, trace):
    textbook, policy = TextbookArc(capacity), ArcPolicy(capacity)
    for key in trace:
        hit = key in policy._t1 or key in policy._t2
        if hit:
            policy.touch([key])
        else:
            assert miss(policy, capacity, [key])
        assert textbook.request(key) == hit
        assert state_of(policy) == textbook.state()


@given(
    capacity=st.integers(1, 12),
    batches=st.lists(st.lists(st.integers(0, 30).map(key_of), max_size=12), max_size=60)
    | long_traces().map(lambda trace: [trace[start : start + 7] for start in range(0, 300, 7)]),
)
@settings(max_examples=400, deadline=None)
def test_a_batch_is_its_keys_one_by_one_with_the_batch_pinned(capacity, batches):
    textbook, policy = TextbookArc(capacity), ArcPolicy(capacity)
    for batch in batches:
        hits = [key for key in batch if key in textbook.t1 or key in textbook.t2]
        policy.touch(hits)
        for key in hits:
            assert textbook.request(key)
        misses = list(dict.fromkeys(key for key in batch if key not in hits))[:capacity]
        assert miss(policy, capacity, misses)
        for number, key in enumerate(misses):
            assert not textbook.request(key, pinned=misses[:number])
        assert state_of(policy) == textbook.state()


@given(
    capacity=st.integers(2, 12),
    batches=st.lists(
        st.tuples(
            st.lists(st.integers(0, 30).map(key_of), max_size=8, unique=True),
            st.sets(st.integers(0, 30).map(key_of), max_size=4),
        ),
        max_size=60,
    ),
)
@settings(max_examples=200, deadline=None)
def test_pinned_keys_are_passed_over_within_their_list(capacity, batches):
    textbook, policy = TextbookArc(capacity), ArcPolicy(capacity)
    for batch, pinned in batches:
        resident = {*textbook.t1, *textbook.t2}
        misses = [key for key in batch if key not in resident]
        room = capacity - len(resident & pinned)
        assert miss(policy, capacity, misses, pinned) == (len(misses) <= room)
        if len(misses) <= room:
            for number, key in enumerate(misses):
                textbook.request(key, pinned={*pinned, *misses[:number]})
        assert state_of(policy) == textbook.state()


def test_naming_victims_changes_nothing():
    policy = ArcPolicy(4)
    for number in range(12):
        miss(policy, 4, [key_of(number)])
    ghost = next(iter(policy._b1), key_of(99))
    before = state_of(policy)
    policy.victims(3, {key_of(9)}, [ghost, key_of(50), key_of(51)])
    assert state_of(policy) == before


def test_batches_that_never_arrive_leave_nothing_behind():
    policy = ArcPolicy(4)
    for number in range(4):
        miss(policy, 4, [key_of(number)])
    policy.touch([key_of(0), key_of(1)])
    miss(policy, 4, [key_of(4)])
    ghost = key_of(2)
    assert list(policy._b1) == _digests([ghost])
    for number in range(1, 100):
        incoming = [ghost, *(key_of(1000 * number + i) for i in range(50))]
        policy.evict(EvictionPlan([], incoming))
    assert len(policy._returning) <= 2 * 4 + 51
    assert miss(policy, 4, [ghost])
    assert ghost in policy._t2
