"""Replay of recorded block traces: the policies give the figures of an independent simulator.

The recorded traces are large and not shipped; TIERSTORE_TRACES names the folder that holds them.
The shipped test replays a synthetic trace of the same kind against plain reference caches.
"""

import gzip
import json
import os
import random
from collections import OrderedDict
from pathlib import Path

import pytest

from tierstore.key import OffloadKey
from tierstore.policy import make_policy
from tierstore.testing.spread import spread_hash

LRU_TAIL_FIRST = {
    ("mooncake_conv_first60", 586): 0.0408,
    ("mooncake_conv_first60", 1172): 0.0447,
    ("mooncake_conv_first60", 2345): 0.0567,
    ("mooncake_conv_first60", 5863): 0.1349,
    ("mooncake_conv_first60", 11727): 0.2244,
    ("weka_a", 862): 0.3257,
    ("weka_a", 4314): 0.9209,
}
ARC_TAIL_FIRST = {
    ("mooncake_conv_first60", 586): 0.0459,
    ("mooncake_conv_first60", 1172): 0.0539,
    ("mooncake_conv_first60", 2345): 0.0737,
    ("mooncake_conv_first60", 5863): 0.1421,
    ("mooncake_conv_first60", 11727): 0.2335,
    ("weka_a", 862): 0.3948,
    ("weka_a", 4314): 0.9094,
}


def hit_ratio(requests, name, capacity):
    """Replay one block at a time, tail first; hits count up to the first absent block."""
    policy = make_policy(name, capacity)
    resident = set()
    hit_count = asked_count = 0
    for keys in requests:
        asked_count += len(keys)
        for key in keys:
            if key not in resident:
                break
            hit_count += 1
        for key in reversed(keys):
            if key in resident:
                policy.touch([key])
                continue
            plan = policy.victims(max(len(policy) + 1 - capacity, 0), (), [key])
            policy.evict(plan)
            policy.insert([key], [0])
            resident.difference_update(plan.keys)
            resident.add(key)
    return hit_count / asked_count


def reference_lru_hit_ratio(requests, capacity):
    order = OrderedDict()
    hit_count = asked_count = 0
    for keys in requests:
        asked_count += len(keys)
        for key in keys:
            if key not in order:
                break
            hit_count += 1
        for key in reversed(keys):
            order[key] = None
            order.move_to_end(key)
            if len(order) > capacity:
                order.popitem(last=False)
    return hit_count / asked_count


def synthetic_requests(seed, session_count=120, turn_count=8):
    """Sessions that grow by a few blocks per turn, their turns interleaved."""
    print("seed", seed)
    draw = random.Random(seed)
    shared = [OffloadKey(spread_hash(("shared", number))) for number in range(4)]
    sessions = [list(shared) for _ in range(session_count)]
    turns = [number for number in range(session_count) for _ in range(turn_count)]
    turns.sort(key=lambda number: number // 10 + draw.random() * 3)
    for number in turns:
        blocks = sessions[number]
        first = len(blocks)
        blocks += [
            OffloadKey(spread_hash((number, first + i))) for i in range(draw.randrange(1, 12))
        ]
        yield list(blocks)


def recorded_requests(name):
    folder = os.environ.get("TIERSTORE_TRACES")
    path = Path(folder or ".") / f"{name}.jsonl.gz"
    if not folder or not path.exists():
        pytest.skip("TIERSTORE_TRACES names no folder with this trace")
    keys = {}
    with gzip.open(path, "rt") as lines:
        for line in lines:
            ids = json.loads(line)["hash_ids"]
            yield [keys.setdefault(i, OffloadKey(spread_hash(i))) for i in ids]


@pytest.mark.parametrize("capacity", [20, 150, 600])
def test_lru_has_the_hits_of_a_reference_lru(capacity):
    requests = list(synthetic_requests(seed=7))
    assert hit_ratio(requests, "lru", capacity) == reference_lru_hit_ratio(requests, capacity) > 0


def test_arc_keeps_what_was_used_twice_through_a_scan_and_lru_does_not():
    hot = [OffloadKey(spread_hash(("hot", number))) for number in range(50)]
    scan = [[OffloadKey(spread_hash(("scan", number)))] for number in range(1000)]
    requests = [hot, hot, *scan, hot]
    asked = sum(map(len, requests))
    assert hit_ratio(requests, "arc", 100) == 100 / asked
    assert hit_ratio(requests, "lru", 100) == 50 / asked


@pytest.mark.slow
@pytest.mark.parametrize(("trace", "capacity"), LRU_TAIL_FIRST)
def test_lru_tail_first_has_the_reference_figures(trace, capacity):
    ratio = hit_ratio(recorded_requests(trace), "lru", capacity)
    assert ratio == pytest.approx(LRU_TAIL_FIRST[trace, capacity], abs=0.0005)


@pytest.mark.slow
@pytest.mark.parametrize(("trace", "capacity"), ARC_TAIL_FIRST)
def test_arc_tail_first_has_the_reference_figures(trace, capacity):
    ratio = hit_ratio(recorded_requests(trace), "arc", capacity)
    assert ratio == pytest.approx(ARC_TAIL_FIRST[trace, capacity], abs=0.003)
