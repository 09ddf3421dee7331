"""How long a prefix the tiers can restore: the hit formula over one batch of lookups."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tierstore.layout import GroupKind
from tierstore.planner.groups import BoolArray, GroupOffloadConfig
from tierstore.planner.room import HitRoom, longest
from tierstore.tier.reservation import ChunkState
from tierstore.tier.stack import TierStack
from tierstore.transfer import IntArray

__all__ = ["HitQuestion", "RestorablePrefix", "match_prefix"]

_FIRST_BATCH = 64
"""Chunks asked at first; doubled while all are there, so that a miss costs one short lookup."""


@dataclass(frozen=True, slots=True)
class HitQuestion:
    """What is asked: how much of a request can be restored beyond what the engine holds."""

    block_hashes: Sequence[bytes]
    local_tokens: int
    token_count: int


@dataclass(frozen=True, slots=True)
class RestorablePrefix:
    """The longest restorable prefix, local tokens included; 0 where nothing is gained."""

    ready_tokens: int
    """What can be loaded now: every chunk is there, and there is room for all of them."""
    hoped_tokens: int
    """What could be loaded once the chunks that are arriving now have arrived, and the transfers
    that hold room have ended."""


@dataclass(frozen=True, slots=True)
class _Run:
    """How far the chunks of a group of full attention go from the first one asked about."""

    ready_tokens: int
    """Up to the first that is not ready."""
    hoped_tokens: int
    """Up to the first that is not even arriving."""
    has_recorded: bool


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Lengths, and at which of them the windowed and state groups find all they need."""

    lengths: IntArray
    is_ready: BoolArray
    is_hoped: BoolArray
    has_recorded: bool


def match_prefix(
    stack: TierStack, configs: Sequence[GroupOffloadConfig], question: HitQuestion
) -> RestorablePrefix:
    """Find the largest aligned hit in (local_tokens, token_count) that satisfies every group.

    One token is left to compute. Changes nothing. Full attention is asked first and in growing
    batches, since it bounds what is worth asking of the other groups. Room is asked for only if
    something would be promoted.
    """
    local_tokens = question.local_tokens
    alignment = configs[0].alignment_tokens
    ready_limit = hoped_limit = _limit(configs, question)
    has_recorded = False
    for config in configs:
        if config.spec.kind is GroupKind.FULL and hoped_limit > local_tokens:
            run = _full_run(stack, config, question, hoped_limit)
            hoped_limit = run.hoped_tokens
            ready_limit = min(ready_limit, run.ready_tokens)
            has_recorded |= run.has_recorded
    lengths = np.arange(
        (local_tokens // alignment + 1) * alignment, hoped_limit + 1, alignment, dtype=np.int64
    )
    if not len(lengths):
        return RestorablePrefix(0, 0)
    others = [config for config in configs if config.spec.kind is not GroupKind.FULL]
    # The longest length alone first: it is the answer nearly always, and its windows are short.
    found = _others_satisfied(stack, others, question, lengths[-1:], ready_limit)
    if not found.is_ready[-1] and len(lengths) > 1:
        found = _others_satisfied(stack, others, question, lengths, ready_limit)
    ready, hoped = _last(found.lengths, found.is_ready), _last(found.lengths, found.is_hoped)
    if not ready or not (has_recorded or found.has_recorded):
        return RestorablePrefix(ready, hoped)
    room = HitRoom(stack, configs, question.block_hashes, local_tokens)
    if room.has_now(ready):
        return RestorablePrefix(ready, hoped)
    if len(found.lengths) < len(lengths):
        found = _others_satisfied(stack, others, question, lengths, ready_limit)
    return _with_room(room, found, is_room_held=stack.is_room_held)


def _limit(configs: Sequence[GroupOffloadConfig], question: HitQuestion) -> int:
    """Return the tokens of which a hit may consist: hashed, and one is left to compute."""
    hash_tokens = configs[0].tokens_per_chunk // configs[0].hashes_per_chunk
    hashed_tokens = len(question.block_hashes) * hash_tokens
    limit = min(question.token_count - 1, hashed_tokens)
    for config in configs:
        if config.is_draft:
            per_chunk = config.tokens_per_chunk
            limit = min(limit, (hashed_tokens // per_chunk - 1) * per_chunk)
    return limit


def _with_room(room: HitRoom, found: _Candidates, *, is_room_held: bool) -> RestorablePrefix:
    """Return the longest hit that fits now, and the longest that fits later."""
    ready = longest(found.lengths[found.is_ready], room.has_now)
    if not is_room_held:
        return RestorablePrefix(ready, ready)
    return RestorablePrefix(ready, longest(found.lengths[found.is_hoped], room.has_ever))


def _full_run(
    stack: TierStack, config: GroupOffloadConfig, question: HitQuestion, limit: int
) -> _Run:
    """Ask for the chunks of a group in order, up to the first that is not even arriving."""
    tokens_per_chunk = config.tokens_per_chunk
    first = question.local_tokens // tokens_per_chunk
    end = limit // tokens_per_chunk + config.is_draft
    hashes = config.hashes(question.block_hashes, first, end)
    ready, asked, batch = -1, 0, _FIRST_BATCH
    has_recorded = False
    while asked < len(hashes):
        keys = config.keys_of(hashes[asked : asked + batch])
        states = bytes(stack.states_of_run(keys))
        arriving = states.find(ChunkState.ARRIVING)
        absent = states.find(ChunkState.ABSENT)
        has_recorded |= ChunkState.RECORDED in states
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
    return _Run(
        (first + ready) * tokens_per_chunk, (first + asked) * tokens_per_chunk, has_recorded
    )


def _others_satisfied(
    stack: TierStack,
    configs: Sequence[GroupOffloadConfig],
    question: HitQuestion,
    lengths: IntArray,
    ready_limit: int,
) -> _Candidates:
    """Ask for the chunks of windowed and state groups in one batch; apply the formula to each.

    `ready_limit` is how far groups of full attention are ready.
    """
    batches = []
    for config in configs:
        per_chunk = config.tokens_per_chunk
        base = int(max(config.restored_from(lengths[:1])[0], question.local_tokens)) // per_chunk
        end = int(lengths[-1]) // per_chunk + config.is_draft
        keys = config.keys(question.block_hashes, base, end)
        batches.append((config, base, keys))
    asked = [key for _, _, keys in batches for key in keys]
    states = bytes(stack.states_in_step(asked))
    all_states = np.frombuffer(states, np.uint8)
    is_ready = lengths <= ready_limit
    is_hoped = np.ones(len(lengths), np.bool_)
    offset = 0
    for config, base, keys in batches:
        there = all_states[offset : offset + len(keys)]
        offset += len(keys)
        is_hoped &= config.satisfied(lengths, there >= ChunkState.ARRIVING, base)
        is_ready &= config.satisfied(lengths, there >= ChunkState.RECORDED, base)
    return _Candidates(lengths, is_ready, is_hoped, ChunkState.RECORDED in states)


def _last(lengths: IntArray, is_hit: BoolArray) -> int:
    """Return the largest length that is a hit, or 0."""
    hits = np.flatnonzero(is_hit)
    return int(lengths[hits[-1]]) if len(hits) else 0
