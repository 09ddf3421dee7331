"""Hits that memory cannot hold, and loads that failed: how much is offered, and when.

Goal: what is promised to the engine can be begun, and no request waits for ever.
"""

from fake_clock import FakeClock
from one_group import WAITS, offloads, open_planner
from reference_stack import ReferenceStack

from tierstore.planner import FullTable, LoadTarget, PrefixAnswer, Progress
from tierstore.planner.wait import WAIT_COUNT_MAX, WAIT_SECONDS_MAX
from tierstore.testing.spread import spread_hashes
from tierstore.tier.reservation import ChunkState
from tierstore.transfer import FailureReason, TransferDone


def open_recorded(slot_count=None, **settings):
    """All eight chunks of `r` lie in a secondary tier only; memory has `slot_count` slots."""
    stack = ReferenceStack()
    planner = open_planner(stack=stack, **settings)
    (offload,) = offloads(planner, progress=[Progress("r", 0, 32)])
    planner.complete(TransferDone(job_id=offload.job_id))
    stack.state_by_key.update(dict.fromkeys(stack.state_by_key, ChunkState.RECORDED))
    stack.slot_count = slot_count or stack.slot_count
    return planner, stack


def hold_three_slots(planner):
    planner.add_request("first", spread_hashes(("first", n) for n in range(3)))
    theirs = FullTable("first", [[41, 42, 43]], 0)
    (held,) = offloads(planner, full_tables=[theirs], progress=[Progress("first", 0, 12)])
    return TransferDone(job_id=held.job_id)


def ask(planner, name, chunk_count=8):
    """Ask for what is recorded of `r`'s chunks, as another request of the same prefix."""
    planner.add_request(name, spread_hashes(range(chunk_count)))
    return planner.match(name, 0, 4 * chunk_count + 1)


def begin_load(planner, name, answer):
    fresh = list(range(100, 100 + answer.token_count // 4))
    return planner.begin_load(name, LoadTarget(0, answer.token_count, {0: fresh}))


def test_of_a_hit_that_memory_cannot_hold_as_much_as_it_holds_is_offered_at_once():
    planner, _ = open_recorded(slot_count=5)
    answer = ask(planner, "heir")
    assert answer == PrefixAnswer(20)
    assert begin_load(planner, "heir", answer) == 20


def test_a_hit_waits_for_the_room_that_another_load_holds():
    planner, _ = open_recorded(slot_count=5)
    held = hold_three_slots(planner)
    assert ask(planner, "heir") == WAITS
    planner.complete(held)
    answer = planner.match("heir", 0, 33)
    assert answer == PrefixAnswer(20)
    assert begin_load(planner, "heir", answer) == 20


def test_a_hit_whose_room_does_not_come_back_is_shortened_to_what_there_is():
    clock = FakeClock()
    planner, _ = open_recorded(slot_count=5, clock=clock)
    hold_three_slots(planner)
    assert ask(planner, "heir") == WAITS
    for _ in range(WAIT_COUNT_MAX):
        assert planner.match("heir", 0, 33) == WAITS
    clock.now += 2 * WAIT_SECONDS_MAX
    answer = planner.match("heir", 0, 33)
    assert answer == PrefixAnswer(8)
    assert begin_load(planner, "heir", answer) == 8


def test_a_hit_of_what_is_resident_needs_no_room():
    planner, stack = open_recorded()
    stack.state_by_key.update(dict.fromkeys(stack.state_by_key, ChunkState.RESIDENT))
    assert ask(planner, "heir") == PrefixAnswer(32)
    assert stack.room_questions == 0
    stack.state_by_key[next(iter(stack.state_by_key))] = ChunkState.RECORDED
    assert planner.match("heir", 0, 33) == PrefixAnswer(32)
    assert stack.room_questions == 1


def test_a_request_whose_load_failed_waits_for_nothing():
    planner, stack = open_recorded()
    assert begin_load(planner, "heir", ask(planner, "heir")) == 32
    (load,) = offloads(planner)
    lost = {5: FailureReason.DEADLINE}
    planner.complete(TransferDone(job_id=load.job_id, ok=False, failed=lost))
    stack.state_by_key[list(stack.state_by_key)[4]] = ChunkState.ARRIVING
    assert planner.match("heir", 0, 33) == PrefixAnswer(16)
