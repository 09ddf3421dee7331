"""What the engine tells the planner about one step, and what it gets back."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tierstore.transfer import JobId, StepPlan

__all__ = [
    "NOTHING_PLANNED",
    "EngineStep",
    "FullTable",
    "LastTable",
    "NewBlocks",
    "PlannedStep",
    "Progress",
    "StateBlock",
]

BlockTables = Sequence[Sequence[int]]
"""Block ids per group, by group index; 0 is the null block."""


@dataclass(frozen=True, slots=True)
class FullTable:
    """All blocks of a request that is scheduled for the first time, or again."""

    request_id: str
    block_ids: BlockTables
    computed_tokens: int
    """Local and loaded hits: blocks before them are shared and are not written."""


@dataclass(frozen=True, slots=True)
class LastTable:
    """What a request holds when it ends; the engine may give its blocks away in the next step."""

    block_ids: BlockTables
    """0 where the engine has given a block away already."""
    ready_tokens: int
    """What its steps have computed, and will not change any more."""


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """Blocks that a running request got in this step."""

    request_id: str
    block_ids: BlockTables


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request is once this step's forward pass is done."""

    request_id: str
    computed_tokens: int
    """Before the step; the engine may have dropped the blocks behind the window that ends here."""
    ready_tokens: int
    """After the step, and settled: no token that speculation may still reject."""


@dataclass(frozen=True, slots=True)
class StateBlock:
    """A block that holds the state at a boundary once this step's forward pass is done."""

    request_id: str
    group_idx: int
    block_id: int
    boundary_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStep:
    """Everything that changed since the step before."""

    full_tables: Sequence[FullTable] = ()
    new_blocks: Sequence[NewBlocks] = ()
    progress: Sequence[Progress] = ()
    """Of those requests that `OffloadPlanner.completing` names; others may be left out."""
    state_blocks: Sequence[StateBlock] = ()
    overwritten_block_ids: Sequence[int] = ()
    """Blocks that are written although they are new in no table (copy on write)."""
    preempted: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The data plane's work, and what becomes of the requests that wait for a load."""

    plan: StepPlan
    load_requests: dict[JobId, str] = field(default_factory=dict)
    failed_requests: tuple[str, ...] = ()
    """Promised a hit that is gone by now: to be computed. No command will answer for them."""


NOTHING_PLANNED = PlannedStep(StepPlan())
"""Most steps: requests decode, and complete no chunk."""
