from collections.abc import Iterator

import pytest
from opened_stack import (
    ABSENT,
    ARRIVING,
    MANIFEST,
    PAGE_BYTES,
    RECORDED,
    RESIDENT,
    SLOT_COUNT,
    Tiers,
    keys,
    opened,
)

from tierstore.transfer import TransferDone


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
    tiers.movements.take()
    tiers.stack.finish_load(load, TransferDone(job_id=load.job_id))
    assert tiers.movements.take() == []
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


def test_a_load_for_which_there_is_room_finds_it_although_victims_are_written(tmp_path):
    with opened(tmp_path, {"cascade": "on_evict"}) as tiers:
        tiers.store(1, 2, 3)
        tiers.keep(4, 5, 6, 7)
        assert tiers.locate(1, 2, 3, 7) == [RECORDED, RECORDED, RECORDED, RESIDENT]
        wanted = [(0, keys(7)), (0, keys(1)), (0, keys(2)), (0, keys(3))]
        assert tiers.stack.has_room(wanted)
        load = tiers.stack.reserve_load(wanted)
        assert load is not None
        assert not tiers.stack.has_room([(0, keys(8))])
        assert tiers.stack.has_room([(0, keys(7))]), "it is there"
        tiers.stack.finish_load(load, TransferDone(job_id=load.job_id))
        tiers.loop.flush()
        tiers.assert_all_slots_can_be_had()


@pytest.mark.parametrize("cascade", ["write_through", "on_evict", "second_touch"])
def test_a_reset_that_keeps_records_forgets_memory_alone(tmp_path, cascade):
    with opened(tmp_path, {"cascade": cascade}) as tiers:
        tiers.store(1, 2)
        tiers.stack.touch(keys(1, 2))
        tiers.stack.demote_coldest(SLOT_COUNT)
        tiers.loop.flush()
        assert tiers.recorded(0, 1, 2) == [1, 2]
        tiers.stack.reset(MANIFEST, keeps_records=True)
        assert tiers.locate(1, 2) == [RECORDED, RECORDED]
        assert tiers.stack.check() == []
        # Recorded or not, what is stored from now on goes its way as before.
        tiers.store(1, 3)
        tiers.stack.touch(keys(1, 3))
        tiers.stack.demote_coldest(SLOT_COUNT)
        tiers.loop.flush()
        assert tiers.recorded(0, 1, 2, 3) == [1, 2, 3]
        tiers.assert_all_slots_can_be_had()


def test_a_reset_that_keeps_records_forgets_what_was_not_written(tmp_path):
    with opened(tmp_path, {}, slot_count=8) as tiers:
        tiers.keep(*range(8))
        (cascade,) = tiers.stack.cascades
        assert "queue_full" in str(tiers.counters.snapshot())
        tiers.stack.reset(MANIFEST, keeps_records=True)
        cascade.demotes.begin_retry()
        assert not cascade.demotes.is_retrying, "something is still to be written"


def test_a_demote_that_a_reset_overtakes_is_recorded_if_records_are_kept(tiers):
    tiers.keep(1, 2)  # their places are asked for, and nothing is written yet
    tiers.stack.reset(MANIFEST, keeps_records=True)
    assert RESIDENT not in tiers.locate(1, 2)
    assert tiers.recorded(0, 1, 2) == [1, 2]
    assert tiers.locate(1, 2) == [RECORDED, RECORDED]
    tiers.assert_all_slots_can_be_had()


def test_a_chunk_that_a_reset_overtook_on_its_way_down_is_new_when_it_comes_again(tmp_path):
    with opened(tmp_path, {"cascade": "on_evict"}) as tiers:
        tiers.keep(1, 2)
        tiers.stack.demote_coldest(SLOT_COUNT)
        tiers.stack.reset(MANIFEST, keeps_records=True)
        assert tiers.recorded(0, 1, 2) == [1, 2]
        (tier,) = tiers.stack.secondaries
        tier.remove(keys(1, 2))  # it may as well not have been written
        assert tier.wait(60)
        tiers.store(1, 2)
        assert tiers.recorded(0, 1, 2) == [1, 2]


def test_what_is_on_its_way_into_memory_is_forgotten_if_records_are_kept(tiers):
    tiers.store(1, 2)
    load = tiers.stack.reserve_load([(0, keys(1, 2))])
    offload = tiers.stack.reserve_offload(0, keys(3))
    tiers.stack.reset(MANIFEST, keeps_records=True)
    tiers.stack.finish_load(load, TransferDone(job_id=load.job_id))
    tiers.stack.finish_offload(offload)
    assert tiers.locate(1, 2, 3) == [RECORDED, RECORDED, ABSENT]
    tiers.assert_all_slots_can_be_had()
