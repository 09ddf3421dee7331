"""The planner against a small engine that preempts, aborts, drops and re-uses blocks at will.

Goal: no byte of another request or of other weights is ever published or loaded, and nothing leaks.
Method: every block knows what it holds (small_engine), copies happen as late as fences allow.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from reference_stack import ReferenceStack
from small_engine import SmallEngine

from tierstore.key import Namespace
from tierstore.layout import GroupKind, GroupSpec
from tierstore.metrics import Counters
from tierstore.planner import EngineStep, FullTable, OffloadPlanner, Progress

TEXT = bytes(range(1, 200))
# Longer than a key's block hash may be: the hash is the text itself here, so texts stay short.
LENGTH_MAX = 48


class PlannerMachine(RuleBasedStateMachine):
    @initialize(block_count=st.integers(22, 60))
    def start(self, block_count):
        self.engine = SmallEngine(block_count)

    @precondition(lambda self: len(self.engine.requests) < 4)
    @rule(shared=st.integers(0, 40), length=st.integers(1, 40), fork=st.integers(0, 2))
    def add(self, shared, length, fork):
        own = bytes([200 + fork]) * LENGTH_MAX
        self.engine.add((TEXT[:shared] + own)[:length])

    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            self.engine.step()
            for name, request in list(self.engine.requests.items()):
                if len(request.tokens) >= LENGTH_MAX and request.status == "running":
                    self.engine.abort(name)

    @precondition(lambda self: self.engine.jobs)
    @rule(data=st.data(), ok=st.sampled_from([True, True, True, False]))
    def answer(self, data, ok):
        job_id = data.draw(st.sampled_from(sorted(self.engine.jobs)))
        self.engine.answer(job_id, ok=ok)

    @rule()
    def answer_all(self):
        for job_id in list(self.engine.jobs):
            self.engine.answer(job_id, ok=True)

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.engine.requests)))
        if self.engine.requests[name].status != "aborted" and name not in self.engine.failed:
            self.engine.abort(name)

    @precondition(lambda self: self.engine.stack.states)
    @rule(data=st.data(), record=st.booleans())
    def evict(self, data, record):
        key = data.draw(st.sampled_from(sorted(self.engine.stack.states)))
        self.engine.evict(key, record=record)

    @rule(refuses=st.booleans())
    def refuse_loads(self, refuses):
        self.engine.stack.refuses_loads = refuses

    @rule()
    def change_weights(self):
        self.engine.change_weights()

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.drain()


TestPlannerMachine = PlannerMachine.TestCase
TestPlannerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_preempted_request_is_loaded_again_and_a_shared_prefix_too():
    engine = SmallEngine(60)
    engine.add(TEXT[:40])
    for _ in range(4):
        engine.step()
    for job_id in list(engine.jobs):
        engine.answer(job_id, ok=True)
    engine.add(TEXT[:33])
    engine.step()
    for job_id in list(engine.jobs):
        engine.answer(job_id, ok=True)
    assert engine.loads_verified == 1
    engine.drain()


def test_a_request_whose_load_failed_is_never_offered_a_hit_again():
    engine = SmallEngine(60)
    engine.add(TEXT[:40])
    for _ in range(4):
        engine.step()
    for job_id in list(engine.jobs):
        engine.answer(job_id, ok=True)
    engine.add(TEXT[:33])
    engine.step()
    (load,) = engine.loaders
    engine.answer(load, ok=False)
    assert engine.planner.match("r2", 0, 33).token_count == 0
    assert engine.planner.match("r1", 0, 33).token_count == 32
    engine.drain()


def test_asking_thirty_two_times_pins_nothing():
    engine = SmallEngine(60)
    engine.add(TEXT[:40])
    for _ in range(4):
        engine.step()
    for job_id in list(engine.jobs):
        engine.answer(job_id, ok=True)
    engine.add(TEXT[:33])
    answers = {engine.planner.match("r2", 0, 33).token_count for _ in range(32)}
    assert answers == {32}
    assert engine.stack.leaks() == []
    engine.drain()


def test_a_load_into_a_block_that_is_still_being_read_is_fenced():
    engine = SmallEngine(60)
    engine.add(TEXT[:40])
    for _ in range(6):
        engine.step()
    for job_id in list(engine.jobs):
        engine.answer(job_id, ok=True)
    engine.add(bytes([201]) * 40)
    for _ in range(6):
        engine.step()
    assert engine.unread
    engine.abort("r2")
    engine.add(TEXT[:33])
    engine.step()
    (load,) = engine.loaders
    engine.answer(load, ok=True)
    engine.drain()


def test_a_block_that_slid_out_of_the_window_is_not_offloaded_with_its_chunk():
    engine = SmallEngine(60)
    engine.add(TEXT[:25])
    for i in range(14):
        engine.step()
        engine.add(bytes([210 + i]) * 3)
    for job_id in list(engine.jobs):
        engine.answer(job_id, ok=True)
    engine.drain()


@pytest.mark.parametrize(
    "kind", [GroupKind.FULL, GroupKind.SLIDING_WINDOW], ids=lambda kind: kind.value
)
def test_a_draft_chunk_is_offloaded_once_the_token_behind_it_is_settled(kind):
    spec = GroupSpec(
        group_idx=0,
        kind=kind,
        tokens_per_block=4,
        blocks_per_chunk=1,
        chunk_bytes=1,
        window_tokens=9 if kind is GroupKind.SLIDING_WINDOW else 0,
    )
    planner = OffloadPlanner(
        [spec],
        Namespace(b"n" * 8),
        ReferenceStack(),
        hash_tokens=4,
        counters=Counters(),
        draft_groups={0},
    )
    planner.add_request("r", [bytes([i]) * 8 for i in range(3)])

    def offloaded(computed, ready):
        if not planner.completing(["r"], [ready]):
            return []
        step = EngineStep(progress=[Progress("r", computed, ready)])
        commands = planner.plan_step(step).plan.commands
        return [block for command in commands for block in command.block_ids.ravel().tolist()]

    planner.plan_step(EngineStep(full_tables=[FullTable("r", [[7, 8, 9]], 0)]))
    assert offloaded(0, 8) == [7]
    assert offloaded(8, 8) == []
    assert offloaded(8, 9) == [8]
    assert offloaded(9, 12) == []


def test_what_is_computed_after_kv_of_old_weights_is_never_published():
    engine = SmallEngine(60)
    engine.add(TEXT[:40])
    for _ in range(4):
        engine.step()
    for job_id in list(engine.jobs):
        engine.answer(job_id, ok=True)
    engine.add(TEXT[:33])
    engine.step()
    assert engine.loaders
    engine.change_weights()
    for _ in range(4):
        for job_id in list(engine.jobs):
            engine.answer(job_id, ok=True)
        engine.step()
    assert engine.stack.states == {}
    engine.drain()
