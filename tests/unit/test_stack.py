from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tierstore import Manifest, load_config, make_offload_keys
from tierstore.clock import MonotonicClock
from tierstore.executor import TransferExecutor
from tierstore.layout import PAGE_BYTES
from tierstore.metrics import Counters
from tierstore.plane_loop import PlaneLoop
from tierstore.tier.reservation import ChunkState
from tierstore.tier.residency import ResidencyLog
from tierstore.tier.stack import TierStack
from tierstore.transfer import TransferDone

SLOT_COUNT = 4
MANIFEST = Manifest.simple("m", chunk_bytes=PAGE_BYTES)
ABSENT, ARRIVING = ChunkState.ABSENT, ChunkState.ARRIVING
RECORDED, RESIDENT = ChunkState.RECORDED, ChunkState.RESIDENT


def keys(*numbers):
    return make_offload_keys(MANIFEST.namespace, 0, [bytes([number]) * 32 for number in numbers])


@dataclass
class Tiers:
    stack: TierStack
    loop: PlaneLoop
    residency: ResidencyLog

    def store(self, *numbers):
        """Store chunks, and let them be written."""
        self.stack.finish_offload(self.stack.reserve_offload(0, keys(*numbers)))
        self.loop.flush()

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


@pytest.fixture
def tiers(tmp_path) -> Iterator[Tiers]:
    disk = {"name": "disk", "backend": "file", "path": str(tmp_path / "tier"), "capacity": "16MiB"}
    primary = {"capacity": f"{SLOT_COUNT * PAGE_BYTES}B", "eviction": "lru"}
    config = load_config({"version": 1, "primary": primary, "secondary": [disk]})
    counters = Counters()
    residency = ResidencyLog()
    stack = TierStack.open(config, MANIFEST, rank_count=1, counters=counters, residency=residency)
    executor = TransferExecutor.open(
        config, MANIFEST, rank=0, rank_count=1, caches=None, counters=counters
    )
    yield Tiers(stack, PlaneLoop(stack, executor, MonotonicClock()), residency)
    executor.close()
    stack.close()


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


def test_a_chunk_that_was_stored_at_a_reset_does_not_become_resident(tiers):
    offload = tiers.stack.reserve_offload(0, keys(1, 2))
    tiers.reset()
    tiers.stack.finish_offload(offload)
    assert tiers.locate(1, 2) == [ABSENT, ABSENT]
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
