"""What becomes of chunks that a load did not bring: whose reads failed, hang, or never began."""

from collections.abc import Iterator

import pytest
from fake_clock import FakeClock
from opened_stack import ABSENT, ARRIVING, RECORDED, RESIDENT, SLOT_COUNT, Tiers, keys, opened

from tierstore.config import BreakerConfig
from tierstore.tier.readable_records import HIDDEN_SECONDS, STALLED_SECONDS
from tierstore.transfer import FailureReason, TransferDone

ABSENT_RECORD, CORRUPT = FailureReason.ABSENT, FailureReason.CORRUPT
IO_ERROR, FULL = FailureReason.IO_ERROR, FailureReason.FULL
DEADLINE, STALLED = FailureReason.DEADLINE, FailureReason.STALLED

OTHERS = (11, 12, 13, 14)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def tiers(tmp_path, clock) -> Iterator[Tiers]:
    with opened(tmp_path, {}, clock=clock) as tiers:
        tiers.store(1, 2)
        tiers.store(*OTHERS)
        assert tiers.locate(1, 2) == [RECORDED, RECORDED]
        yield tiers


@pytest.fixture
def two_disks(tmp_path, clock) -> Iterator[Tiers]:
    with opened(tmp_path, {}, {}, clock=clock) as tiers:
        for number in (1, 2, *OTHERS):  # the write queue of each holds one chunk
            tiers.store(number)
        assert tiers.locate(1, 2) == [RECORDED, RECORDED]
        yield tiers


def begin(tiers, *numbers):
    return tiers.stack.reserve_load([(0, keys(*numbers))])


def answer(tiers, load, failed=None):
    """Answer a load; returns what the tiers make of it for `retry_load`."""
    done = TransferDone(job_id=load.job_id, ok=not failed, failed=failed or {})
    tiers.stack.finish_load(load, done)
    return done


def answer_late(tiers, load, failed=None):
    done = TransferDone(job_id=load.job_id, ok=not failed, failed=failed or {})
    assert tiers.stack.complete(done)


def tiers_of(load):
    return [(promote.tier_idx, list(promote.keys)) for promote in load.promotes]


def is_recorded(tiers, tier_idx, number):
    assert tiers.stack.secondaries[tier_idx].wait(60)
    return tiers.stack.secondaries[tier_idx].locate(keys(number)) != [None]


# Failed reads


@pytest.mark.parametrize("reason", [IO_ERROR, FULL])
def test_a_record_that_cannot_be_read_is_not_offered_for_a_while(tiers, clock, reason):
    answer(tiers, begin(tiers, 1, 2), {0: reason})
    assert tiers.locate(1, 2) == [ABSENT, RESIDENT]
    assert tiers.stack.states_in_step(keys(1)) == [ABSENT]
    assert tiers.stack.match_prefix(keys(1, 2)) == 0
    assert begin(tiers, 1) is None
    clock.now += HIDDEN_SECONDS - 0.01
    assert tiers.locate(1) == [ABSENT]
    clock.now += 0.01
    assert tiers.locate(1) == [RECORDED]
    answer(tiers, begin(tiers, 1))
    assert tiers.locate(1) == [RESIDENT]
    tiers.assert_all_slots_can_be_had()


def test_a_record_that_cannot_be_read_twice_is_removed(tiers, clock):
    answer(tiers, begin(tiers, 1, 2), dict.fromkeys(range(2), IO_ERROR))
    assert is_recorded(tiers, 0, 1)
    clock.now += HIDDEN_SECONDS
    answer(tiers, begin(tiers, 1), {0: IO_ERROR})
    assert not is_recorded(tiers, 0, 1)
    assert is_recorded(tiers, 0, 2)
    clock.now += HIDDEN_SECONDS
    assert tiers.locate(1, 2) == [ABSENT, RECORDED]
    tiers.assert_all_slots_can_be_had()


