"""The blocks that one step hands out to be written: what they held before is lost after it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from tierstore.planner.step import StateBlock

__all__ = ["StepWrites"]


@dataclass(frozen=True, slots=True)
class _StateRun:
    """Blocks of one request's state table that came in this step."""

    request_id: str
    group_idx: int
    first_index: int
    block_ids: Sequence[int]


class StepWrites:
    """Collects blocks from one plan to the next: the engine allocates between them.

    Shared blocks (local hits, whoever else uses them) are not written and are left out.
    """

    def __init__(self) -> None:
        self._lists: list[Sequence[int]] = []
        self._copied_onto: Sequence[int] = ()
        self._state_runs: list[_StateRun] = []
        self._block_ids: frozenset[int] | None = None

    def add(self, block_ids: Sequence[int]) -> None:
        """Take blocks that are handed out; 0 is the null block."""
        self._lists.append(block_ids)

    def add_states(
        self, request_id: str, group_idx: int, first_index: int, block_ids: Sequence[int]
    ) -> None:
        """Note which of the added blocks stand in a state table, from which index on."""
        self._state_runs.append(_StateRun(request_id, group_idx, first_index, block_ids))

    def add_copied_onto(self, block_ids: Sequence[int]) -> None:
        """Take blocks that are copied onto, most of which stand in a table as well."""
        self._copied_onto = block_ids

    def all(self) -> Iterable[int]:
        """Return every block, some of them twice."""
        return chain(chain.from_iterable(self._lists), self._copied_onto)

    def block_ids(self) -> frozenset[int]:
        """Return the blocks as a set; nothing may be added afterwards."""
        if self._block_ids is None:
            self._block_ids = frozenset(self.all())
        return self._block_ids

    def spoils(self, state: StateBlock, index: int) -> bool:
        """Return whether the state at `index` of its table is gone after the step.

        An engine may learn of a boundary from the outputs of earlier steps, free the state's block
        in this one, give it to anyone, and offer it nevertheless. Only a block that this step gave
        to that very place of that very table is written with the state itself.
        """
        block_id = state.block_id
        if block_id not in self.block_ids():
            return False
        times = sum(block_ids.count(block_id) for block_ids in self._lists)
        return times != 1 or not any(
            run.request_id == state.request_id
            and run.group_idx == state.group_idx
            and run.first_index <= index < run.first_index + len(run.block_ids)
            and run.block_ids[index - run.first_index] == block_id
            for run in self._state_runs
        )
