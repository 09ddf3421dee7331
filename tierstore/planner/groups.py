"""What a hit needs of each KV cache group, as one formula over chunks.

A hit of L tokens restores, per group, the chunks of [restored_from(L), L):

    FULL            0 .................................. L     every chunk
    SLIDING_WINDOW                     L - window ...... L     the window of the next token
    CHUNKED_LOCAL             multiple of the length ... L     the attention chunk L lies in
    STATE                                    L - chunk . L     the one state at L
    UNCACHED        no hit, whatever L

Lengths are multiples of `alignment_tokens`, hence of every group's chunk.

What a draft model (EAGLE, MTP) keeps at a position depends on the next token as well, which the
chunk's hash does not cover. So the last chunk is volatile until the token behind it is settled, and
a hit of L tokens needs the chunk [L, L + chunk) to exist too: its hash vouches for the token at L.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierstore.key import Namespace, OffloadKey, make_offload_keys
from tierstore.layout import GroupKind, GroupSpec
from tierstore.transfer import IntArray

__all__ = ["GroupOffloadConfig", "build_group_configs"]

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOffloadConfig:
    """One group as the planner computes with it."""

    spec: GroupSpec
    namespace: Namespace
    hashes_per_chunk: int
    """The key of a chunk is the hash of the last of these: hashes are chained."""
    alignment_tokens: int
    """Every hit is a multiple of it: the least common multiple of all groups' chunks and of what
    the engine asks for."""
    tokens_per_chunk: int
    """Tokens whose KV one chunk holds. Kept, since each request asks with each chunk."""
    is_draft: bool = False
    """The group holds layers of a draft model (module docstring)."""

    def keys(
        self, block_hashes: Sequence[bytes], first_chunk: int, end_chunk: int
    ) -> list[OffloadKey]:
        """Build the keys of chunks [first_chunk, end_chunk), as far as they are hashed yet.

        Keys are not kept: an engine may cut a request's hash list and continue it differently.
        """
        return self.keys_of(self.hashes(block_hashes, first_chunk, end_chunk))

    def hashes(
        self, block_hashes: Sequence[bytes], first_chunk: int, end_chunk: int
    ) -> Sequence[bytes]:
        """Return what names the chunks [first_chunk, end_chunk), as far as they are hashed yet."""
        step = self.hashes_per_chunk
        return block_hashes[(first_chunk + 1) * step - 1 : end_chunk * step : step]

    def keys_of(self, hashes: Sequence[bytes]) -> list[OffloadKey]:
        """Build the keys of chunks from what `hashes` returned, of any number of requests."""
        return make_offload_keys(self.namespace, self.spec.group_idx, hashes)

    def restored_from(self, lengths: IntArray) -> IntArray:
        """Return the first token that each hit length needs of this group (module docstring)."""
        spec = self.spec
        if spec.kind is GroupKind.SLIDING_WINDOW:
            return np.maximum(lengths - spec.window_tokens, 0)
        if spec.kind is GroupKind.CHUNKED_LOCAL:
            return lengths // spec.window_tokens * spec.window_tokens
        if spec.kind is GroupKind.STATE:
            return lengths - spec.tokens_per_chunk
        return np.zeros_like(lengths)

    def satisfied(self, lengths: IntArray, is_there: BoolArray, base_chunk: int) -> BoolArray:
        """Return for each hit length whether it finds all it needs of this group.

        `is_there[i]` is about chunk `base_chunk + i`; everything before that is local already.
        """
        missing = np.zeros(len(is_there) + 1, np.int64)
        np.cumsum(~is_there, out=missing[1:])
        end = lengths // self.tokens_per_chunk + self.is_draft - base_chunk
        first = np.maximum(self.restored_from(lengths) // self.tokens_per_chunk - base_chunk, 0)
        held: BoolArray = missing[np.maximum(end, first)] == missing[first]
        return held

    def can_serve_a_hit(self, end_tokens: IntArray) -> BoolArray:
        """Return for each chunk, given by its end, whether some aligned hit would need it.

        The nearest aligned length at or after the end decides: later ones need less of the past.
        """
        lengths = -(-end_tokens // self.alignment_tokens) * self.alignment_tokens
        useful: BoolArray = self.restored_from(lengths) < end_tokens
        if self.is_draft:
            starts = end_tokens - self.tokens_per_chunk
            useful |= (starts > 0) & (starts % self.alignment_tokens == 0)
        return useful

    def alive_from(self, computed_tokens: int) -> int:
        """Return the first token whose block the engine surely still holds.

        The engine drops blocks behind the window at each allocation. A copy of its block table
        does not show that, so one block of margin is kept: an offload never reads a block that
        may have another owner by now.
        """
        spec = self.spec
        if spec.kind is GroupKind.SLIDING_WINDOW:
            return max(computed_tokens - spec.window_tokens + 1, 0)
        if spec.kind is GroupKind.CHUNKED_LOCAL:
            return computed_tokens // spec.window_tokens * spec.window_tokens
        return 0


def build_group_configs(
    specs: Sequence[GroupSpec],
    namespace: Namespace,
    hash_tokens: int,
    alignment_tokens: int = 1,
    draft_groups: Collection[int] = (),
) -> tuple[GroupOffloadConfig, ...]:
    """Derive the planner's view of all groups.

    Raises:
        ValueError: a group's chunk is no multiple of `hash_tokens`, or lacks its window length.
    """
    alignment = math.lcm(alignment_tokens, *(spec.tokens_per_chunk for spec in specs))
    for spec in specs:
        if spec.tokens_per_chunk % hash_tokens:
            raise ValueError(
                f"group {spec.group_idx}: {spec.tokens_per_chunk} tokens per chunk are no "
                f"multiple of the {hash_tokens} tokens per block hash"
            )
        if spec.kind is GroupKind.CHUNKED_LOCAL and spec.window_tokens <= 0:
            raise ValueError(f"group {spec.group_idx}: chunked local attention without a length")
    return tuple(
        GroupOffloadConfig(
            spec=spec,
            namespace=namespace,
            hashes_per_chunk=spec.tokens_per_chunk // hash_tokens,
            alignment_tokens=alignment,
            tokens_per_chunk=spec.tokens_per_chunk,
            is_draft=spec.group_idx in draft_groups,
        )
        for spec in specs
    )
