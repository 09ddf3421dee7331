"""Messages between the planes in any order, against an executor that answers as it is told.

Goal: whatever the order in which first and second answers come, and wherever the caller gives up,
nothing is raised, no slot and no pin stays behind, and what arrived is resident.
"""

from collections import deque

import pytest
from fake_clock import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore import Manifest, load_config, make_offload_keys
from tierstore.embedded.loop import PlaneLoop
from tierstore.executor.syncing import PendingSync
from tierstore.metrics import Counters
from tierstore.testing.spread import spread_hashes
from tierstore.tier.opening import open_stack
from tierstore.tier.reservation import ChunkState
from tierstore.transfer import FailureReason, JobId, Load, TransferDone

MANIFEST = Manifest.simple("loop", chunk_bytes=4096)
LOAD_COUNT, LOAD_CHUNKS = 5, 4
SLOT_COUNT = 32


def keys(numbers):
    return make_offload_keys(MANIFEST.namespace, 0, spread_hashes(numbers))


class ScriptedExecutor:
    """Carries everything out at once, but for loads and hung tiers: the test answers those.

    Time passes only when somebody waits.
    """

    def __init__(self, clock, hung_tiers=()):
        self.clock = clock
        self.hung_tiers = hung_tiers
        self.wait_for_catalogs = lambda: None
        self.loads = []
        self.answers = deque()

    def submit(self, commands):
        for command in commands:
            if isinstance(command, Load):
                self.loads.append(command.job_id)
            elif command.tier_idx not in self.hung_tiers:
                self.answers.append(TransferDone(job_id=command.job_id))

    def poll(self):
        answers = list(self.answers)
        self.answers.clear()
        return answers

    def wait(self, timeout_seconds):
        self.wait_for_catalogs()  # they take real time, which the clock does not show
        self.clock.now += timeout_seconds

    def begin_sync(self, tier_idx, also):
        return PendingSync(is_done=True)


class Planes:
    """A stack of one or more tiers over a scripted executor."""

    def __init__(self, path, *tiers, hung_tiers=()):
        secondary = [
            {"name": f"disk{i}", "backend": "file", "path": str(path / str(i))}
            | {"capacity": "16MiB"}
            | tier
            for i, tier in enumerate(tiers or [{}])
        ]
        primary = {"capacity": f"{SLOT_COUNT * 4096}B", "eviction": "lru"}
        config = load_config({"version": 1, "primary": primary, "secondary": secondary})
        self.counters = Counters()
        self.stack = open_stack(config, MANIFEST, rank_count=1, counters=self.counters)
        self.clock = FakeClock()
        self.executor = ScriptedExecutor(self.clock, hung_tiers)
        self.executor.wait_for_catalogs = lambda: [t.wait(60) for t in self.stack.secondaries]
        self.loop = PlaneLoop(self.stack, self.executor, self.clock, self.counters)

    def keep(self, numbers):
        self.stack.finish_offload(self.stack.reserve_offload(0, keys(numbers)))

    def store(self, numbers):
        """Bring chunks to the tiers."""
        self.keep(numbers)
        self.loop.flush()

    def held(self):
        """Count slots that are arriving, pins in memory and pins of records."""
        primary = self.stack.primary
        record_pins = sum(len(tier.pins) for tier in self.stack.secondaries)
        return len(primary.arriving), len(primary._pins), record_pins


OUTCOMES = st.sampled_from(
    [
        (None, None),
        (FailureReason.CORRUPT, None),
        (FailureReason.ABSENT, None),
        (FailureReason.IO_ERROR, None),
        (FailureReason.DEADLINE, None),
        (FailureReason.DEADLINE, FailureReason.CORRUPT),
        (FailureReason.DEADLINE, FailureReason.IO_ERROR),
    ]
)


def answers_of(job_id, outcomes):
    """Return the one or two answers that a load with these outcomes gets."""
    firsts = {i: first for i, (first, _) in enumerate(outcomes) if first is not None}
    lasts = firsts | {i: last for i, (_, last) in enumerate(outcomes) if i in firsts}
    late = FailureReason.DEADLINE in firsts.values()
    settled = {
        i: last if first is FailureReason.DEADLINE else first
        for i, (first, last) in enumerate(outcomes)
    }
    failed = {i: reason for i, reason in settled.items() if i in lasts and reason is not None}
    second = TransferDone(job_id=job_id, ok=not failed, failed=failed)
    return [TransferDone(job_id=job_id, ok=not firsts, failed=firsts), *([second] * late)]


