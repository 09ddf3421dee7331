"""What the planner tells the tiers of uses: on whose behalf, and from which chunk on.

Goal: each batch names its request and the depth of its first chunk, whatever became of the request
before; and where the tiers do not go by uses, nothing is told and batches stay whole.
"""

import pytest
from one_group import open_planner
from reference_stack import ReferenceStack

from tierstore.layout import GroupKind
from tierstore.planner import (
    EngineStep,
    FullTable,
    LastTable,
    LoadTarget,
    Progress,
    StateBlock,
)
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.testing.spread import spread_hashes
from tierstore.tier.reservation import ChunkState
from tierstore.transfer import TransferDone

HINTS = (("kind", "agent"),)
ABOUT = UseContext.of(parent_id="p", turn=2, priority=-3, hints=HINTS)


def use(request_id, depth=0, about=UNKNOWN_USE):
    return UseContext.of(
        request_id,
        parent_id=about.parent_id,
        turn=about.turn,
        depth=depth,
        priority=about.priority,
        hints=about.hints,
    )


def opened(kind=GroupKind.FULL):
    stack = ReferenceStack(needs_use=True)
    return open_planner(kind, stack=stack), stack


def told(stack):
    """Return what was told since the last call: the call, the use, how many chunks."""
    found = [(call, told_use, len(keys)) for call, told_use, keys in stack.told]
    stack.told.clear()
    return found


def run(planner, **step):
    """Plan a step, and answer its offloads."""
    commands = planner.plan_step(EngineStep(**step)).plan.commands
    for command in commands:
        planner.complete(TransferDone(job_id=command.job_id))
    return commands


def add(planner, request_id, number, about=UNKNOWN_USE):
    """Let a request arrive whose hashes are no other's; return its table of four blocks."""
    planner.add_request(request_id, spread_hashes((number, i) for i in range(4)), about)
    return FullTable(request_id, [[10 * number + i for i in range(1, 5)]], 0)


def test_two_requests_of_one_step_have_a_batch_and_a_use_each():
    planner, stack = opened()
    other = add(planner, "other", 2, ABOUT)
    commands = run(
        planner, full_tables=[other], progress=[Progress("r", 0, 8), Progress("other", 0, 12)]
    )
    assert told(stack) == [("offload", use("r"), 2), ("offload", use("other", 0, ABOUT), 3)]
    assert [command.block_ids.ravel().tolist() for command in commands] == [[1, 2], [21, 22, 23]]


def test_the_next_chunks_of_a_request_lie_deeper():
    planner, stack = opened()
    run(planner, progress=[Progress("r", 0, 8)])
    run(planner, progress=[Progress("r", 8, 12)])
    run(planner, progress=[Progress("r", 12, 13)])
    assert told(stack) == [("offload", use("r"), 2), ("offload", use("r", 2), 1)]


def test_a_second_turn_is_told_with_its_parent_and_touches_what_the_first_left():
    planner, stack = opened()
    run(planner, progress=[Progress("r", 0, 8)])
    planner.finish_request("r", LastTable([list(range(1, 9))], 8))
    run(planner)
    told(stack)
    second = UseContext.of(parent_id="r", turn=1)
    planner.add_request("r2", spread_hashes(range(8)), second)
    (batch,) = run(
        planner,
        full_tables=[FullTable("r2", [list(range(41, 49))], 0)],
        progress=[Progress("r2", 0, 16)],
    )
    # The tiers are told of all that it computed; those chunks that they hold are uses of it.
    assert told(stack) == [("offload", use("r2", 0, second), 4)]
    assert batch.block_ids.ravel().tolist() == [43, 44]


def test_a_request_that_was_preempted_and_resumed_is_told_from_its_start():
    planner, stack = opened()
    run(planner, progress=[Progress("r", 0, 12)])
    told(stack)
    run(planner, preempted=["r"])
    assert told(stack) == []
    table = FullTable("r", [list(range(31, 39))], 0)
    run(planner, full_tables=[table], progress=[Progress("r", 0, 16)])
    assert told(stack) == [("offload", use("r"), 4)]


