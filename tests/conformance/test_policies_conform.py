import random
import tracemalloc
from collections import OrderedDict

import pytest

from tierstore.policy import make_policy
from tierstore.policy.arc import ArcPolicy
from tierstore.policy.ghost_queue import GhostIndex, GhostQueue
from tierstore.policy.key_index import KeyIndex
from tierstore.policy.key_queue import KeyQueue
from tierstore.policy.lru import LruPolicy
from tierstore.testing.policy_conformance import PolicyConformance, keys_of


class TestLru(PolicyConformance):
    def make(self, capacity_chunks):
        return LruPolicy()


class TestArc(PolicyConformance):
    def make(self, capacity_chunks):
        return ArcPolicy(capacity_chunks)


def test_policies_are_made_by_name():
    assert isinstance(make_policy("lru", 4), LruPolicy)
    assert isinstance(make_policy("arc", 4), ArcPolicy)


def test_arc_of_no_capacity_is_refused():
    with pytest.raises(ValueError, match="capacity_chunks"):
        make_policy("arc", 0)


@pytest.mark.parametrize("seed", range(4))
def test_key_queue_keeps_the_order_of_an_ordered_dict(seed):
    """Large enough for many compactions and refills of the cold end."""
    print("seed", seed)
    draw = random.Random(seed)
    index = KeyIndex(4000)
    queue, model = KeyQueue(index), OrderedDict()
    number = 0
    for _ in range(3000):
        action = draw.randrange(5)
        count = draw.choice([1, 1, 7, 60])
        if action <= 1:
            keys = keys_of(*range(number, number + count))
            number += count
            queue.push(keys, range(count))
            model.update(zip(keys, range(count), strict=True))
        elif action == 2 and model:
            keys = draw.choices(list(model), k=count)
            queue.touch(keys)
            for key in keys:
                model.move_to_end(key)
        elif action == 3:
            skip = set(draw.sample(list(model)[:200], min(len(model), 20)))
            expected = [key for key in model if key not in skip][:count]
            assert queue.peek(count, skip) == expected
            assert queue.pop(expected) == [model.pop(key) for key in expected]
        elif model:
            keys = [*draw.sample(list(model), min(count, len(model))), *keys_of(10**9)]
            assert index.locate(keys) == [model.get(key) for key in keys]
            assert index.holds_any(keys)
            assert not index.holds_all(keys)
            assert index.holds_all(keys[:-1])
            assert queue.pop(keys[:-1]) == [model.pop(key) for key in keys[:-1]]
        assert len(queue) == len(model)
    assert list(queue) == list(model)
    assert queue.peek(len(model) + 1) == list(model)


@pytest.mark.parametrize("seed", range(4))
def test_ghost_queue_keeps_the_order_of_an_ordered_dict(seed):
    """Ghosts leave from the middle and come again while their old place is still there."""
    print("seed", seed)
    draw = random.Random(seed)
    index = GhostIndex(5000)
    queue, model = GhostQueue(index), OrderedDict()
    for _ in range(3000):
        count = draw.choice([1, 1, 7, 300])
        some = draw.sample(range(5000), count)
        action = draw.randrange(3)
        if action == 0:
            ghosts = [ghost for ghost in some if ghost not in model]
            queue.push(ghosts)
            model.update(dict.fromkeys(ghosts))
        elif action == 1:
            index.remove(some)
            for ghost in some:
                model.pop(ghost, None)
        else:
            oldest = list(model)[:count]
            assert queue.peek(count) == oldest
            queue.drop_oldest(count)
            for ghost in oldest:
                del model[ghost]
        assert len(queue) == len(model)
        assert index.holds_any(some) == (not model.keys().isdisjoint(some))
    assert list(queue) == list(model)


@pytest.mark.parametrize("cycling", [1, 50, 3000])
def test_ghosts_that_leave_and_come_again_take_no_more_memory_each_time(cycling):
    """A working set a little larger than the tier: every miss is a ghost, and none is dropped."""
    index = GhostIndex(5000)
    queue = GhostQueue(index)
    queue.push(range(5000))
    ghosts = list(range(1000, 1000 + cycling))
    tracemalloc.start()
    try:
        for _ in range(200_000 // cycling):
            index.remove(ghosts)
            queue.push([ghost + 0 for ghost in ghosts])  # other objects each time
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2 << 20
    stayed = [ghost for ghost in range(5000) if ghost not in set(ghosts)]
    assert list(queue) == stayed + ghosts
