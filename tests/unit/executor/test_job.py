"""What a job knows of its outstanding work, and which blocks wait for which slots."""

import math
import random

import numpy as np
import pytest

from tierstore.executor.job import Job, PartIndex, RecordSpan
from tierstore.executor.jobs import OpenJobs
from tierstore.executor.progress import ReadGate, SpanRead, TierProgress
from tierstore.key import make_offload_keys
from tierstore.layout import PAGE_BYTES
from tierstore.manifest import Manifest
from tierstore.testing.spread import spread_hashes
from tierstore.transfer import FailureReason, JobId, Load, LoadPart, Promote

DEADLINE = 2.0
JOB = JobId(7)
MANIFEST = Manifest.simple("m", 64 << 10)


def tier(deadline=DEADLINE):
    gate = ReadGate(1 << 30, 4)
    return TierProgress(4, deadline, gate)


def read(first, stop, *, began_at=None, of=None):
    return SpanRead(range(first, stop), of or tier(), 0.0, began_at)


def job_of(*reads, tasks_left=None):
    job = Job(JOB)
    job.reads = {one.indices.start: one for one in reads}
    job.tasks_left = len(reads) if tasks_left is None else tasks_left
    return job


def test_a_new_job_is_settled_and_has_not_failed():
    job = Job(JOB)
    assert job.is_settled()
    done = job.answer()
    assert (done.job_id, done.ok, done.failed) == (JOB, True, {})


@pytest.mark.parametrize("left", ["tasks_left", "copies_left"])
def test_a_job_is_settled_when_neither_task_nor_copy_is_outstanding(left):
    job = Job(JOB)
    setattr(job, left, 1)
    assert not job.is_settled()
    setattr(job, left, 0)
    assert job.is_settled()


def test_one_failed_chunk_fails_the_job_and_is_told_of():
    job = Job(JOB, failed={3: FailureReason.CORRUPT})
    done = job.answer()
    assert not done.ok
    assert done.failed == {3: FailureReason.CORRUPT}


def test_a_refused_copy_fails_a_job_without_a_failed_chunk():
    job = Job(JOB, ok=False, cause="ENOSPC")
    done = job.answer()
    assert (done.ok, done.failed, done.cause) == (False, {}, "ENOSPC")


def test_a_job_is_overdue_when_its_only_read_is():
    job = job_of(read(0, 2, began_at=10.0))
    assert not job.is_overdue(10.0 + DEADLINE)
    assert job.is_overdue(math.nextafter(10.0 + DEADLINE, math.inf))


def test_a_job_with_other_work_is_never_overdue():
    late = read(0, 2, began_at=0.0)
    assert job_of(late).is_overdue(100.0)
    assert not job_of().is_overdue(100.0)
    assert not job_of(late, tasks_left=2).is_overdue(100.0)
    assert not job_of(late, read(2, 4, began_at=99.0)).is_overdue(100.0)
    copying = job_of(late)
    copying.copies_left = 1
    assert not copying.is_overdue(100.0)


def test_a_job_is_given_up_once():
    job = job_of(read(0, 2, began_at=0.0))
    job.abandon()
    assert not job.is_overdue(100.0)


def test_of_an_abandoned_job_reads_that_began_are_late_and_others_over():
    job = job_of(read(0, 2, began_at=0.0), read(2, 5))
    job.failed[9] = FailureReason.ABSENT
    job.abandon()
    assert (job.tasks_left, list(job.reads)) == (1, [0])
    stalled = dict.fromkeys((2, 3, 4), FailureReason.STALLED) | {9: FailureReason.ABSENT}
    assert job.answer_late().failed == stalled | dict.fromkeys((0, 1), FailureReason.DEADLINE)
    job.tasks_left = 0  # the hung read has ended, and brought its chunks
    job.reads.clear()
    assert job.is_settled()
    assert job.answer().failed == stalled


def test_each_job_is_answered_once_unless_it_is_late():
    jobs = OpenJobs()
    settled, hung, begun = (jobs.begin(JobId(i)) for i in range(3))
    hung.reads, hung.tasks_left = {0: read(0, 1, began_at=0.0)}, 1
    begun.tasks_left = 1
    first = jobs.take_answers(100.0)
    assert [(done.job_id, done.ok) for done in first] == [(1, False), (0, True)]
    assert first[0].failed == {0: FailureReason.DEADLINE}
    assert jobs.take_answers(200.0) == []
    assert len(jobs) == 2
    assert settled.is_settled()
    hung.reads.clear()
    hung.tasks_left = begun.tasks_left = 0
    assert [done.job_id for done in jobs.take_answers(200.0)] == [1, 2]
    assert len(jobs) == 0


def part(group_idx, block_ids, slots):
    return LoadPart(
        group_idx=group_idx,
        block_ids=np.array(block_ids, np.int64),
        slots=np.array(slots, np.int64),
    )


