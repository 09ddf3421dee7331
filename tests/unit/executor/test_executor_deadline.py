"""What `io.deadline` bounds: one read, and how long a tier may stand still; never a long queue."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from fake_clock import FakeClock

from tierstore.codec.record import PLACE_DTYPE
from tierstore.config import load_config
from tierstore.executor import TransferExecutor
from tierstore.key import make_offload_keys
from tierstore.layout import PAGE_BYTES
from tierstore.manifest import Manifest
from tierstore.metrics import Counters
from tierstore.testing.spread import spread_hashes
from tierstore.transfer import Demote, FailureReason, JobId, Load, Promote, TransferDone

CHUNK_BYTES = 4 << 20  # as many as one I/O task reads: each chunk is a task of its own
MANIFEST = Manifest.simple("m", CHUNK_BYTES)
FILLED, EMPTY = 7, 0
DEADLINE_SECONDS = (2.0, 30.0)  # by tier
JOB = JobId(1)


class StubBackend:
    """Fills slots; what a record's read waits for, and what comes of it, is up to the test."""

    def __init__(self):
        self.before_read = lambda number: None
        self.failed = {}

    def read(self, records):
        reasons = {}
        for i, record in enumerate(records):
            number = np.frombuffer(record.place, PLACE_DTYPE)["header_page"].item()
            self.before_read(number)
            if number in self.failed:
                reasons[i] = self.failed[number]
            else:
                record.slot[0] = record.slot[-1] = FILLED
        return reasons

    def write(self, records):
        for record in records:
            self.before_read(np.frombuffer(record.place, PLACE_DTYPE)["header_page"].item())
        return {}

    def close(self):
        pass


class Tiers:
    """An executor over two tiers of one thread each, and the time it goes by."""

    def __init__(self, path, thread_count):
        self.clock = FakeClock()
        self.backends = [StubBackend(), StubBackend()]
        self.gates = {}
        secondary = [
            {
                "name": f"disk{i}",
                "backend": "file",
                "path": str(path / f"{i}"),
                "capacity": "256MiB",
                "io": {"threads": thread_count, "deadline": f"{DEADLINE_SECONDS[i]:.0f}s"},
            }
            for i in range(2)
        ]
        opened = iter(self.backends)
        self.executor = TransferExecutor.open(
            load_config({"version": 1, "primary": {"capacity": "128MiB"}, "secondary": secondary}),
            MANIFEST,
            rank=0,
            rank_count=1,
            caches=None,
            counters=Counters(),
            open_backend=lambda *_, **__: next(opened),
            clock=self.clock,
        )

    def hang(self, tier_idx, *numbers):
        """Let reads of these records hang; returns what tells that one has begun."""
        begun = threading.Semaphore(0)
        gates = {number: threading.Event() for number in numbers}
        self.gates.update(gates)

        def wait(number):
            if number in gates:
                begun.release()
                gates[number].wait()

        self.backends[tier_idx].before_read = wait
        return begun

    def end_hung(self, *numbers):
        for number in numbers or self.gates:
            self.gates[number].set()

    def load(self, *parts, job_id=JOB):
        """Start a load of (tier, record numbers); a record's number is its slot's too."""
        promotes = tuple(
            Promote(tier_idx=tier_idx, group_idx=0, **records(numbers))
            for tier_idx, numbers in parts
        )
        self.executor.submit([Load(job_id=job_id, parts=(), promotes=promotes)])

    def answer(self, job_id=JOB) -> TransferDone:
        """Wait for the next answer, in which time stands still."""
        while True:
            answers = self.executor.poll()
            if answers:
                assert [done.job_id for done in answers] == [job_id]
                return answers[0]
            self.executor.wait(1.0)

    def filled(self, numbers):
        """Return which of the slots were written to."""
        rows = self.executor.pool.array.reshape(-1, CHUNK_BYTES)
        assert all(rows[n, 0] == rows[n, -1] for n in numbers), "half a chunk"
        return [n for n in numbers if rows[n, 0] == FILLED]


