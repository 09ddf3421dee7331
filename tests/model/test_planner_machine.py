"""The planner against a small engine that preempts, aborts, drops and re-uses blocks at will.

Goal: no byte of another request or of other weights is ever published or loaded, and nothing leaks.
Method: every block knows what it holds (`held_bytes`), copies happen as late as fences allow.
"""

from engine_request import FULL
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from small_engine import SmallEngine

from tierstore.key import get_offload_group_idx

TEXT = bytes(range(1, 200))
# Longer than a key's block hash may be: the hash is the text itself here, so texts stay short.
LENGTH_MAX = 48
RARELY = st.sampled_from([False] * 7 + [True])


class PlannerMachine(RuleBasedStateMachine):
    @initialize(
        block_count=st.integers(24, 60),
        hash_lag=st.integers(0, 2),
        accepted=st.sampled_from([1, 3]),
    )
    def start(self, block_count, hash_lag, accepted):
        self.engine = SmallEngine(block_count, hash_lag=hash_lag, accepted=accepted)

    @precondition(lambda self: len(self.engine.requests) < 4)
    @rule(
        shared=st.sampled_from([0, 10, 16, 32, 40]),
        length=st.sampled_from([5, 17, 18, 33, 40]) | st.integers(1, 40),
        fork=st.integers(0, 2),
    )
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

    @rule()
    def serve(self):
        """Let some requests come to their ends, so that others can hit what they leave."""
        for _ in range(5):
            self.step(1)
            self.engine.answer_all()

    @precondition(lambda self: self.engine.jobs)
    @rule(data=st.data(), ok=st.sampled_from([True, True, True, False]))
    def answer(self, data, ok):
        job_id = data.draw(st.sampled_from(sorted(self.engine.jobs)))
        self.engine.answer(job_id, ok=ok)

    @rule()
    def answer_all(self):
        self.engine.answer_all()

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.engine.requests)))
        if self.engine.requests[name].status != "aborted" and name not in self.engine.failed:
            self.engine.abort(name)

    @precondition(lambda self: self.engine.stack.state_by_key)
    @rule(data=st.data(), record=st.sampled_from([True, True, True, False]))
    def evict(self, data, record):
        key = data.draw(st.sampled_from(sorted(self.engine.stack.state_by_key)))
        self.engine.evict(key, record=record)

    @rule(refuses=RARELY)
    def refuse_loads(self, refuses):
        self.engine.stack.refuses_loads = refuses

    @rule(changes=RARELY)
    def change_weights(self, changes):
        if changes:
            self.engine.change_weights()

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.drain()


TestPlannerMachine = PlannerMachine.TestCase
TestPlannerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_preempted_request_is_loaded_again_and_a_shared_prefix_too():
    engine = SmallEngine(60)
    engine.add(TEXT[:40])
    engine.step(4)
    engine.answer_all()
    engine.add(TEXT[:33])
    engine.step()
    engine.answer_all()
    assert engine.loads_verified == 1
    engine.drain()


def test_a_request_whose_loads_failed_twice_is_never_offered_a_hit_again():
    engine = SmallEngine(60)
    engine.add(TEXT[:40])
    engine.step(4)
    engine.answer_all()
    engine.add(TEXT[:33])
    for _ in range(2):
        engine.step()
        (load,) = engine.loaders
        engine.answer(load, ok=False)
    assert engine.planner.match("r2", 0, 33).token_count == 0
    assert engine.planner.match("r1", 0, 33).token_count == 32
    engine.drain()


def test_of_a_load_that_failed_what_arrived_is_loaded_once_more():
    engine = SmallEngine(60)
    engine.add(TEXT[:40])
    engine.step(4)
    engine.answer_all()
    engine.abort("r1")
    for key in list(engine.stack.state_by_key):
        if get_offload_group_idx(key) == FULL:
            engine.evict(key, record=True)
    engine.add(TEXT[:33])
    engine.step()
    (load,) = engine.loaders
    engine.answer(load, ok=False)  # the third of four chunks is lost
    engine.step()
    (again,) = engine.loaders
    assert engine.requests["r2"].computed == 16
    engine.answer(again, ok=True)
    assert engine.loads_verified == 1
    engine.drain()


def test_a_hit_that_memory_cannot_hold_is_shortened_for_all_groups_together():
    engine = SmallEngine(60, slot_count=5)
    engine.add(TEXT[:40])
    for _ in range(4):
        engine.step()
        engine.answer_all()
    engine.abort("r1")
    engine.add(TEXT[:33])
    engine.step()
    # 32 tokens are four chunks, one of the window and a state; 16 are two, one and a state.
    assert engine.requests["r2"].computed == 16
    engine.answer_all()
    assert engine.loads_verified == 1
    engine.drain()


def test_asking_thirty_two_times_pins_nothing():
    engine = SmallEngine(60)
    engine.add(TEXT[:40])
    engine.step(4)
    engine.answer_all()
    engine.add(TEXT[:33])
    answers = {engine.planner.match("r2", 0, 33).token_count for _ in range(32)}
    assert answers == {32}
    assert engine.stack.leaks() == []
    engine.drain()


def test_a_load_into_a_block_that_is_still_being_read_is_fenced():
    engine = SmallEngine(60)
    engine.add(TEXT[:40])
    engine.step(6)
    engine.answer_all()
    engine.add(bytes([201]) * 40)
    engine.step(6)
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
    engine.answer_all()
    engine.drain()


def test_a_state_whose_block_is_handed_out_in_the_step_that_offers_it_is_not_published():
    engine = SmallEngine(24, hash_lag=2, accepted=3)
    engine.add(TEXT[:9])
    engine.add(bytes([203]) * 10)
    for _ in range(12):
        engine.step()
        engine.answer_all()
    assert engine.states.offered_late_count
    engine.drain()


def test_what_is_computed_after_kv_of_old_weights_is_never_published():
    engine = SmallEngine(60)
    engine.add(TEXT[:40])
    engine.step(4)
    engine.answer_all()
    engine.add(TEXT[:33])
    engine.step()
    assert engine.loaders
    engine.change_weights()
    for _ in range(4):
        engine.answer_all()
        engine.step()
    assert engine.stack.state_by_key == {}
    engine.drain()


def test_a_record_that_was_being_promoted_when_the_weights_changed_stays_unpublished():
    engine = SmallEngine(60)
    engine.add(TEXT[:40])
    engine.step(4)
    engine.answer_all()
    engine.abort("r1")
    for key in list(engine.stack.state_by_key):
        engine.evict(key, record=True)
    engine.add(TEXT[:33])
    engine.step()
    (load,) = engine.loaders
    engine.change_weights()
    engine.answer(load, ok=True)
    engine.add(bytes([204]) * 20)
    engine.step(3)
    assert engine.unread
    engine.answer_all()  # compares all that is in memory
    engine.drain()
