"""How long a prefix the tiers can restore: the hit formula over one batch of lookups."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tierstore.layout import GroupKind
from tierstore.planner.groups import BoolArray, GroupOffloadConfig
from tierstore.tier.reservation import ChunkState
from tierstore.tier.stack import TierStack
from tierstore.transfer import IntArray

__all__ = ["RestorablePrefix", "match_prefix"]

_FIRST_BATCH = 64
"""Chunks asked at first; doubled while all are there, so that a miss costs one short lookup."""


@dataclass(frozen=True, slots=True)
class RestorablePrefix:
    """The longest restorable prefix, local tokens included; 0 where nothing is gained."""

    ready_tokens: int
    """What can be loaded now."""
    hoped_tokens: int
    """What could be loaded once the chunks that are arriving now have arrived."""


def match_prefix(
    stack: TierStack,
    configs: Sequence[GroupOffloadConfig],
    block_hashes: Sequence[bytes],
    local_tokens: int,
    token_count: int,
) -> RestorablePrefix:
    """Find the largest aligned hit in (local_tokens, token_count) that satisfies every group.

    One token is left to compute. Changes nothing. Full attention is asked first and in growing
    batches, since it bounds what is worth asking of the other groups.
    """
    config = configs[0]
    alignment = config.alignment_tokens
    hashed_tokens = len(block_hashes) * (config.tokens_per_chunk // config.hashes_per_chunk)
    limit = min(token_count - 1, hashed_tokens)
    for config in configs:
        if config.is_draft:
            per_chunk = config.tokens_per_chunk
            limit = min(limit, (hashed_tokens // per_chunk - 1) * per_chunk)
    ready_limit = hoped_limit = limit
    for config in configs:
        if config.spec.kind is GroupKind.FULL and hoped_limit > local_tokens:
            ready, hoped_limit = _full_run(stack, config, block_hashes, local_tokens, hoped_limit)
            ready_limit = min(ready_limit, ready)
    lengths = np.arange(
        (local_tokens // alignment + 1) * alignment, hoped_limit + 1, alignment, dtype=np.int64
    )
    if not len(lengths):
        return RestorablePrefix(0, 0)
    others = [config for config in configs if config.spec.kind is not GroupKind.FULL]
    # The longest length alone first: it is the answer nearly always, and its windows are short.
    for candidates in (lengths[-1:], lengths):
        ready_ok, hoped_ok = _others_satisfied(
            stack, others, block_hashes, local_tokens, candidates
        )
        ready_ok &= candidates <= ready_limit
        if ready_ok[-1] or len(lengths) == 1:
            break
    return RestorablePrefix(_last(candidates, ready_ok), _last(candidates, hoped_ok))


def _full_run(
    stack: TierStack,
    config: GroupOffloadConfig,
    block_hashes: Sequence[bytes],
    local_tokens: int,
    limit: int,
) -> tuple[int, int]:
    """Return up to which token every chunk is ready, and up to which it is at least arriving."""
    tokens_per_chunk = config.tokens_per_chunk
    first = local_tokens // tokens_per_chunk
    hashes = config.hashes(block_hashes, first, limit // tokens_per_chunk + config.is_draft)
    ready, asked, batch = -1, 0, _FIRST_BATCH
    while asked < len(hashes):
        states = bytes(stack.locate_run(config.keys_of(hashes[asked : asked + batch])))
        arriving = states.find(ChunkState.ARRIVING)
        absent = states.find(ChunkState.ABSENT)
        if ready < 0 <= arriving and not 0 <= absent < arriving:
            ready = asked + arriving
        if absent >= 0:
            asked += absent
            break
        asked += len(states)
        # From the first chunk on that is not resident, the tiers are asked for all the rest.
        batch = 2 * batch if states.count(ChunkState.RESIDENT) == len(states) else len(hashes)
    ready = asked if ready < 0 else ready
    first -= config.is_draft
    return (first + ready) * tokens_per_chunk, (first + asked) * tokens_per_chunk


def _others_satisfied(
    stack: TierStack,
    configs: Sequence[GroupOffloadConfig],
    block_hashes: Sequence[bytes],
    local_tokens: int,
    lengths: IntArray,
) -> tuple[BoolArray, BoolArray]:
    """Ask for the chunks of windowed and state groups in one batch; apply the formula to each."""
    batches = []
    for config in configs:
        per_chunk = config.tokens_per_chunk
        base = int(max(config.restored_from(lengths[:1])[0], local_tokens)) // per_chunk
        end = int(lengths[-1]) // per_chunk + config.is_draft
        keys = config.keys(block_hashes, base, end)
        batches.append((config, base, keys))
    asked = [key for _, _, keys in batches for key in keys]
    all_states = np.frombuffer(bytes(stack.locate_in_step(asked)), np.uint8)
    ready_ok = np.ones(len(lengths), np.bool_)
    hoped_ok = ready_ok.copy()
    offset = 0
    for config, base, keys in batches:
        there = all_states[offset : offset + len(keys)]
        offset += len(keys)
        hoped_ok &= config.satisfied(lengths, there >= ChunkState.ARRIVING, base)
        ready_ok &= config.satisfied(lengths, there >= ChunkState.RECORDED, base)
    return ready_ok, hoped_ok


def _last(lengths: IntArray, is_hit: BoolArray) -> int:
    """Return the largest length that is a hit, or 0."""
    hits = np.flatnonzero(is_hit)
    return int(lengths[hits[-1]]) if len(hits) else 0