@settings(max_examples=60)
@given(
    outcomes=st.lists(
        st.lists(OUTCOMES, min_size=LOAD_CHUNKS, max_size=LOAD_CHUNKS),
        min_size=LOAD_COUNT,
        max_size=LOAD_COUNT,
    ),
    steps=st.lists(st.integers(0, LOAD_COUNT - 1), max_size=2 * LOAD_COUNT),
    left_from=st.integers(0, LOAD_COUNT),
)
def test_answers_in_any_order_leave_nothing_behind(tmp_path_factory, outcomes, steps, left_from):
    planes = Planes(tmp_path_factory.mktemp("loop"), {})
    try:
        play(planes, outcomes, steps, left_from)
    finally:
        planes.stack.close()


def play(planes, outcomes, steps, left_from):
    """Answer loads as `steps` says; loads from number `left_from` on are left by their caller."""
    stack, loop = planes.stack, planes.loop
    numbers = range(LOAD_COUNT * LOAD_CHUNKS)
    planes.store(numbers)
    planes.store(range(1000, 1000 + SLOT_COUNT))  # memory is full of others
    loads = []
    for first in numbers[::LOAD_CHUNKS]:
        reservation = stack.reserve_load([(0, keys(range(first, first + LOAD_CHUNKS)))])
        loads.append(loop.start_load(reservation))
    answers = [
        deque(answers_of(JobId(job_id), outcome))
        for job_id, outcome in zip(planes.executor.loads, outcomes, strict=True)
    ]
    for load in loads[left_from:]:
        loop.leave(load)
    for load_idx in steps:
        if answers[load_idx]:
            planes.executor.answers.append(answers[load_idx].popleft())
            loop.pump()
    for load_idx, load in enumerate(loads[:left_from]):
        if not load.answers:
            planes.executor.answers.append(answers[load_idx].popleft())
        failed_slots = loop.wait_for(load)
        assert len(failed_slots) == sum(first is not None for first, _ in outcomes[load_idx])
        loop.finish_load(load)
    for waiting in answers:
        planes.executor.answers.extend(waiting)
    loop.pump()
    assert_settled(planes, numbers, [outcome for batch in outcomes for outcome in batch])


def assert_settled(planes, numbers, outcomes):
    """Find every chunk as its outcome says, and nothing held."""
    assert planes.held() == (0, 0, 0)
    assert planes.stack.check() == []
    assert "stray_answers_total" not in planes.counters.snapshot()
    slots = planes.stack.primary.locate(keys(numbers))
    for slot, (first, last) in zip(slots, outcomes, strict=True):
        if first is None:
            assert slot is not None, "a chunk that arrived is not resident"
        elif first is not FailureReason.DEADLINE or last is not None:
            assert slot is None, "a chunk that failed is resident"
    planes.store(range(2000, 2000 + SLOT_COUNT))
    states = planes.stack.states(keys(range(2000, 2000 + SLOT_COUNT)))
    assert states == [ChunkState.RESIDENT] * SLOT_COUNT


def test_an_answer_to_an_unknown_job_is_counted_and_hides_no_other(tmp_path):
    planes = Planes(tmp_path)
    planes.keep([1])
    planes.executor.answers.append(TransferDone(job_id=JobId(1 << 40)))
    planes.loop.flush()
    assert planes.counters.snapshot()["stray_answers_total"] == 1
    assert None not in planes.stack.secondaries[0].locate(keys([1]))
    planes.stack.close()


@pytest.mark.parametrize("cascade", ["write_through", "on_evict"])
def test_a_tier_that_stands_still_is_waited_for_once_until_it_moves(tmp_path, cascade):
    tier = {"cascade": cascade, "io": {"write_queue": f"{4 * 4096}B"}}
    planes = Planes(tmp_path, tier, tier, hung_tiers=[0])
    now = planes.clock.now
    for number in range(200):
        planes.loop.make_room(0, 1, 4096, 10.0)
        planes.keep([number])
        planes.loop.pump()
    assert 10 < planes.clock.now - now < 20, "waited again and again for a tier that hangs"
    planes.executor.hung_tiers = ()
    planes.executor.answers.append(TransferDone(job_id=JobId(1)))
    waiting = [
        job for cascade in planes.stack.cascades for job in cascade.demotes.queue.writing_jobs
    ]
    planes.executor.answers.extend(TransferDone(job_id=job) for job in waiting)
    planes.loop.flush()
    now = planes.clock.now
    planes.executor.hung_tiers = (0,)
    for number in range(300, 400):
        planes.loop.make_room(0, 1, 4096, 10.0)
        planes.keep([number])
        planes.loop.pump()
    assert 10 < planes.clock.now - now < 20, "a tier that moved again was not waited for"
    planes.stack.close()