def records(numbers):
    places = np.zeros(len(numbers), PLACE_DTYPE)
    places["header_page"] = numbers  # an extent each
    return {
        "keys": tuple(make_offload_keys(MANIFEST.namespace, 0, spread_hashes(numbers))),
        "places": places,
        "slots": np.array(numbers, np.int64) * (CHUNK_BYTES // PAGE_BYTES),
    }


@pytest.fixture
def thread_count() -> int:
    return 1


@pytest.fixture
def tiers(tmp_path, thread_count) -> Iterator[Tiers]:
    tiers = Tiers(tmp_path, thread_count)
    yield tiers
    tiers.end_hung()
    tiers.executor.close()


def test_a_load_that_takes_many_deadlines_arrives_if_each_read_keeps_its_own(tiers):
    def take_a_while(number):
        tiers.clock.now += 0.9 * DEADLINE_SECONDS[0]

    tiers.backends[0].before_read = take_a_while
    tiers.load((0, range(20)))
    assert tiers.answer() == TransferDone(job_id=JOB)
    assert tiers.filled(range(20)) == list(range(20))


def test_a_load_waits_behind_others_for_as_long_as_the_tier_moves(tiers):
    begun, may_go_on = threading.Semaphore(0), threading.Semaphore(0)

    def before_read(number):
        begun.release()
        assert may_go_on.acquire(timeout=60)

    tiers.backends[0].before_read = before_read
    tiers.load((0, range(10)))
    tiers.load((0, [20]), job_id=JobId(2))
    answered = []
    for _ in range(11):
        assert begun.acquire(timeout=60)  # what was read before has been taken note of
        tiers.clock.now += 0.9 * DEADLINE_SECONDS[0]
        answered += tiers.executor.poll()
        may_go_on.release()
    answered += tiers.executor.drain(60)
    assert answered == [TransferDone(job_id=JOB), TransferDone(job_id=JobId(2))]


@pytest.mark.parametrize("outcome", [None, FailureReason.IO_ERROR])
def test_a_read_that_hangs_is_late_and_told_of_again_when_it_has_ended(tiers, outcome):
    begun = tiers.hang(0, 3)
    tiers.backends[0].failed = {3: outcome} if outcome else {}
    tiers.load((0, [1, 2, 3]))
    assert begun.acquire(timeout=60)
    assert tiers.executor.poll() == []
    tiers.clock.now += 1.01 * DEADLINE_SECONDS[0]
    late = {2: FailureReason.DEADLINE}
    assert tiers.answer() == TransferDone(job_id=JOB, ok=False, failed=late)
    assert tiers.executor.poll() == []
    tiers.end_hung()
    final = {2: outcome} if outcome else {}
    assert tiers.answer() == TransferDone(job_id=JOB, ok=not outcome, failed=final)


@pytest.mark.parametrize("thread_count", [2])
def test_one_answer_holds_what_came_what_failed_and_what_is_late(tiers):
    begun = tiers.hang(0, 2)
    tiers.backends[0].failed = {3: FailureReason.CORRUPT, 4: FailureReason.IO_ERROR}
    tiers.load((0, [1, 2, 3, 4]))
    assert begun.acquire(timeout=60)
    tiers.load((0, [5]), job_id=JobId(2))
    assert tiers.answer(JobId(2)).ok  # the other thread has read all that came before
    failed = {2: FailureReason.CORRUPT, 3: FailureReason.IO_ERROR}
    tiers.clock.now += 1.01 * DEADLINE_SECONDS[0]
    late = {1: FailureReason.DEADLINE}
    assert tiers.answer() == TransferDone(job_id=JOB, ok=False, failed=failed | late)
    tiers.end_hung()
    assert tiers.answer() == TransferDone(job_id=JOB, ok=False, failed=failed)


def test_reads_behind_a_hung_one_are_given_up_and_their_slots_never_touched(tiers):
    begun = tiers.hang(0, 1)
    tiers.load((0, [1, 2, 3]))
    assert begun.acquire(timeout=60)
    tiers.clock.now += 1.01 * DEADLINE_SECONDS[0]
    stalled = dict.fromkeys([1, 2], FailureReason.STALLED)
    late = {0: FailureReason.DEADLINE}
    assert tiers.answer() == TransferDone(job_id=JOB, ok=False, failed=late | stalled)
    tiers.end_hung()
    assert tiers.answer() == TransferDone(job_id=JOB, ok=False, failed=stalled)
    tiers.load((0, [4]), job_id=JobId(2))
    assert tiers.answer(JobId(2)).ok
    assert tiers.filled([1, 2, 3, 4]) == [1, 4]


def test_a_load_that_never_began_has_one_answer(tiers):
    begun = tiers.hang(0, 1)
    tiers.load((0, [1]))
    assert begun.acquire(timeout=60)
    tiers.clock.now += 0.9 * DEADLINE_SECONDS[0]
    tiers.load((0, [2]), job_id=JobId(2))
    tiers.clock.now += 0.2 * DEADLINE_SECONDS[0]
    assert tiers.answer().failed == {0: FailureReason.DEADLINE}
    tiers.clock.now += 0.9 * DEADLINE_SECONDS[0]
    assert tiers.answer(JobId(2)).failed == {0: FailureReason.STALLED}
    tiers.end_hung()
    assert tiers.answer() == TransferDone(job_id=JOB)
    assert tiers.executor.drain(60) == []
    assert tiers.filled([1, 2]) == [1]


def test_a_tier_that_stands_still_is_not_asked_until_it_moves(tiers):
    begun = tiers.hang(0, 1)
    tiers.load((0, [1]))
    assert begun.acquire(timeout=60)
    tiers.clock.now += 1.01 * DEADLINE_SECONDS[0]
    assert tiers.answer().failed == {0: FailureReason.DEADLINE}
    tiers.load((0, [2, 3]), job_id=JobId(2))
    (done,) = tiers.executor.poll()  # at once
    assert done.failed == dict.fromkeys(range(2), FailureReason.STALLED)
    tiers.end_hung()
    assert tiers.answer() == TransferDone(job_id=JOB)
    tiers.load((0, [2, 3]), job_id=JobId(3))
    assert tiers.answer(JobId(3)) == TransferDone(job_id=JobId(3))


def test_a_write_that_hangs_keeps_reads_waiting_no_longer_than_the_deadline(tiers):
    begun = tiers.hang(0, 9)
    demote = Demote(job_id=JobId(5), tier_idx=0, group_idx=0, owner=1, **records([9]))
    tiers.executor.submit([demote])
    assert begun.acquire(timeout=60)
    tiers.load((0, [1]))
    tiers.clock.now += 1.01 * DEADLINE_SECONDS[0]
    assert tiers.answer().failed == {0: FailureReason.STALLED}
    tiers.end_hung()
    assert tiers.answer(JobId(5)) == TransferDone(job_id=JobId(5))


@pytest.mark.parametrize("thread_count", [2])
def test_a_thread_that_is_free_reads_beside_one_that_hangs(tiers):
    begun = tiers.hang(0, 1)
    tiers.load((0, [1]))
    assert begun.acquire(timeout=60)
    tiers.clock.now += 10 * DEADLINE_SECONDS[0]
    assert tiers.answer().failed == {0: FailureReason.DEADLINE}
    tiers.load((0, range(2, 12)), job_id=JobId(2))
    assert tiers.answer(JobId(2)) == TransferDone(job_id=JobId(2))


def test_each_tier_has_its_own_deadline(tiers):
    begun = [tiers.hang(0, 1), tiers.hang(1, 2)]
    tiers.load((0, [1]), (1, [2]))
    assert all(semaphore.acquire(timeout=60) for semaphore in begun)
    tiers.clock.now += 2 * DEADLINE_SECONDS[0]
    assert tiers.executor.poll() == []  # the other tier is within its deadline, and waited for
    tiers.end_hung(2)
    assert tiers.answer().failed == {0: FailureReason.DEADLINE}
    assert tiers.filled([1, 2]) == [2]
    tiers.end_hung(1)
    assert tiers.answer() == TransferDone(job_id=JOB)


def test_two_tiers_that_hang_are_given_up_together(tiers):
    begun = [tiers.hang(0, 1), tiers.hang(1, 2)]
    tiers.load((0, [1]), (1, [2]))
    assert all(semaphore.acquire(timeout=60) for semaphore in begun)
    tiers.clock.now += 1.01 * DEADLINE_SECONDS[1]
    assert tiers.answer().failed == dict.fromkeys(range(2), FailureReason.DEADLINE)
    tiers.end_hung()
    assert tiers.answer() == TransferDone(job_id=JOB)


def test_who_waits_is_woken_when_an_answer_is_due_and_not_by_each_task(tiers):
    woken = threading.Event()
    # Room for a wrong call: without one, nothing but a moment passes.
    tiers.backends[0].before_read = lambda number: number == 1 and woken.wait(0.3)
    tiers.load((0, range(3)))
    tiers.executor.wait(60)
    woken.set()
    assert tiers.executor.poll() == [TransferDone(job_id=JOB)]
