"""Reads one `SchedulerOutput` for the planner: what changed, and no more than that."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import TYPE_CHECKING

from tierstore.planner import (
    EngineStep,
    FullTable,
    LastTable,
    NewBlocks,
    Progress,
    StateBlock,
)

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

__all__ = ["StepReader"]


@dataclass(frozen=True, slots=True)
class StepReader:
    """Translates steps. Computed tokens are what they were before the step."""

    requests: "Mapping[str, Request]"
    """Those that vLLM has not finished (a live view)."""
    completing: Callable[[Sequence[str], Sequence[int]], list[int]]
    """`OffloadPlanner.completing`."""
    offload_decode: bool
    """Whether blocks that generated tokens filled are offloaded too."""

    def read(self, output: "SchedulerOutput") -> EngineStep:
        """Translate one step. Costs about 0.2 us per running request."""
        full_tables = [
            FullTable(new.req_id, new.block_ids, new.num_computed_tokens)
            for new in output.scheduled_new_reqs
        ]
        new_blocks: list[NewBlocks] = []
        cached = output.scheduled_cached_reqs
        for i, block_ids in enumerate(cached.new_block_ids):
            if block_ids is None:
                continue
            request_id = cached.req_ids[i]
            if request_id in cached.resumed_req_ids:
                computed_tokens = cached.num_computed_tokens[i]
                full_tables.append(FullTable(request_id, block_ids, computed_tokens))
            else:
                new_blocks.append(NewBlocks(request_id, block_ids))
        return EngineStep(
            full_tables=full_tables,
            new_blocks=new_blocks,
            progress=self._progress(output, full_tables),
            state_blocks=self._state_blocks(output),
            overwritten_block_ids=[
                copy.dst_block_id for copy in output.kv_cache_block_copies or ()
            ],
            preempted=tuple(output.preempted_req_ids or ()),
        )

    def last_table(self, request: "Request", block_ids: Sequence[Sequence[int]]) -> LastTable:
        """Return what a request leaves.

        The KV of every token but the last is computed, or is by a step that was planned before.
        The last one was sampled, and speculative ones behind it are not the request's.
        """
        computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        return LastTable(block_ids, min(computed_tokens, self._settled_tokens(request)))

    def _progress(self, output: "SchedulerOutput", admitted: Sequence[FullTable]) -> list[Progress]:
        scheduled_tokens = output.num_scheduled_tokens
        cached = output.scheduled_cached_reqs
        names, computed_tokens = cached.req_ids, cached.num_computed_tokens
        # Every running request is in these lists, and nearly all of them end here.
        ready_tokens = list(map(add, computed_tokens, map(scheduled_tokens.__getitem__, names)))
        found = [
            self._progress_of(names[i], computed_tokens[i], ready_tokens[i])
            for i in self.completing(names, ready_tokens)
        ]
        for table in admitted:
            before = table.computed_tokens
            after = before + scheduled_tokens[table.request_id]
            found.append(self._progress_of(table.request_id, before, after))
        return [progress for progress in found if progress is not None]

    def _progress_of(
        self, request_id: str, computed_tokens: int, ready_tokens: int
    ) -> Progress | None:
        request = self.requests.get(request_id)
        if request is None:
            return None
        # Speculative tokens count as computed, but only known tokens are settled.
        settled_tokens = min(ready_tokens, self._settled_tokens(request))
        return Progress(request_id, computed_tokens, settled_tokens)

    def _state_blocks(self, output: "SchedulerOutput") -> list[StateBlock]:
        state = output.kv_connector_block_state
        if state is None or not state.boundary_state_offloads:
            return []
        return [
            StateBlock(request_id, group_idx, block_id, boundary_tokens)
            for request_id, entries in state.boundary_state_offloads.items()
            if (request := self.requests.get(request_id)) is not None
            for group_idx, block_id, boundary_tokens in entries
            if boundary_tokens <= self._settled_tokens(request)
        ]

    def _settled_tokens(self, request: "Request") -> int:
        return int(request.num_tokens if self.offload_decode else request.num_prompt_tokens)