def test_a_read_that_succeeds_clears_a_record_of_earlier_failures(tiers, clock):
    for _ in range(4):
        answer(tiers, begin(tiers, 1), {0: IO_ERROR})
        clock.now += HIDDEN_SECONDS
        answer(tiers, begin(tiers, 1))
        assert tiers.locate(1) == [RESIDENT]
        tiers.store(*range(20, 20 + SLOT_COUNT))
        assert tiers.locate(1) == [RECORDED]
    tiers.assert_all_slots_can_be_had()


def test_records_that_nobody_asked_for_outlive_a_device_that_fails_for_a_while(tiers, clock):
    answer(tiers, begin(tiers, 1), {0: IO_ERROR})
    clock.now += HIDDEN_SECONDS
    answer(tiers, begin(tiers, 1), {0: IO_ERROR})
    assert tiers.locate(2) == [RECORDED]
    answer(tiers, begin(tiers, 2))
    assert tiers.locate(2) == [RESIDENT]


def test_a_chunk_whose_record_cannot_be_read_is_stored_anew(tiers):
    (before,) = tiers.stack.secondaries[0].locate(keys(1))
    answer(tiers, begin(tiers, 1), {0: IO_ERROR})
    tiers.store(1)
    assert tiers.locate(1) == [RESIDENT]
    (after,) = tiers.stack.secondaries[0].locate(keys(1))
    assert after not in {None, before}
    tiers.store(*range(20, 20 + SLOT_COUNT))
    assert tiers.locate(1) == [RECORDED]
    answer(tiers, begin(tiers, 1))
    assert tiers.locate(1) == [RESIDENT]
    tiers.assert_all_slots_can_be_had()


@pytest.mark.parametrize("reason", [ABSENT_RECORD, CORRUPT])
def test_a_record_that_is_worthless_is_removed_at_once(tiers, reason):
    answer(tiers, begin(tiers, 1, 2), {1: reason})
    assert tiers.locate(1, 2) == [RESIDENT, ABSENT]
    assert not is_recorded(tiers, 0, 2)
    tiers.store(2)
    assert is_recorded(tiers, 0, 2)


def test_a_record_that_was_not_tried_is_offered_again_soon_if_others_come(tiers, clock):
    answer(tiers, begin(tiers, 1, 2), {0: STALLED})
    assert tiers.locate(1) == [ABSENT]
    clock.now += STALLED_SECONDS
    assert tiers.locate(1) == [RECORDED]


def test_a_record_that_was_not_tried_is_never_removed(tiers, clock):
    for _ in range(4):
        answer(tiers, begin(tiers, 1), {0: STALLED})
        assert tiers.locate(1) == [ABSENT]
        clock.now += BreakerConfig().retry_after_max_seconds
        assert tiers.locate(1) == [RECORDED]
    answer(tiers, begin(tiers, 1))
    assert tiers.locate(1) == [RESIDENT]


def test_reasons_that_say_nothing_of_the_record_leave_it_offered(tiers):
    for reason in (FailureReason.CLOSED, FailureReason.LAYOUT, FailureReason.OUTDATED):
        answer(tiers, begin(tiers, 1), {0: reason})
        assert tiers.locate(1) == [RECORDED]


def test_failures_before_a_reset_are_not_held_against_what_is_stored_after_it(tiers):
    answer(tiers, begin(tiers, 1), {0: IO_ERROR})
    tiers.reset()
    tiers.store(1)
    tiers.store(*range(20, 20 + SLOT_COUNT))
    assert tiers.locate(1) == [RECORDED]


# Two tiers


@pytest.mark.parametrize("reason", [IO_ERROR, FULL, ABSENT_RECORD, CORRUPT, STALLED, DEADLINE])
def test_what_one_tier_does_not_bring_is_loaded_from_the_next(two_disks, reason):
    tiers = two_disks
    load = begin(tiers, 1, 2)
    assert tiers_of(load) == [(0, keys(1, 2))]
    done = answer(tiers, load, {1: reason})
    assert tiers.locate(1, 2) == [RESIDENT, RECORDED]
    again = tiers.stack.retry_load(load, done)
    assert tiers_of(again) == [(1, keys(2))]
    assert again.keys == (tuple(keys(2)),)
    done = answer(tiers, again)
    assert tiers.locate(1, 2) == [RESIDENT, RESIDENT]
    assert tiers.stack.retry_load(again, done) is None
    if reason is DEADLINE:
        answer_late(tiers, load)
    tiers.assert_all_slots_can_be_had()


