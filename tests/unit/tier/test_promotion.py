import dataclasses

import pytest
from fake_clock import FakeClock
from tier_fakes import FakeCascade, FakeRecords, FakeSecondary, keep, keys, memory

from tierstore import Manifest
from tierstore.layout import PAGE_BYTES
from tierstore.metrics import Counters
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.tier.intake import Intake
from tierstore.tier.promotion import Promotions
from tierstore.tier.reservation import LoadReservation
from tierstore.transfer import FailureReason, JobId, TransferDone

JOB = JobId(7)
USE = UseContext.of("request-1")
SLOT_COUNT = 8
CORRUPT, DEADLINE, IO_ERROR = (
    FailureReason.CORRUPT,
    FailureReason.DEADLINE,
    FailureReason.IO_ERROR,
)


class Tiers:
    """Empty memory over two disks: 1, 2 and 3 on the first, 3 and 4 on the second."""

    def __init__(self):
        self.primary = memory(SLOT_COUNT)
        self.records = [FakeRecords(1, 2, 3), FakeRecords(3, 4)]
        self.secondaries = [FakeSecondary(), FakeSecondary()]
        self.cascades = [FakeCascade(), FakeCascade()]
        self.stale = set()
        self.counters = Counters()
        self.intake = Intake(self.primary, self.cascades, self.records, self.counters, None)
        self.promotions = Promotions(
            groups=Manifest.simple("m", chunk_bytes=PAGE_BYTES).group_specs(),
            primary=self.primary,
            secondaries=self.secondaries,
            records=self.records,
            cascades=self.cascades,
            intake=self.intake,
            stale=self.stale,
            counters=self.counters,
            clock=FakeClock(),
        )

    def begin(self, *numbers):
        found, nowhere = self.promotions.find(0, keys(*numbers))
        assert not nowhere
        promotes = [
            dataclasses.replace(p, slots=self.intake.reserve(0, p.keys[::-1], USE)) for p in found
        ]
        self.promotions.begin(JOB, promotes)
        wanted = [(keys(*numbers), [None] * len(numbers))]
        return LoadReservation.of(JOB, wanted, promotes, (), USE)

    def finish(self, load, failed=None):
        self.promotions.finish(load, self.done(failed))

    def done(self, failed=None):
        return TransferDone(job_id=JOB, ok=not failed, failed=failed or {})

    def resident(self, *numbers):
        slots = self.primary.locate(keys(*numbers))
        return [n for n, slot in zip(numbers, slots, strict=True) if slot is not None]

    def assert_nothing_is_held(self):
        assert self.primary.check() + self.promotions.check() == []
        assert not self.primary.arriving
        assert self.primary.detached_count == 0
        assert not any(secondary.pins.counts for secondary in self.secondaries)
        assert not any(records.health.reads_under_way for records in self.records)
        assert not any(count for records in self.records for count in records.hung.values())


@pytest.fixture
def tiers():
    return Tiers()


def promoted_by(found):
    return [(promote.tier_idx, list(promote.keys)) for promote in found]


def test_the_first_tier_that_has_a_chunk_is_to_bring_it(tiers):
    found, nowhere = tiers.promotions.find(0, keys(4, 3, 5, 1))
    assert promoted_by(found) == [(0, keys(3, 1)), (1, keys(4))]
    assert nowhere == keys(5)
    assert tiers.records[1].asked == [keys(4, 5)]


def test_a_tier_that_failed_to_bring_a_chunk_is_not_asked_for_it_again(tiers):
    found, nowhere = tiers.promotions.find(0, keys(3, 1), dict.fromkeys(keys(3, 1), 0))
    assert promoted_by(found) == [(1, keys(3))]
    assert nowhere == keys(1)
    assert tiers.records[0].asked == []


def test_records_are_pinned_until_they_have_been_read(tiers):
    load = tiers.begin(1, 4)
    assert list(tiers.secondaries[0].pins.counts) == keys(1)
    assert list(tiers.secondaries[1].pins.counts) == keys(4)
    tiers.finish(load)
    tiers.assert_nothing_is_held()


