"""What the planner fences and offers, seen in the plan of one step.

Goal: rules that the small engine cannot tell apart, since it never copies a block on write, frees
what it preempts through another request's table, and has one alignment.
"""

import pytest
from fake_clock import FakeClock
from one_group import WAITS, blocks, fenced, offloads, open_planner

from tierstore.layout import GroupKind
from tierstore.manifest import Manifest
from tierstore.planner import (
    EngineStep,
    FullTable,
    LastTable,
    NewBlocks,
    PrefixAnswer,
    Progress,
    StateBlock,
)
from tierstore.planner.offload import OFFLOAD_COUNT_MAX
from tierstore.planner.planner import IDLE_STEP_COUNT_MAX
from tierstore.planner.wait import WAIT_COUNT_MAX, WAIT_SECONDS_MAX
from tierstore.testing.spread import spread_hashes
from tierstore.transfer import TransferDone


def test_a_block_that_is_copied_onto_waits_for_the_offload_that_reads_it():
    planner = open_planner()
    (offload,) = offloads(planner, progress=[Progress("r", 0, 8)])
    assert fenced(planner, overwritten_block_ids=[3]) == ()
    assert fenced(planner, overwritten_block_ids=[2]) == (offload.job_id,)
    assert fenced(planner) == (), "a fence is for one step"
    planner.complete(TransferDone(job_id=offload.job_id))
    assert fenced(planner, overwritten_block_ids=[2]) == ()


def test_offloads_of_a_preempted_request_are_fenced():
    planner = open_planner()
    planner.add_request("other", [b"h" * 8])
    other = FullTable("other", [[20]], 0)
    (mine,) = offloads(planner, progress=[Progress("r", 0, 8)])
    (theirs,) = offloads(planner, full_tables=[other], progress=[Progress("other", 0, 4)])
    assert mine.job_id != theirs.job_id
    assert fenced(planner, preempted=["r"]) == (mine.job_id,)


def test_blocks_that_may_have_left_the_window_are_not_offloaded():
    planner = open_planner(GroupKind.SLIDING_WINDOW)
    # Of 16 tokens the next one sees 7 to 15; token 8 is the first of which the engine surely
    # holds the block, since it drops blocks as it allocates.
    commands = offloads(planner, progress=[Progress("r", 16, 20)])
    assert blocks(commands) == [3, 4, 5]


def test_a_state_is_offloaded_only_where_a_hit_may_end():
    planner = open_planner(GroupKind.STATE, alignment_tokens=8)
    states = [StateBlock("r", 0, 31, 4), StateBlock("r", 0, 32, 8), StateBlock("r", 0, 0, 16)]
    assert blocks(offloads(planner, state_blocks=states)) == [32]


HANDED_OUT = {
    "to a new request": {"full_tables": [FullTable("other", [[0, 32]], 0)]},
    "to one that nothing is cached of": {"full_tables": [FullTable("unknown", [[32]], 0)]},
    "to a running request": {"new_blocks": [NewBlocks("unknown", [[32]])]},
    "to its own request, further on": {"new_blocks": [NewBlocks("r", [[0, 32]])]},
    "as the target of a copy": {"overwritten_block_ids": [32]},
    "and its request preempted": {"preempted": ["r"]},
}


@pytest.mark.parametrize("step", HANDED_OUT.values(), ids=HANDED_OUT)
def test_a_state_whose_block_is_handed_out_in_the_same_step_is_not_offloaded(step):
    planner = open_planner(GroupKind.STATE, chunk_count=8)
    planner.add_request("other", [])
    states = [StateBlock("r", 0, 32, 8), StateBlock("r", 0, 33, 12)]
    offloaded = [] if "preempted" in step else [33]
    assert blocks(offloads(planner, state_blocks=states, **step)) == offloaded


def test_a_state_whose_block_a_load_writes_from_this_step_on_is_not_offloaded():
    planner = open_planner(GroupKind.STATE, chunk_count=8)
    planner.note_written([32])
    states = [StateBlock("r", 0, 32, 8), StateBlock("r", 0, 33, 12)]
    assert blocks(offloads(planner, state_blocks=states)) == [33]
    (later,) = offloads(planner, state_blocks=[StateBlock("r", 0, 32, 16)])
    assert blocks([later]) == [32], "what is written from now on is its own"


