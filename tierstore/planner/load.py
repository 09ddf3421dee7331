"""From a promised hit to one `Load`: which chunks, into which of the engine's new blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tierstore.key import OffloadKey
from tierstore.layout import GroupKind
from tierstore.planner.groups import GroupOffloadConfig
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.tier.reservation import LoadReservation
from tierstore.tier.stack import TierStack
from tierstore.transfer import IntArray, Load, LoadPart

__all__ = ["LoadTarget", "PlannedLoad", "build_load"]


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The blocks that the engine set aside for a hit."""

    local_tokens: int
    hit_tokens: int
    """Local tokens included."""
    fresh_blocks: Mapping[int, Sequence[int]]
    """By group index: the blocks of [local_tokens, hit_tokens), from the one that holds token
    `local_tokens`; 0 where nothing is to be loaded (null blocks, local hits)."""

    def block_ids(self) -> list[int]:
        """Return all blocks that the load writes."""
        return [block for blocks in self.fresh_blocks.values() for block in blocks if block]


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """A load and what was reserved for it."""

    command: Load
    reservation: LoadReservation
    promoted_tokens: int
    """Tokens of the chunks that come from a secondary tier, of the group with most of them."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Chunks of one group, and the blocks they go to."""

    config: GroupOffloadConfig
    first_chunk: int
    keys: list[OffloadKey]
    rows: IntArray


def build_load(
    stack: TierStack,
    configs: Sequence[GroupOffloadConfig],
    block_hashes: Sequence[bytes],
    target: LoadTarget,
    use: UseContext | None = None,
) -> PlannedLoad | None:
    """Reserve everything that the fresh blocks need, all or nothing.

    The tiers are told the request's `use`, from the first chunk of the first group that loads any;
    None: they do not go by uses.

    The blocks decide what is loaded, not the window: each block that the engine handed out must
    hold valid bytes afterwards, because the engine will share it by its hash.
    """
    wanted: list[_Wanted] = []
    for config in configs:
        rows = _rows(config, target)
        if rows is None:
            return None
        chunks = np.flatnonzero((rows >= 0).any(axis=1))
        if not len(chunks):
            continue
        base = target.local_tokens // config.tokens_per_chunk
        first, end = int(chunks[0]), int(chunks[-1]) + 1
        keys = config.keys(block_hashes, base + first, base + end)
        if len(keys) != end - first:
            return None
        if len(chunks) < len(keys):
            keys = [keys[i] for i in (chunks - first).tolist()]
        wanted.append(_Wanted(config, base + first, keys, rows[chunks]))
    if not wanted:
        return None
    reservation = stack.reserve_load(
        [(w.config.spec.group_idx, w.keys) for w in wanted],
        use=UNKNOWN_USE if use is None else use.at_depth(wanted[0].first_chunk),
    )
    if reservation is None:
        return None
    parts = tuple(
        LoadPart(group_idx=w.config.spec.group_idx, block_ids=w.rows, slots=slots)
        for w, slots in zip(wanted, reservation.slots, strict=True)
    )
    command = Load(job_id=reservation.job_id, parts=parts, promotes=reservation.promotes)
    return PlannedLoad(command, reservation, _promoted_tokens(configs, reservation, target))


def _rows(config: GroupOffloadConfig, target: LoadTarget) -> IntArray | None:
    """Lay a group's fresh blocks out by chunk, -1 where nothing is wanted.

    None: the hit cannot be restored (a state inside a chunk, a table that is too short).

        chunk      |   base    |  base + 1 |
        blocks     | .  .  .  x| x  x  x  .|      x: [local_tokens, hit_tokens)
    """
    spec = config.spec
    if spec.kind is GroupKind.STATE and target.hit_tokens % spec.tokens_per_chunk:
        return None
    first_block = target.local_tokens // spec.tokens_per_block
    end_block = -(-target.hit_tokens // spec.tokens_per_block)
    fresh = target.fresh_blocks.get(spec.group_idx, ())
    if len(fresh) < end_block - first_block:
        return None
    base_block = target.local_tokens // spec.tokens_per_chunk * spec.blocks_per_chunk
    chunk_count = (
        -(-target.hit_tokens // spec.tokens_per_chunk) - base_block // spec.blocks_per_chunk
    )
    rows = np.full(chunk_count * spec.blocks_per_chunk, -1, np.int64)
    blocks = np.array(fresh[: end_block - first_block], np.int64)
    blocks[blocks == 0] = -1
    rows[first_block - base_block : end_block - base_block] = blocks
    return rows.reshape(chunk_count, spec.blocks_per_chunk)


def _promoted_tokens(
    configs: Sequence[GroupOffloadConfig], reservation: LoadReservation, target: LoadTarget
) -> int:
    """Count the tokens that come from secondary tiers; one promoted state stands for all."""
    tokens = dict.fromkeys((config.spec.group_idx for config in configs), 0)
    per_chunk = {config.spec.group_idx: config.tokens_per_chunk for config in configs}
    for config in configs:
        if config.spec.kind is GroupKind.STATE:
            per_chunk[config.spec.group_idx] = target.hit_tokens
    for promote in reservation.promotes:
        tokens[promote.group_idx] += len(promote.keys) * per_chunk[promote.group_idx]
    return max(tokens.values())
