from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tierstore import Manifest, load_config, make_offload_keys
from tierstore.clock import MonotonicClock
from tierstore.executor import TransferExecutor
from tierstore.layout import PAGE_BYTES
from tierstore.metrics import Counters
from tierstore.plane_loop import PlaneLoop
from tierstore.testing.spread import spread_hashes
from tierstore.tier.reservation import ChunkState
from tierstore.tier.residency import ResidencyLog
from tierstore.tier.stack import TierStack
from tierstore.transfer import TransferDone

SLOT_COUNT = 4
MANIFEST = Manifest.simple("m", chunk_bytes=PAGE_BYTES)
ABSENT, ARRIVING = ChunkState.ABSENT, ChunkState.ARRIVING
RECORDED, RESIDENT = ChunkState.RECORDED, ChunkState.RESIDENT


def keys(*numbers):
    return make_offload_keys(MANIFEST.namespace, 0, spread_hashes(numbers))


@dataclass
class Tiers:
    stack: TierStack
    loop: PlaneLoop
    residency: ResidencyLog
    counters: Counters

    def store(self, *numbers):
        """Store chunks, and let them be written."""
        self.keep(*numbers)
        self.loop.flush()

    def keep(self, *numbers):
        """Store chunks in memory; what goes down from there the tiers' rules say."""
        self.stack.finish_offload(self.stack.reserve_offload(0, keys(*numbers)))

    def recorded(self, tier_idx, *numbers):
        """Return which of the chunks a tier has, once all that was begun has ended."""
        assert self.loop.settle(lambda: not self.stack.has_work(), 60)
        places = self.stack.secondaries[tier_idx].locate(keys(*numbers))
        return [n for n, place in zip(numbers, places, strict=True) if place is not None]

    def locate(self, *numbers):
        return self.stack.locate(keys(*numbers))

    def reset(self):
        self.stack.reset(MANIFEST)
        self.loop.flush()

    def assert_all_slots_can_be_had(self):
        """Whatever was pinned or arriving is free again."""
        self.store(*range(100, 100 + SLOT_COUNT))
        assert self.locate(*range(100, 100 + SLOT_COUNT)) == [RESIDENT] * SLOT_COUNT
        assert self.stack.check() == []


@contextmanager
def opened(tmp_path, *disks) -> Iterator[Tiers]:
    """Open memory of four slots over disks with further keys each."""
    primary = {"capacity": f"{SLOT_COUNT * PAGE_BYTES}B", "eviction": "lru"}
    secondary = [
        {"name": f"disk{i}", "backend": "file", "path": str(tmp_path / str(i)), "capacity": "16MiB"}
        | disk
        for i, disk in enumerate(disks)
    ]
    config = load_config({"version": 1, "primary": primary, "secondary": secondary})
    counters = Counters()
    residency = ResidencyLog()
    stack = TierStack.open(config, MANIFEST, rank_count=1, counters=counters, residency=residency)
    executor = TransferExecutor.open(
        config, MANIFEST, rank=0, rank_count=1, caches=None, counters=counters
    )
    yield Tiers(stack, PlaneLoop(stack, executor, MonotonicClock()), residency, counters)
    executor.close()
    stack.close()


@pytest.fixture
def tiers(tmp_path) -> Iterator[Tiers]:
    with opened(tmp_path, {}) as tiers:
        yield tiers


def test_a_chunk_that_was_loading_at_a_reset_is_gone_when_its_load_ends(tiers):
    tiers.store(1, 2)
    load = tiers.stack.reserve_load([(0, keys(1, 2))])
    tiers.reset()
    assert tiers.locate(1, 2) == [ARRIVING, ARRIVING]
    tiers.stack.finish_load(load, TransferDone(job_id=load.job_id))
    assert tiers.locate(1, 2) == [ABSENT, ABSENT]
    tiers.assert_all_slots_can_be_had()


def test_a_chunk_that_two_loads_held_at_a_reset_is_gone_when_both_have_ended(tiers):
    tiers.store(1)
    first = tiers.stack.reserve_load([(0, keys(1))])
    second = tiers.stack.reserve_load([(0, keys(1))])
    tiers.reset()
    tiers.stack.finish_load(first, TransferDone(job_id=first.job_id))
    assert tiers.locate(1) == [ARRIVING]
    tiers.stack.finish_load(second, TransferDone(job_id=second.job_id))
    assert tiers.locate(1) == [ABSENT]
    tiers.assert_all_slots_can_be_had()


def test_a_chunk_that_was_read_from_disk_at_a_reset_does_not_become_resident(tiers):
    tiers.store(1, 2)
    tiers.store(3, 4, 5, 6)
    assert tiers.locate(1, 2) == [RECORDED, RECORDED]
    load = tiers.stack.reserve_load([(0, keys(1, 2))])
    assert [len(promote.keys) for promote in load.promotes] == [2]
    tiers.reset()
    tiers.residency.take()
    tiers.stack.finish_load(load, TransferDone(job_id=load.job_id))
    assert tiers.residency.take() == []
    assert tiers.locate(1, 2) == [ABSENT, ABSENT]
    tiers.assert_all_slots_can_be_had()


