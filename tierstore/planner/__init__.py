"""The control half: requests, groups and steps of an engine, planned over the tiers."""

from tierstore.planner.load import LoadTarget
from tierstore.planner.planner import OffloadPlanner, PrefixAnswer
from tierstore.planner.step import (
    NOTHING_PLANNED,
    EngineStep,
    FullTable,
    LastTable,
    NewBlocks,
    PlannedStep,
    Progress,
    StateBlock,
)

__all__ = [
    "NOTHING_PLANNED",
    "EngineStep",
    "FullTable",
    "LastTable",
    "LoadTarget",
    "NewBlocks",
    "OffloadPlanner",
    "PlannedStep",
    "PrefixAnswer",
    "Progress",
    "StateBlock",
]