def test_an_engine_that_asks_again_is_given_the_other_tiers_record(two_disks):
    tiers = two_disks
    answer(tiers, begin(tiers, 1, 2), dict.fromkeys(range(2), IO_ERROR))
    assert tiers.stack.states_in_step(keys(1, 2)) == [RECORDED, RECORDED]
    assert tiers_of(begin(tiers, 1, 2)) == [(1, keys(1, 2))]


def test_a_chunk_that_no_tier_can_read_is_retried_once_in_each(two_disks):
    tiers = two_disks
    load = begin(tiers, 1)
    again = tiers.stack.retry_load(load, answer(tiers, load, {0: IO_ERROR}))
    assert tiers.stack.retry_load(again, answer(tiers, again, {0: CORRUPT})) is None
    assert tiers.locate(1) == [ABSENT]
    tiers.assert_all_slots_can_be_had()


@pytest.mark.parametrize(("tried", "asked_count"), [(None, 2), (0, 1), (1, 0)])
def test_a_retry_looks_ahead_in_later_tiers_only(two_disks, tried, asked_count):
    (key,) = keys(1)
    waits = two_disks.stack.look_ahead([key], {} if tried is None else {key: tried})
    for wait in waits:
        wait()
    assert len(waits) == asked_count


def test_a_retry_asks_the_next_tier_even_if_the_first_is_offered_again_at_once(two_disks):
    tiers = two_disks
    load = begin(tiers, 1)
    again = tiers.stack.retry_load(load, answer(tiers, load, {0: FailureReason.CLOSED}))
    assert tiers_of(again) == [(1, keys(1))]
    assert tiers.stack.retry_load(again, answer(tiers, again, {0: FailureReason.CLOSED})) is None


def test_a_single_tier_is_not_tried_again(tiers):
    load = begin(tiers, 1)
    assert tiers.stack.retry_load(load, answer(tiers, load, {0: IO_ERROR})) is None


def test_a_record_that_could_not_be_read_is_written_anew_from_the_other_tiers(two_disks):
    tiers = two_disks
    (before,) = tiers.stack.secondaries[0].locate(keys(1))
    load = begin(tiers, 1)
    again = tiers.stack.retry_load(load, answer(tiers, load, {0: IO_ERROR}))
    # The bytes are those of slot garbage here: what counts is that a record is placed.
    answer(tiers, again)
    assert tiers.recorded(0, 1) == [1]
    assert tiers.stack.secondaries[0].locate(keys(1)) != [before]


# Hung reads


def test_a_chunk_whose_read_hangs_is_absent_until_the_read_has_ended(tiers):
    load = begin(tiers, 1, 2)
    assert tiers.locate(1, 2) == [ARRIVING, ARRIVING]
    answer(tiers, load, {0: DEADLINE})
    assert tiers.locate(1, 2) == [ABSENT, RESIDENT]
    assert begin(tiers, 1) is None
    assert tiers.stack.has_work()
    assert tiers.stack.check() == []
    answer_late(tiers, load)
    assert tiers.locate(1, 2) == [RESIDENT, RESIDENT]
    assert not tiers.stack.complete(TransferDone(job_id=load.job_id))
    tiers.assert_all_slots_can_be_had()


def test_a_hung_read_that_fails_gives_its_slot_back_and_is_a_failed_read(tiers, clock):
    load = begin(tiers, 1, 2)
    answer(tiers, load, dict.fromkeys(range(2), DEADLINE))
    answer_late(tiers, load, {0: IO_ERROR, 1: CORRUPT})
    assert tiers.locate(1, 2) == [ABSENT, ABSENT]
    clock.now += HIDDEN_SECONDS
    assert not is_recorded(tiers, 0, 2)
    assert tiers.locate(1, 2) == [RECORDED, ABSENT]
    tiers.assert_all_slots_can_be_had()