def test_a_load_is_told_from_its_first_chunk_and_what_follows_from_behind_it():
    planner, stack = opened()
    run(planner, progress=[Progress("r", 0, 16)])
    told(stack)
    planner.add_request("second", spread_hashes(range(8)), ABOUT)
    target = LoadTarget(4, 16, {0: [52, 53, 54]})
    assert planner.begin_load("second", target) is not None
    assert told(stack) == [("load", use("second", 1, ABOUT), 3)]
    (load,) = planner.plan_step(EngineStep()).plan.commands
    planner.complete(TransferDone(job_id=load.job_id))
    run(
        planner,
        full_tables=[FullTable("second", [list(range(51, 59))], 16)],
        progress=[Progress("second", 16, 24)],
    )
    # Whatever was local before the load is offered, too; it is no later than the request's start.
    assert told(stack) == [("offload", use("second", 0, ABOUT), 6)]


def test_after_a_load_from_the_first_chunk_on_only_what_is_new_is_told():
    planner, stack = opened()
    run(planner, progress=[Progress("r", 0, 16)])
    planner.add_request("second", spread_hashes(range(8)))
    assert planner.begin_load("second", LoadTarget(0, 16, {0: [51, 52, 53, 54]})) is not None
    (load,) = planner.plan_step(EngineStep()).plan.commands
    planner.complete(TransferDone(job_id=load.job_id))
    told(stack)
    table = FullTable("second", [list(range(51, 59))], 16)
    run(planner, full_tables=[table], progress=[Progress("second", 16, 24)])
    assert told(stack) == [("offload", use("second", 4), 2)]


def test_chunks_that_a_request_left_are_told_of_it_after_its_end():
    planner, stack = opened()
    other = add(planner, "other", 2, ABOUT)
    run(planner, full_tables=[other], progress=[Progress("other", 0, 4)])
    planner.finish_request("other", LastTable([[21, 22, 23, 24]], 16))
    told(stack)
    # The step gives the first of them away: the batch begins with the next.
    run(planner, overwritten_block_ids=[22])
    assert told(stack) == [("offload", use("other", 2, ABOUT), 2)]


def test_chunks_in_front_of_a_window_are_counted_though_they_are_not_offloaded():
    planner, stack = opened(GroupKind.SLIDING_WINDOW)
    run(planner, progress=[Progress("r", 16, 20)])
    assert told(stack) == [("offload", use("r", 2), 3)]


def test_a_state_is_told_with_the_chunk_that_it_ends():
    planner, stack = opened(GroupKind.STATE)
    run(planner, state_blocks=[StateBlock("r", 0, 31, 12)])
    assert told(stack) == [("offload", use("r", 2), 1)]


def test_a_reset_changes_no_use():
    from tierstore.manifest import Manifest

    planner, stack = opened()
    stack.reset = lambda *_, **__: None
    planner.reset(Manifest.simple("m", 1))
    table = FullTable("r", [list(range(31, 39))], 0)
    run(planner, full_tables=[table], progress=[Progress("r", 0, 16)])
    assert told(stack) == [("offload", use("r"), 4)]


def test_the_uses_of_equal_batches_are_one_object():
    planner, stack = opened()
    for _ in range(2):
        table = FullTable("r", [list(range(31, 39))], 0)
        run(planner, full_tables=[table], progress=[Progress("r", 0, 16)])
    (_, first, _), (_, second, _) = told(stack)
    assert first is second


@pytest.mark.parametrize("about", [UNKNOWN_USE, ABOUT])
def test_tiers_that_do_not_go_by_uses_are_told_nothing_and_get_whole_batches(about):
    stack = ReferenceStack()
    planner = open_planner(stack=stack)
    assert not planner.needs_use
    other = add(planner, "other", 2, about)
    (command,) = run(
        planner, full_tables=[other], progress=[Progress("r", 0, 8), Progress("other", 0, 12)]
    )
    assert command.block_ids.ravel().tolist() == [1, 2, 21, 22, 23]
    stack.state_by_key = dict.fromkeys(stack.state_by_key, ChunkState.RESIDENT)
    planner.add_request("second", spread_hashes(range(8)), about)
    assert planner.begin_load("second", LoadTarget(0, 8, {0: [51, 52]})) is not None
    assert all(told_use is UNKNOWN_USE for _, told_use, _ in told(stack))
