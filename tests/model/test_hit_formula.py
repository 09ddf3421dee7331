"""The hit formula against an oracle that looks at every token of every candidate length."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_stack import ReferenceStack

from tierstore.key import Namespace
from tierstore.layout import GroupKind, GroupSpec
from tierstore.planner.groups import build_group_configs
from tierstore.planner.match import HitQuestion, match_prefix
from tierstore.testing.spread import spread_hashes
from tierstore.tier.reservation import ChunkState

HASH_TOKENS = 2
NAMESPACE = Namespace(b"n" * 8)
ALIGNMENTS = st.sampled_from([1, 1, 6, 16, 20])


@st.composite
def group_specs(draw):
    kinds = [k for k in GroupKind if k is not GroupKind.UNCACHED]
    specs = []
    for group_idx in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(kinds))
        tokens_per_block = HASH_TOKENS * draw(st.sampled_from([1, 2, 3]))
        blocks_per_chunk = 1 if kind is GroupKind.STATE else draw(st.sampled_from([1, 2, 4]))
        window = 0
        if kind is GroupKind.SLIDING_WINDOW:
            window = draw(st.integers(0, 30))
        elif kind is GroupKind.CHUNKED_LOCAL:
            window = tokens_per_block * draw(st.integers(1, 6))
        specs.append(
            GroupSpec(
                group_idx=group_idx,
                kind=kind,
                tokens_per_block=tokens_per_block,
                blocks_per_chunk=blocks_per_chunk,
                chunk_bytes=1,
                window_tokens=window,
            )
        )
    return specs


def draft_groups_of(data, specs):
    """Some groups without states: those of a draft model."""
    return {
        s.group_idx for s in specs if s.kind is not GroupKind.STATE and data.draw(st.booleans())
    }


def needed_tokens(spec, length):
    """The positions whose KV (or whose state) the token at `length` depends on."""
    if spec.kind is GroupKind.FULL:
        return range(length)
    if spec.kind is GroupKind.SLIDING_WINDOW:
        return range(max(0, length - spec.window_tokens), length)
    if spec.kind is GroupKind.CHUNKED_LOCAL:
        return [t for t in range(length) if t // spec.window_tokens == length // spec.window_tokens]
    return [length - 1]


@settings(max_examples=400, deadline=None)
@given(data=st.data(), specs=group_specs())
def test_the_hit_is_the_longest_length_at_which_no_position_is_missing(data, specs):
    token_count = data.draw(st.integers(1, 160), label="token_count")
    hashes = spread_hashes(range(token_count // HASH_TOKENS))
    blocks = math.lcm(*(spec.tokens_per_block for spec in specs))
    local = blocks * data.draw(st.integers(0, token_count // blocks), label="local blocks")
    drafts = draft_groups_of(data, specs)
    asked = data.draw(ALIGNMENTS, label="alignment of the engine")
    configs = build_group_configs(specs, NAMESPACE, HASH_TOKENS, asked, drafts)
    stack = ReferenceStack()
    state_of = {}
    gap = data.draw(st.sampled_from([0, 1, 6]), label="gaps in ten")
    for config in configs:
        for chunk, key in enumerate(config.keys(hashes, 0, len(hashes))):
            draw = data.draw(st.integers(0, 9))
            absent, arriving = ChunkState.ABSENT, ChunkState.ARRIVING
            lost = absent if draw % 2 else arriving
            state = lost if draw < gap else ChunkState.RESIDENT - draw % 2
            stack.state_by_key[key] = ChunkState(state)
            state_of[config.spec.group_idx, chunk] = ChunkState(state)

    def holds(length, least):
        return all(
            (token < local and spec.kind is not GroupKind.STATE)
            or state_of.get((spec.group_idx, token // spec.tokens_per_chunk), 0) >= least
            for spec in specs
            for token in (
                # What a draft model keeps at length - 1 depends on the token at length.
                *needed_tokens(spec, length),
                *([length] if spec.group_idx in drafts else []),
            )
        )

    alignment = math.lcm(asked, *(spec.tokens_per_chunk for spec in specs))
    candidates = [n for n in range(local + 1, token_count) if n % alignment == 0]
    ready = max((n for n in candidates if holds(n, ChunkState.RECORDED)), default=0)
    hoped = max((n for n in candidates if holds(n, ChunkState.ARRIVING)), default=0)

    found = match_prefix(stack, configs, HitQuestion(hashes, local, token_count))

    assert (found.ready_tokens, max(found.hoped_tokens, ready)) == (ready, hoped)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), specs=group_specs(), end=st.integers(1, 200))
def test_a_chunk_is_useful_exactly_if_some_aligned_hit_needs_it(data, specs, end):
    drafts = draft_groups_of(data, specs)
    asked = data.draw(ALIGNMENTS, label="alignment of the engine")
    for config in build_group_configs(specs, NAMESPACE, HASH_TOKENS, asked, drafts):
        spec = config.spec
        if spec.kind is GroupKind.STATE:
            continue
        end_tokens = end * spec.tokens_per_chunk
        start = end_tokens - spec.tokens_per_chunk
        alignment = math.lcm(asked, *(spec.tokens_per_chunk for spec in specs))
        lengths = range(alignment, end_tokens + 40 * alignment, alignment)
        needed = any(
            start <= token < end_tokens
            for length in lengths
            if length - end_tokens <= 40 * alignment
            for token in (
                *needed_tokens(spec, length),
                *([length] if spec.group_idx in drafts else []),
            )
        )
        assert bool(config.can_serve_a_hit(np.array([end_tokens]))[0]) == needed


def test_a_miss_asks_for_few_chunks():
    spec = GroupSpec(
        group_idx=0, kind=GroupKind.FULL, tokens_per_block=2, blocks_per_chunk=1, chunk_bytes=1
    )
    stack = ReferenceStack()
    asked = []
    stack.states = lambda keys: asked.extend(keys) or [ChunkState.ABSENT] * len(keys)
    configs = build_group_configs([spec], NAMESPACE, 2)

    match_prefix(stack, configs, HitQuestion(spread_hashes(range(4096)), 0, 8192))

    assert len(asked) <= 64