def test_one_answer_may_hold_every_outcome(tiers, clock):
    tiers.store(3, 4)
    tiers.store(*OTHERS)
    load = begin(tiers, 1, 2, 3, 4)
    answer(tiers, load, {1: CORRUPT, 2: DEADLINE, 3: IO_ERROR})
    assert tiers.locate(1, 2, 3, 4) == [RESIDENT, ABSENT, ABSENT, ABSENT]
    # Indices that were settled before are not settled again.
    answer_late(tiers, load, {1: CORRUPT, 3: IO_ERROR})
    assert tiers.locate(1, 2, 3, 4) == [RESIDENT, ABSENT, RESIDENT, ABSENT]
    clock.now += HIDDEN_SECONDS
    assert not is_recorded(tiers, 0, 2)
    assert tiers.locate(2, 4) == [ABSENT, RECORDED]
    tiers.assert_all_slots_can_be_had()


def test_a_slot_that_a_hung_read_may_write_to_is_nobodys(tiers):
    load = begin(tiers, 1)
    (hung_slot,) = load.promotes[0].slots.tolist()
    answer(tiers, load, {0: DEADLINE})
    for first in range(20, 60):
        offload = tiers.stack.reserve_offload(0, keys(first))
        assert hung_slot not in offload.slots.tolist()
        tiers.stack.finish_offload(offload)
        tiers.loop.flush()
    assert tiers.stack.reserve_offload(0, keys(*range(60, 60 + SLOT_COUNT))).slots.size == 2
    answer_late(tiers, load)
    assert tiers.stack.check() == []


def test_a_chunk_whose_read_hangs_can_be_stored_and_the_late_bytes_are_dropped(tiers):
    load = begin(tiers, 1)
    answer(tiers, load, {0: DEADLINE})
    tiers.store(1)
    assert tiers.locate(1) == [RESIDENT]
    answer_late(tiers, load)
    assert tiers.locate(1) == [RESIDENT]
    tiers.assert_all_slots_can_be_had()


def test_late_bytes_are_dropped_while_the_chunk_is_being_stored(tiers):
    load = begin(tiers, 1)
    answer(tiers, load, {0: DEADLINE})
    offload = tiers.stack.reserve_offload(0, keys(1))
    assert list(offload.keys) == keys(1)
    answer_late(tiers, load)
    assert tiers.locate(1) == [ARRIVING]
    tiers.stack.finish_offload(offload)
    assert tiers.locate(1) == [RESIDENT]
    tiers.assert_all_slots_can_be_had()


@pytest.mark.parametrize("moment", ["before the deadline", "after it"])
def test_late_bytes_are_dropped_after_a_reset(tiers, moment):
    load = begin(tiers, 1)
    if moment == "before the deadline":
        tiers.reset()
        answer(tiers, load, {0: DEADLINE})
    else:
        answer(tiers, load, {0: DEADLINE})
        tiers.reset()
    tiers.movements.take()
    assert tiers.locate(1) == [ABSENT]
    answer_late(tiers, load)
    assert tiers.locate(1) == [ABSENT]
    assert tiers.movements.take() == []
    tiers.assert_all_slots_can_be_had()


def test_a_tier_whose_hung_reads_hold_its_share_of_slots_is_not_asked(two_disks):
    tiers = two_disks  # a quarter of four slots is one
    for number in (3, 4, *OTHERS):
        tiers.store(number)
    load = begin(tiers, 1, 2)
    answer(tiers, load, {0: DEADLINE})
    assert tiers_of(begin_and_drop(tiers, 3)) == [(0, keys(3))]
    other = begin(tiers, 3)
    answer(tiers, other, {0: DEADLINE})
    assert tiers_of(begin_and_drop(tiers, 4)) == [(1, keys(4))]
    answer_late(tiers, other)
    tiers.store(*OTHERS)
    assert tiers_of(begin_and_drop(tiers, 4)) == [(0, keys(4))]
    answer_late(tiers, load)
    tiers.assert_all_slots_can_be_had()


def begin_and_drop(tiers, *numbers):
    """Return a load that is given up as if its rank had refused it."""
    load = begin(tiers, *numbers)
    answer(tiers, load, dict.fromkeys(range(len(numbers)), FailureReason.CLOSED))
    return load
