"""A planner of one group and one request, for tests that look at single steps."""

from fake_clock import FakeClock
from reference_stack import ReferenceStack

from tierstore.key import Namespace
from tierstore.layout import GroupKind, GroupSpec
from tierstore.metrics import Counters
from tierstore.planner import EngineStep, FullTable, OffloadPlanner, PrefixAnswer
from tierstore.testing.spread import spread_hashes

WAITS = PrefixAnswer(0, ask_again=True)


def open_planner(
    kind=GroupKind.FULL,
    *,
    chunk_count=8,
    alignment_tokens=4,
    draft_groups=(),
    clock=None,
    stack=None,
):
    """One request `r` of one group: blocks of 4 tokens, a chunk each; block i + 1 is chunk i's."""
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
        stack or ReferenceStack(),
        hash_tokens=4,
        counters=Counters(),
        clock=clock or FakeClock(),
        alignment_tokens=alignment_tokens,
        draft_groups=draft_groups,
    )
    planner.add_request("r", spread_hashes(range(chunk_count)))
    table = FullTable("r", [list(range(1, chunk_count + 1))], 0)
    assert not planner.plan_step(EngineStep(full_tables=[table])).plan
    return planner


def offloads(planner, **step):
    return planner.plan_step(EngineStep(**step)).plan.commands


def blocks(commands):
    return [block for command in commands for block in command.block_ids.ravel().tolist()]


def fenced(planner, **step):
    return planner.plan_step(EngineStep(**step)).plan.fence_job_ids
