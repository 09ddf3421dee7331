"""Hits that the planner promises over real tiers whose memory cannot hold what the disk has."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from tierstore import Manifest, TierStore, load_config, make_offload_keys
from tierstore.clock import MonotonicClock
from tierstore.layout import PAGE_BYTES
from tierstore.metrics import Counters
from tierstore.planner import EngineStep, LoadTarget, OffloadPlanner, PrefixAnswer
from tierstore.testing.spread import spread_hashes
from tierstore.tier.opening import open_stack
from tierstore.tier.reservation import ChunkState
from tierstore.tier.stack import TierStack
from tierstore.transfer import TransferDone

SLOT_COUNT = 128
MANIFEST = Manifest.simple("m", chunk_bytes=PAGE_BYTES)
ANSWER_SECONDS_MAX = 60
"""Of the thread that looks many chunks up; it takes milliseconds."""


def hashes(name, count):
    return spread_hashes((name, number) for number in range(count))


@contextmanager
def opened(tmp_path, **recorded) -> Iterator[tuple[OffloadPlanner, TierStack]]:
    """Open a planner over memory of 128 slots, with one request per prefix that is on disk."""
    disk = {"name": "d", "backend": "file", "path": str(tmp_path), "capacity": "64MiB"}
    with TierStore.open(
        load_config({"primary": {"capacity": "8MiB"}, "secondary": [disk]}), MANIFEST
    ) as store:
        for name, count in recorded.items():
            keys = make_offload_keys(MANIFEST.namespace, 0, hashes(name, count))
            assert all(store.put(keys, np.zeros((count, PAGE_BYTES), np.uint8)))
        store.flush()
    memory = {"capacity": f"{SLOT_COUNT * PAGE_BYTES}B"}
    config = load_config({"primary": memory, "secondary": [disk]})
    stack = open_stack(config, MANIFEST, rank_count=1, counters=Counters())
    planner = OffloadPlanner(
        MANIFEST.group_specs(),
        MANIFEST.namespace,
        stack,
        hash_tokens=1,
        counters=Counters(),
        clock=MonotonicClock(),
    )
    for name, count in recorded.items():
        planner.add_request(name, hashes(name, count))
    yield planner, stack
    assert planner.check() == []
    assert stack.check() == []
    stack.close()


def ask(planner, name, count):
    """Ask as an engine does every step; until the answer is ready, if nobody holds room."""
    until = time.monotonic() + ANSWER_SECONDS_MAX
    answer = planner.match(name, 0, count + 1)
    while answer.ask_again and time.monotonic() < until:
        planner.plan_step(EngineStep())
        answer = planner.match(name, 0, count + 1)
    return answer.token_count


def await_lookups(stack, name, count):
    """Wait until it is known of all chunks that they are on disk."""
    keys = make_offload_keys(MANIFEST.namespace, 0, hashes(name, count))
    until = time.monotonic() + ANSWER_SECONDS_MAX
    while stack.states_in_step(keys) != [ChunkState.RECORDED] * count:
        assert time.monotonic() < until
        stack.commands()


def begin_load(planner, name, count):
    assert planner.begin_load(name, LoadTarget(0, count, {0: list(range(1, count + 1))})) == count
    (load,) = planner.plan_step(EngineStep()).plan.commands
    return TransferDone(job_id=load.job_id)


@pytest.mark.parametrize("recorded", [SLOT_COUNT, 160])
def test_a_hit_is_what_memory_holds_and_can_be_begun(tmp_path, recorded):
    with opened(tmp_path, long=recorded) as (planner, _):
        assert ask(planner, "long", recorded) == SLOT_COUNT
        planner.complete(begin_load(planner, "long", SLOT_COUNT))


def test_of_two_hits_at_once_the_second_waits_for_the_room_of_the_first(tmp_path):
    with opened(tmp_path, first=100, second=100) as (planner, stack):
        assert ask(planner, "first", 100) == 100
        done = begin_load(planner, "first", 100)
        await_lookups(stack, "second", 100)
        assert planner.match("second", 0, 101) == PrefixAnswer(0, ask_again=True)
        planner.complete(done)
        assert ask(planner, "second", 100) == 100
        planner.complete(begin_load(planner, "second", 100))


def test_a_hit_waits_for_no_room_that_does_not_come_back(tmp_path):
    with opened(tmp_path, first=100, second=100) as (planner, _):
        assert ask(planner, "first", 100) == 100
        done = begin_load(planner, "first", 100)
        assert ask(planner, "second", 100) == SLOT_COUNT - 100
        second = begin_load(planner, "second", SLOT_COUNT - 100)
        planner.complete(done)
        planner.complete(second)
