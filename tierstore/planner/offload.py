"""Which chunks a step completes, and the offloads that carry them into the primary tier."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tierstore.layout import GroupKind
from tierstore.planner.groups import GroupOffloadConfig
from tierstore.planner.in_flight import InFlight, OffloadJob
from tierstore.planner.request import RequestGroupState, RequestOffloadState
from tierstore.planner.step import EngineStep, LastTable, Progress, StateBlock
from tierstore.planner.writes import StepWrites
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.tier.stack import TierStack
from tierstore.transfer import Offload

__all__ = ["OFFLOAD_COUNT_MAX", "Offloads"]

OFFLOAD_COUNT_MAX = 1024
"""Offload jobs in flight; chunks that are completed beyond it stay uncached until they are offered
again."""


# A named tuple, since each request that completes chunks makes one.
class _Offer(NamedTuple):
    """Chunks of one group that one request has completed."""

    request_id: str
    use: UseContext | None
    """The request's; None: the tiers do not go by uses."""
    group_idx: int
    chunks: Sequence[int]
    """Which ones, ascending."""
    hashes: Sequence[bytes]
    block_ids: Sequence[int]
    """Of all chunks in order, as many for each."""


@dataclass(slots=True)
class _Batch:
    """Chunks of one group that this step completes: one job."""

    group_idx: int
    use: UseContext = UNKNOWN_USE
    """Of the one request whose chunks these are, or unknown."""
    hashes: list[bytes] = field(default_factory=list)
    """Of which the keys are made, at once for all requests."""
    block_ids: list[int] = field(default_factory=list)
    """Of all chunks in order, as many for each."""
    request_ids: set[str] = field(default_factory=set)


class _Batches:
    """The batches of one step: by group, or by group and request where the tiers go by uses."""

    def __init__(self) -> None:
        self._batches: dict[int | tuple[int, str], _Batch] = {}

    def __iter__(self) -> Iterator[_Batch]:
        """Yield them in the order in which they were begun."""
        return iter(self._batches.values())

    def add(self, offer: _Offer) -> None:
        """Take the chunks of an offer, if there are any."""
        if not offer.hashes:
            return
        by_request = offer.use is not None
        name = (offer.group_idx, offer.request_id) if by_request else offer.group_idx
        batch = self._batches.get(name)
        if batch is None:
            batch = self._batches[name] = _Batch(offer.group_idx)
            if offer.use is not None:
                batch.use = offer.use.at_depth(offer.chunks[0])
        batch.hashes += offer.hashes
        batch.block_ids += offer.block_ids
        batch.request_ids.add(offer.request_id)