KEPT = {
    "computed in this step": {"new_blocks": [NewBlocks("r", [[32]])]},
    "computed in a block that is copied onto first": {
        "full_tables": [FullTable("r", [[0] * 8 + [32]], 33)],
        "overwritten_block_ids": [32],
    },
    "shared with a request that hits it": {"full_tables": [FullTable("other", [[0, 32]], 8)]},
}


@pytest.mark.parametrize("step", KEPT.values(), ids=KEPT)
def test_a_state_whose_block_stays_its_own_is_offloaded(step):
    planner = open_planner(GroupKind.STATE, chunk_count=9)
    planner.plan_step(EngineStep(full_tables=[FullTable("r", [[0] * 8], 0)]))
    planner.add_request("other", [])
    assert blocks(offloads(planner, state_blocks=[StateBlock("r", 0, 32, 36)], **step)) == [32]


LAST = LastTable([[1, 2, 3, 4]], 15)
"""Three chunks are full, and the request's last token was only sampled."""


def test_what_a_request_completed_and_was_not_offered_is_offloaded_after_its_end():
    planner = open_planner()
    offloads(planner, progress=[Progress("r", 0, 4)])
    planner.finish_request("r", LAST)
    assert planner.has_work()
    assert blocks(offloads(planner)) == [2, 3]
    assert offloads(planner) == ()


TAKEN = {
    "by a new request": {"full_tables": [FullTable("other", [[20, 2]], 0)]},
    "by a running request": {"new_blocks": [NewBlocks("other", [[2]])]},
    "by a copy": {"overwritten_block_ids": [2]},
}


@pytest.mark.parametrize("step", TAKEN.values(), ids=TAKEN)
def test_a_chunk_that_loses_its_block_in_the_step_after_its_request_is_not_offloaded(step):
    planner = open_planner()
    planner.finish_request("r", LAST)
    assert blocks(offloads(planner, **step)) == [1, 3]


def test_a_chunk_that_loses_its_block_to_a_load_after_its_request_is_not_offloaded():
    planner = open_planner()
    planner.finish_request("r", LAST)
    planner.note_written([2])
    assert blocks(offloads(planner)) == [1, 3]


def test_a_chunk_whose_block_another_request_shares_after_its_request_is_offloaded():
    planner = open_planner()
    planner.finish_request("r", LAST)
    assert blocks(offloads(planner, full_tables=[FullTable("heir", [[1, 2, 20]], 8)])) == [1, 2, 3]


def test_of_a_window_what_the_engine_still_held_at_the_end_is_offloaded():
    planner = open_planner(GroupKind.SLIDING_WINDOW)
    planner.finish_request("r", LastTable([[0, 2, 3, 4]], 15))
    assert blocks(offloads(planner)) == [2, 3]


def test_a_request_that_was_preempted_leaves_nothing():
    planner = open_planner()
    offloads(planner, preempted=["r"])
    planner.finish_request("r", LAST)
    assert offloads(planner) == ()


def test_a_request_that_waits_for_blocks_to_be_loaded_leaves_nothing():
    planner = open_planner()
    planner.add_request("waiting", spread_hashes(range(4)))
    planner.finish_request("waiting", LAST)
    assert offloads(planner) == ()


def test_what_a_request_left_is_not_offloaded_after_a_reset_or_in_doubt():
    for forget in (lambda p: p.reset(Manifest.simple("new", 1)), lambda p: p.drop_offloads()):
        planner = open_planner()
        planner.finish_request("r", LAST)
        forget(planner)
        assert offloads(planner) == ()
        assert not planner.has_work()


def test_offloads_in_flight_have_a_limit():
    planner = open_planner(chunk_count=OFFLOAD_COUNT_MAX + 2)
    for number in range(OFFLOAD_COUNT_MAX):
        (first,) = offloads(planner, progress=[Progress("r", 4 * number, 4 * number + 4)])
    computed = 4 * OFFLOAD_COUNT_MAX
    assert offloads(planner, progress=[Progress("r", computed, computed + 4)]) == ()
    planner.complete(TransferDone(job_id=first.job_id))
    (last,) = offloads(planner, progress=[Progress("r", computed + 4, computed + 8)])
    assert blocks([last]) == [OFFLOAD_COUNT_MAX + 2]


