"""Which chunks a step completes, and the offloads that carry them into the primary tier."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tierstore.layout import GroupKind
from tierstore.planner.groups import GroupOffloadConfig
from tierstore.planner.in_flight import InFlight, OffloadJob
from tierstore.planner.request import RequestGroupState, RequestOffloadState
from tierstore.planner.step import EngineStep, Progress, StateBlock
from tierstore.planner.writes import StepWrites
from tierstore.tier.stack import TierStack
from tierstore.transfer import Offload

__all__ = ["OFFLOAD_COUNT_MAX", "Offloads"]

OFFLOAD_COUNT_MAX = 1024
"""Offload jobs in flight; chunks that are completed beyond it stay uncached until they are offered
again."""


@dataclass(slots=True)
class _Batch:
    """Chunks of one group that this step completes, of all requests: one job."""

    hashes: list[bytes] = field(default_factory=list)
    """Of which the keys are made, at once for all requests."""
    block_ids: list[int] = field(default_factory=list)
    """Of all chunks in order, as many for each."""
    request_ids: set[str] = field(default_factory=set)


class Offloads:
    """Turns progress into offloads: one job per group and step."""

    def __init__(
        self, configs: Sequence[GroupOffloadConfig], stack: TierStack, in_flight: InFlight
    ) -> None:
        self._configs = {config.spec.group_idx: config for config in configs}
        self._stack = stack
        self._in_flight = in_flight

    def plan(
        self, step: EngineStep, requests: Mapping[str, RequestOffloadState], writes: StepWrites
    ) -> list[Offload]:
        """Offer every chunk that this step completes; return the copies of those that are new.

        `writes` is what this step gives to anyone. It need not be compared with the chunks of
        `step.progress`: their requests are scheduled, so the engine took nothing from them but
        what lies before `alive_from`. A state it may have taken, whoever is scheduled.
        """
        batches: dict[int, _Batch] = {}
        for progress in step.progress:
            state = requests.get(progress.request_id)
            if state is not None and progress.ready_tokens >= state.next_ready_tokens:
                for group_idx, group in state.groups.items():
                    self._offer(batches, group_idx, group, state, progress)
                state.expect_next_chunk()
        for block in step.state_blocks:
            state = requests.get(block.request_id)
            if state is None or state.is_outdated or block.request_id in step.preempted:
                continue
            self._offer_state(batches, block, state, writes)
        return [
            offload
            for group_idx, batch in batches.items()
            if (offload := self._reserve(group_idx, batch)) is not None
        ]

    def _offer(
        self,
        batches: dict[int, _Batch],
        group_idx: int,
        group: RequestGroupState,
        state: RequestOffloadState,
        progress: Progress,
    ) -> None:
        config = group.config
        per_chunk = config.tokens_per_chunk
        blocks_per_chunk = config.spec.blocks_per_chunk
        end = min(
            (progress.ready_tokens - config.is_draft) // per_chunk,
            len(state.block_hashes) // config.hashes_per_chunk,
            len(group.block_ids) // blocks_per_chunk,
        )
        alive = -(-config.alive_from(progress.computed_tokens) // per_chunk)
        first = max(group.next_chunk, alive)
        group.next_chunk = max(group.next_chunk, end)
        if first >= end:
            return
        hashes = config.hashes(state.block_hashes, first, end)
        blocks = group.block_ids[first * blocks_per_chunk : end * blocks_per_chunk]
        if 0 in blocks or config.spec.kind is not GroupKind.FULL:
            rows = np.array(blocks, np.int64).reshape(end - first, blocks_per_chunk)
            ends = np.arange(first + 1, end + 1, dtype=np.int64) * per_chunk
            chosen = np.flatnonzero(rows.all(axis=1) & config.can_serve_a_hit(ends))
            hashes = [hashes[i] for i in chosen.tolist()]
            blocks = rows[chosen].ravel().tolist()
        if hashes:
            batch = batches.get(group_idx)
            if batch is None:
                batch = batches[group_idx] = _Batch()
            batch.hashes += hashes
            batch.block_ids += blocks
            batch.request_ids.add(progress.request_id)

    def _offer_state(
        self,
        batches: dict[int, _Batch],
        block: StateBlock,
        state: RequestOffloadState,
        writes: StepWrites,
    ) -> None:
        config = self._configs.get(block.group_idx)
        if config is None or not block.block_id or block.boundary_tokens % config.alignment_tokens:
            return
        if writes.spoils(block, block.boundary_tokens // config.spec.tokens_per_block - 1):
            return
        chunk = block.boundary_tokens // config.tokens_per_chunk - 1
        hashes = config.hashes(state.block_hashes, chunk, chunk + 1)
        if hashes:
            batch = batches.setdefault(block.group_idx, _Batch())
            batch.hashes += hashes
            batch.block_ids.append(block.block_id)
            batch.request_ids.add(block.request_id)

    def _reserve(self, group_idx: int, batch: _Batch) -> Offload | None:
        if len(self._in_flight.offloads) >= OFFLOAD_COUNT_MAX:
            return None
        keys = self._configs[group_idx].keys_of(batch.hashes)
        reservation = self._stack.reserve_offload(group_idx, keys)
        if not reservation.keys:
            return None
        # Those that the next batches will evict are recorded now, so that they are by then.
        self._stack.demote_victims(group_idx, 2 * len(reservation.keys))
        count = len(keys)
        rows = np.fromiter(batch.block_ids, np.int64, len(batch.block_ids)).reshape(count, -1)
        block_ids = batch.block_ids
        if len(reservation.indices) < count:
            rows = rows[list(reservation.indices)]
            block_ids = rows.ravel().tolist()
        job_id = self._stack.new_job_id()
        job = OffloadJob(reservation, tuple(block_ids), frozenset(batch.request_ids))
        self._in_flight.add_offload(job_id, job)
        return Offload(job_id=job_id, group_idx=group_idx, block_ids=rows, slots=reservation.slots)
