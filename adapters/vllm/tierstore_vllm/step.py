"""Reads one `SchedulerOutput` for the planner: what changed, and no more than that."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierstore.planner import EngineStep, FullTable, NewBlocks, Progress, StateBlock

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

__all__ = ["StepReader"]


@dataclass(frozen=True, slots=True)
class StepReader:
    """Translates steps. `Request.num_computed_tokens` is what it was before the step."""

    requests: "Mapping[str, Request]"
    """Those that vLLM has not finished (a live view)."""
    completes_chunk: Callable[[str, int], bool]
    """`OffloadPlanner.completes_chunk`."""
    offload_decode: bool
    """Whether blocks that generated tokens filled are offloaded too."""

    def read(self, output: "SchedulerOutput") -> EngineStep:
        """Translate one step. Costs about half a microsecond per running request."""
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
            progress=self._progress(output, {table.request_id for table in full_tables}),
            state_blocks=self._state_blocks(output),
            overwritten_block_ids=[
                copy.dst_block_id for copy in output.kv_cache_block_copies or ()
            ],
            preempted=tuple(output.preempted_req_ids or ()),
        )

    def _progress(self, output: "SchedulerOutput", admitted: Collection[str]) -> list[Progress]:
        found: list[Progress] = []
        find, completes_chunk = self.requests.get, self.completes_chunk
        for request_id, scheduled_tokens in output.num_scheduled_tokens.items():
            request = find(request_id)
            if request is None:
                continue
            computed_tokens = request.num_computed_tokens
            ready_tokens = computed_tokens + scheduled_tokens
            is_admitted = request_id in admitted
            # Most running requests end here, in every step: no further work for them.
            if not is_admitted and not completes_chunk(request_id, ready_tokens):
                continue
            # Speculative tokens count as computed, but only known tokens are settled.
            ready_tokens = min(ready_tokens, self._settled_tokens(request))
            if is_admitted or completes_chunk(request_id, ready_tokens):
                found.append(Progress(request_id, computed_tokens, ready_tokens))
        return found

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