def test_the_last_reader_of_a_block_counts_when_an_earlier_one_answers():
    planner = open_planner()
    (first,) = offloads(planner, progress=[Progress("r", 0, 4)])
    planner.add_request("heir", [b"h" * 8])
    heir = FullTable("heir", [[1]], 0)
    planned = planner.plan_step(EngineStep(full_tables=[heir], progress=[Progress("heir", 0, 4)]))
    assert planned.plan.fence_job_ids == (first.job_id,)
    (second,) = planned.plan.commands
    planner.complete(TransferDone(job_id=first.job_id))
    assert planner.check() == []
    assert fenced(planner, overwritten_block_ids=[1]) == (second.job_id,)


def test_an_offload_that_failed_without_saying_where_publishes_nothing():
    planner = open_planner()
    (offload,) = offloads(planner, progress=[Progress("r", 0, 8)])
    planner.complete(TransferDone(job_id=offload.job_id, ok=False))
    assert planner.match("r", 0, 9) == PrefixAnswer(0)
    (again,) = offloads(
        planner, full_tables=[FullTable("r", [[1, 2]], 0)], progress=[Progress("r", 0, 8)]
    )
    planner.complete(TransferDone(job_id=again.job_id))
    assert planner.match("r", 0, 9) == PrefixAnswer(8)


def test_a_request_waits_for_chunks_that_arrive_however_often_it_asks_but_not_for_ever():
    clock = FakeClock()
    planner = open_planner(clock=clock)
    assert offloads(planner, progress=[Progress("r", 0, 8)])
    assert [planner.match("r", 0, 9) for _ in range(1000)] == [WAITS] * 1000
    clock.now += WAIT_SECONDS_MAX * 0.99
    assert planner.match("r", 0, 9) == WAITS
    clock.now += WAIT_SECONDS_MAX * 0.02
    assert planner.match("r", 0, 9) == PrefixAnswer(0)
    assert planner.match("r", 0, 9) == PrefixAnswer(0)


def test_a_request_waits_for_chunks_that_arrive_however_long_a_step_takes():
    clock = FakeClock()
    planner = open_planner(clock=clock)
    assert offloads(planner, progress=[Progress("r", 0, 8)])
    for _ in range(WAIT_COUNT_MAX):
        assert planner.match("r", 0, 9) == WAITS
        clock.now += 2 * WAIT_SECONDS_MAX
    assert planner.match("r", 0, 9) == PrefixAnswer(0)


def test_a_request_whose_wait_was_over_can_wait_anew():
    clock = FakeClock()
    planner = open_planner(clock=clock)
    for first, stop in ((0, 4), (4, 8)):
        (offload,) = offloads(planner, progress=[Progress("r", first, stop)])
        for _ in range(2 * WAIT_COUNT_MAX):
            assert planner.match("r", 0, 9) == WAITS
        planner.complete(TransferDone(job_id=offload.job_id))
        assert planner.match("r", 0, 9) == PrefixAnswer(stop)
        clock.now += 2 * WAIT_SECONDS_MAX


def test_an_idle_engine_is_let_go_although_an_answer_never_comes():
    planner = open_planner()
    assert offloads(planner, progress=[Progress("r", 0, 8)])
    for _ in range(IDLE_STEP_COUNT_MAX):
        assert planner.has_work()
        offloads(planner)
    assert not planner.has_work()
    planner.add_request("new", [])
    assert planner.has_work()


def test_after_a_reset_a_request_is_offloaded_again_once_it_starts_from_nothing():
    planner = open_planner()
    planner.reset(Manifest.simple("new weights", 1))
    assert offloads(planner, progress=[Progress("r", 0, 8)]) == ()
    for computed, offloaded in ((4, []), (0, [1, 2])):
        table = FullTable("r", [[1, 2]], computed)
        commands = offloads(planner, full_tables=[table], progress=[Progress("r", computed, 8)])
        assert blocks(commands) == offloaded


@pytest.mark.parametrize(
    "kind", [GroupKind.FULL, GroupKind.SLIDING_WINDOW], ids=lambda kind: kind.value
)
def test_a_draft_chunk_is_offloaded_once_the_token_behind_it_is_settled(kind):
    planner = open_planner(kind, chunk_count=3, draft_groups={0})
    for computed, ready, offloaded in ((0, 8, [1]), (8, 8, []), (8, 9, [2]), (9, 12, [])):
        progress = [Progress("r", computed, ready)] * len(planner.completing(["r"], [ready]))
        assert blocks(offloads(planner, progress=progress)) == offloaded
