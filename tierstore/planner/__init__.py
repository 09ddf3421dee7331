"""The control half: requests, groups and steps of an engine, planned over the tiers."""

from tierstore.planner.load import LoadTarget
from tierstore.planner.planner import OffloadPlanner, PrefixAnswer
from tierstore.planner.step import (
    EngineStep,
    FullTable,
    NewBlocks,
    PlannedStep,
    Progress,
    StateBlock,
)

__all__ = [
    "EngineStep",
    "FullTable",
    "LoadTarget",
    "NewBlocks",
    "OffloadPlanner",
    "PlannedStep",
    "PrefixAnswer",
    "Progress",
    "StateBlock",
]