def test_what_has_come_is_resident_and_every_tier_is_told_where_it_came_from(tiers):
    tiers.finish(tiers.begin(1, 2))
    assert tiers.resident(1, 2) == [1, 2]
    assert tiers.cascades[0].told == [("promoted", keys(1, 2))]
    assert tiers.cascades[1].told == [("resident", keys(1, 2))]
    assert tiers.cascades[0].promoted_count == 2
    assert tiers.records[0].succeeded == keys(1, 2)
    assert tiers.records[1].gave_way == keys(1, 2)
    assert tiers.secondaries[0].touched == [(keys(2, 1), USE)], "tail first"
    assert tiers.secondaries[1].touched == []
    assert tiers.records[0].health.judged == [(2, [])]


def test_what_failed_gives_its_slot_back_and_its_record_is_blamed(tiers):
    tiers.finish(tiers.begin(1, 2, 4), {1: CORRUPT, 2: IO_ERROR})
    assert tiers.resident(1, 2, 4) == [1]
    assert tiers.records[0].failed == dict.fromkeys(keys(2), CORRUPT)
    assert tiers.records[1].failed == dict.fromkeys(keys(4), IO_ERROR)
    assert tiers.records[0].health.judged == [(1, [CORRUPT])]
    counts = tiers.counters.snapshot()
    assert counts['misses_total{reason="corrupt"}'] == 1
    assert counts['misses_total{reason="io_error"}'] == 1
    tiers.assert_nothing_is_held()


def test_a_late_chunk_is_absent_and_keeps_its_slot_until_its_read_ends(tiers):
    tiers.finish(tiers.begin(1, 2), {0: DEADLINE})
    assert tiers.resident(1, 2) == [2]
    assert not tiers.primary.arriving, "it may be stored again meanwhile"
    assert tiers.primary.detached_count == 1
    assert tiers.records[0].hung == {"chunks": 1, "slot_bytes": PAGE_BYTES}
    assert tiers.promotions.has_late()
    assert tiers.promotions.check() == []
    assert tiers.promotions.finish_late(tiers.done())
    assert tiers.resident(1, 2) == [1, 2]
    assert not tiers.promotions.has_late()
    tiers.assert_nothing_is_held()


def test_a_late_chunk_that_came_by_another_way_gives_its_slot_back(tiers):
    tiers.finish(tiers.begin(1), {0: DEADLINE})
    keep(tiers.primary, 1)
    assert tiers.promotions.finish_late(tiers.done())
    assert tiers.resident(1) == [1]
    assert tiers.primary.free_count(0) == SLOT_COUNT - 1
    tiers.assert_nothing_is_held()


def test_a_late_chunk_that_fails_after_all_is_blamed(tiers):
    tiers.finish(tiers.begin(1), {0: DEADLINE})
    assert tiers.promotions.finish_late(tiers.done({0: IO_ERROR}))
    assert tiers.resident(1) == []
    assert tiers.records[0].failed == {**dict.fromkeys(keys(1), IO_ERROR)}
    tiers.assert_nothing_is_held()


def test_a_late_answer_of_a_job_without_late_chunks_is_not_taken(tiers):
    tiers.finish(tiers.begin(1))
    assert not tiers.promotions.finish_late(tiers.done())


def test_what_was_being_read_at_a_reset_does_not_become_resident(tiers):
    load = tiers.begin(1, 2)
    tiers.stale.update(keys(1, 2))
    tiers.promotions.reset()
    tiers.finish(load, {1: CORRUPT})
    assert tiers.resident(1, 2) == []
    assert tiers.records[0].failed == {}, "a record of these keys is another one now"
    tiers.assert_nothing_is_held()


def test_what_is_late_at_a_reset_gives_its_slot_back_when_its_read_ends(tiers):
    tiers.finish(tiers.begin(1), {0: DEADLINE})
    tiers.promotions.reset()
    assert tiers.promotions.finish_late(tiers.done())
    assert tiers.resident(1) == []
    tiers.assert_nothing_is_held()


def test_a_use_is_unknown_unless_it_is_given():
    assert LoadReservation.of(JOB, [], [], ()).use is UNKNOWN_USE