class Offloads:
    """Turns progress into offloads: one job per group and step.

    Where the tiers go by uses it is one per request, too, since each batch has one use.
    """

    def __init__(
        self, configs: Sequence[GroupOffloadConfig], stack: TierStack, in_flight: InFlight
    ) -> None:
        self._configs = {config.spec.group_idx: config for config in configs}
        self._stack = stack
        self._in_flight = in_flight
        self._leftovers: list[_Offer] = []

    @property
    def has_leftovers(self) -> bool:
        """Whether requests that ended left chunks for the next step."""
        return bool(self._leftovers)

    def keep_leftovers(self, request_id: str, state: RequestOffloadState, last: LastTable) -> None:
        """Keep what a request has completed for the next step to offer.

        An engine that plans a step before it knows the tokens of the one before learns of the last
        chunk only when the request ends. One that waits (for a load, after a preemption) leaves
        nothing: its blocks hold nothing yet. States are not kept: which block holds one, the engine
        says in steps alone.
        """
        if state.is_outdated or not state.is_scheduled:
            return
        for group_idx, group in state.groups.items():
            config = group.config
            blocks_per_chunk = config.spec.blocks_per_chunk
            table = last.block_ids[group_idx]
            end = min(
                (last.ready_tokens - config.is_draft) // config.tokens_per_chunk,
                len(state.block_hashes) // config.hashes_per_chunk,
                len(table) // blocks_per_chunk,
            )
            if group.next_chunk < end:
                rest = table[group.next_chunk * blocks_per_chunk : end * blocks_per_chunk]
                left = _useful(request_id, state, config, group.next_chunk, rest)
                if left.hashes:
                    self._leftovers.append(left)

    def drop_leftovers(self) -> None:
        """Let nothing be offered of requests that have ended."""
        self._leftovers.clear()

    def plan(
        self, step: EngineStep, requests: Mapping[str, RequestOffloadState], writes: StepWrites
    ) -> list[Offload]:
        """Offer every chunk that this step completes; return the copies of those that are new.

        `writes` is what this step gives to anyone. It is not compared with the chunks of
        `step.progress`: their requests are scheduled, so the engine took nothing from them but
        what lies before `alive_from`. A state it may have taken, whoever is scheduled.
        """
        batches = _Batches()
        if self._leftovers:
            self._offer_leftovers(batches, writes)
        for progress in step.progress:
            state = requests.get(progress.request_id)
            if state is not None and progress.ready_tokens >= state.next_ready_tokens:
                for group in state.groups.values():
                    self._offer(batches, group, state, progress)
                state.expect_next_chunk()
        for block in step.state_blocks:
            state = requests.get(block.request_id)
            if state is None or state.is_outdated or block.request_id in step.preempted:
                continue
            self._offer_state(batches, block, state, writes)
        return [offload for batch in batches if (offload := self._reserve(batch)) is not None]

    def _offer(
        self,
        batches: _Batches,
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
        offered = group.block_ids[first * blocks_per_chunk : end * blocks_per_chunk]
        batches.add(_useful(progress.request_id, state, config, first, offered))

    def _offer_leftovers(self, batches: _Batches, writes: StepWrites) -> None:
        """Offer what requests left, but for chunks that lose a block to this very step."""
        written = writes.block_ids()
        for left in self._leftovers:
            per_chunk = len(left.block_ids) // len(left.hashes)
            for i, (chunk, block_hash) in enumerate(zip(left.chunks, left.hashes, strict=True)):
                blocks = left.block_ids[i * per_chunk : (i + 1) * per_chunk]
                if written.isdisjoint(blocks):
                    batches.add(
                        _Offer(
                            left.request_id, left.use, left.group_idx, [chunk], [block_hash], blocks
                        )
                    )
        self._leftovers.clear()

    def _offer_state(
        self,
        batches: _Batches,
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
        batches.add(
            _Offer(block.request_id, state.use, block.group_idx, [chunk], hashes, [block.block_id])
        )

    def _reserve(self, batch: _Batch) -> Offload | None:
        if len(self._in_flight.offloads) >= OFFLOAD_COUNT_MAX:
            return None
        group_idx = batch.group_idx
        keys = self._configs[group_idx].keys_of(batch.hashes)
        reservation = self._stack.reserve_offload(group_idx, keys, use=batch.use)
        if not reservation.keys:
            return None
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


def _useful(
    request_id: str,
    state: RequestOffloadState,
    config: GroupOffloadConfig,
    first: int,
    block_ids: Sequence[int],
) -> _Offer:
    """Offer those chunks of a request, from `first` on, that a hit could need."""
    spec = config.spec
    end = first + len(block_ids) // spec.blocks_per_chunk
    chunks: Sequence[int] = range(first, end)
    hashes = config.hashes(state.block_hashes, first, end)
    if 0 in block_ids or spec.kind is not GroupKind.FULL:
        rows = np.array(block_ids, np.int64).reshape(end - first, spec.blocks_per_chunk)
        ends = np.arange(first + 1, end + 1, dtype=np.int64) * config.tokens_per_chunk
        chosen = np.flatnonzero(rows.all(axis=1) & config.can_serve_a_hit(ends))
        hashes = [hashes[i] for i in chosen.tolist()]
        chunks, block_ids = (chosen + first).tolist(), rows[chosen].ravel().tolist()
    return _Offer(request_id, state.use, spec.group_idx, chunks, hashes, block_ids)