def promote(slots):
    keys = tuple(make_offload_keys(MANIFEST.namespace, 0, spread_hashes(range(len(slots)))))
    places = np.zeros(len(slots), "V32")
    return Promote(
        tier_idx=0, group_idx=0, keys=keys, places=places, slots=np.array(slots, np.int64)
    )


def pairs_of(part):
    return zip(part.block_ids.tolist(), part.slots.tolist(), strict=True)


def rows_of(parts):
    return [(p.group_idx, p.block_ids.tolist(), p.slots.tolist()) for p in parts]


def test_blocks_of_resident_slots_wait_for_nothing():
    load = Load(job_id=JOB, parts=(part(0, [[1, 2], [3, -1]], [16, 32]),), promotes=())
    index = PartIndex(load)
    assert rows_of(index.resident_parts()) == [(0, [[1, 2], [3, -1]], [16, 32])]
    assert index.parts_of(slice(0, 2)) == []


def test_blocks_of_promoted_slots_wait_for_just_theirs():
    parts = (part(0, [[1], [2], [3]], [16, 32, 48]), part(1, [[4], [5]], [64, 80]))
    index = PartIndex(Load(job_id=JOB, parts=parts, promotes=(promote([32, 48]), promote([80]))))
    assert rows_of(index.resident_parts()) == [(0, [[1]], [16]), (1, [[4]], [64])]
    assert rows_of(index.parts_of(slice(1, 3))) == [(0, [[3]], [48]), (1, [[5]], [80])]
    assert rows_of(index.parts_of(np.array([0, 2]))) == [(0, [[2]], [32]), (1, [[5]], [80])]
    assert rows_of(index.parts_of(slice(0, 1))) == [(0, [[2]], [32])]


@pytest.mark.parametrize("seed", range(20))
def test_each_promoted_chunk_comes_to_the_rows_that_wait_for_it(seed):
    """In any order of slots, with some that only memory wants."""
    dice = random.Random(seed)
    slots = dice.sample(range(0, 4096, 16), 40)
    cut, first_promoted, end = dice.randrange(25), dice.randrange(20), dice.randrange(25, 36)
    parts = (
        part(0, [[i] for i in range(cut)], slots[:cut]),
        part(1, [[i, -1] for i in range(end - cut)], slots[cut:end]),
    )
    promoted = slots[first_promoted:]
    dice.shuffle(promoted)
    promotes = (promote(promoted[:7]), promote(promoted[7:]))
    index = PartIndex(Load(job_id=JOB, parts=parts, promotes=promotes))
    blocks = [(0, [i]) for i in range(cut)] + [(1, [i, -1]) for i in range(end - cut)]
    here = dict(zip(slots[:end], blocks, strict=True))
    seen = [(s, (p.group_idx, b)) for p in index.resident_parts() for b, s in pairs_of(p)]
    for chosen in (slice(0, 11), np.arange(11, len(promoted))):
        wanted = {slot for slot in np.array(promoted)[chosen].tolist() if slot in here}
        filled = [(s, (p.group_idx, b)) for p in index.parts_of(chosen) for b, s in pairs_of(p)]
        assert {slot for slot, _ in filled} == wanted
        seen += filled
    assert len(seen) == len(here)
    assert dict(seen) == here


def test_a_part_that_waits_as_a_whole_is_not_resident():
    parts = (part(0, [[1], [2]], [16, 32]),)
    index = PartIndex(Load(job_id=JOB, parts=parts, promotes=(promote([16, 32]),)))
    assert index.resident_parts() == []


def test_a_slot_that_no_block_waits_for_is_filled_and_nothing_more():
    """As when a chunk is promoted for memory alone."""
    index = PartIndex(Load(job_id=JOB, parts=(), promotes=(promote([16]),)))
    assert index.parts_of(slice(0, 1)) == []


def test_a_span_gives_each_record_its_slot_and_leaves_out_what_failed():
    pool = np.zeros(8 * PAGE_BYTES, np.uint8)
    span = RecordSpan(promote([6, 0, 4]), 1, 3, first=10)
    records = span.records(pool.data, [2 * PAGE_BYTES])
    for number, record in enumerate(records, 1):
        record.slot[:] = bytes([number]) * len(record.slot)
    pages = pool.reshape(8, PAGE_BYTES)
    assert [set(page.tolist()) for page in pages] == [{1}, {1}, {0}, {0}, {2}, {2}, {0}, {0}]
    assert [record.key for record in records] == list(span.command.keys[1:3])
    assert list(span.indices) == [11, 12]
    assert span.arrived({}) == slice(11, 13)
    assert span.arrived({0: FailureReason.CORRUPT}).tolist() == [12]
    assert span.all_failed() == dict.fromkeys(range(2), FailureReason.IO_ERROR)