def test_a_chunk_that_was_loading_at_a_reset_is_not_recorded_as_a_victim(tmp_path):
    with opened(tmp_path, {"cascade": "on_evict"}) as tiers:
        tiers.keep(1)
        load = tiers.stack.reserve_load([(0, keys(1))])
        tiers.reset()
        assert tiers.stack.demote_coldest(SLOT_COUNT) == 0
        tiers.stack.finish_load(load, TransferDone(job_id=load.job_id))
        assert tiers.recorded(0, 1) == []
        assert tiers.locate(1) == [ABSENT]
        tiers.assert_all_slots_can_be_had()


def test_a_chunk_that_was_stored_at_a_reset_does_not_become_resident(tiers):
    offload = tiers.stack.reserve_offload(0, keys(1, 2))
    tiers.reset()
    tiers.stack.finish_offload(offload)
    assert tiers.locate(1, 2) == [ABSENT, ABSENT]
    tiers.assert_all_slots_can_be_had()


def test_a_load_of_a_chunk_that_is_nowhere_leaves_nothing_pinned(tiers):
    tiers.store(1)
    assert tiers.stack.reserve_load([(0, keys(1)), (0, keys(1, 2))]) is None
    tiers.assert_all_slots_can_be_had()


def test_a_load_without_room_for_all_groups_gives_back_what_it_had_reserved(tiers):
    tiers.store(1, 2)
    tiers.store(3, 4, 5, 6)
    pinned = tiers.stack.reserve_load([(0, keys(4, 5, 6))])
    # Two requests' worth: the first finds the one free slot, the second finds none.
    assert tiers.stack.reserve_load([(0, keys(1)), (0, keys(2))]) is None
    assert tiers.locate(1, 2) == [RECORDED, RECORDED]
    tiers.stack.finish_load(pinned, TransferDone(job_id=pinned.job_id))
    load = tiers.stack.reserve_load([(0, keys(1)), (0, keys(2))])
    assert load is not None
    tiers.stack.finish_load(load, TransferDone(job_id=load.job_id))
    assert tiers.locate(1, 2) == [RESIDENT, RESIDENT]
    tiers.assert_all_slots_can_be_had()


@pytest.mark.parametrize(
    ("cascade", "moment"),
    [("write_through", "stored"), ("second_touch", "used again"), ("on_evict", "next to leave")],
)
def test_a_chunk_goes_down_when_the_rule_of_its_tier_says_so(tmp_path, cascade, moment):
    with opened(tmp_path, {"cascade": cascade}) as tiers:
        recorded = {}
        tiers.keep(1)
        recorded["stored"] = tiers.recorded(0, 1)
        tiers.stack.touch(keys(1))
        recorded["used again"] = tiers.recorded(0, 1)
        tiers.keep(2, 3, 4)
        recorded["next to leave"] = tiers.recorded(0, 1)
        moments = list(recorded)
        assert recorded == {m: [1] * (moments.index(m) >= moments.index(moment)) for m in moments}


def test_a_chunk_that_is_used_once_and_leaves_is_not_written_by_second_touch(tmp_path):
    with opened(tmp_path, {"cascade": "second_touch"}) as tiers:
        tiers.keep(1)
        tiers.keep(2, 3, 4, 5)
        assert tiers.recorded(0, 1) == []
        tiers.keep(1)  # computed again: that is its second use
        assert tiers.recorded(0, 1) == [1]


def test_more_than_the_write_queue_holds_is_dropped_and_counted(tmp_path):
    with opened(tmp_path, {"io": {"write_queue": f"{PAGE_BYTES}B"}}) as tiers:
        tiers.keep(1, 2, 3)
        assert tiers.recorded(0, 1, 2, 3) == [1]
        assert tiers.counters.snapshot()['dropped_demotes_total{reason="queue_full"}'] == 2
        tiers.keep(4)
        assert tiers.recorded(0, 4) == [4]


def test_the_first_tier_that_has_a_chunk_serves_it(tmp_path):
    with opened(tmp_path, {}, {"cascade": "second_touch"}) as tiers:
        tiers.store(1)
        tiers.stack.touch(keys(1))
        assert tiers.recorded(1, 1) == [1]
        tiers.keep(3, 4, 5, 6)
        load = tiers.stack.reserve_load([(0, keys(1))])
        assert [promote.tier_idx for promote in load.promotes] == [0]
        tiers.stack.finish_load(load, TransferDone(job_id=load.job_id))
        tiers.stack.secondaries[0].remove(keys(1))
        assert tiers.recorded(0, 1) == []
        tiers.keep(7, 8, 9, 10)
        load = tiers.stack.reserve_load([(0, keys(1))])
        assert [promote.tier_idx for promote in load.promotes] == [1]
        tiers.stack.finish_load(load, TransferDone(job_id=load.job_id))
