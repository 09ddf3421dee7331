"""What a request was last asked about, and the load that may follow from the answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tierstore.layout import GroupSpec
from tierstore.planner import LoadTarget

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks

__all__ = ["Question"]


@dataclass(slots=True)
class Question:
    """How much can be loaded beyond the tokens that vLLM holds?"""

    local_tokens: int
    disk_tokens: int = 0
    """Of the load: how many of its tokens come from disk."""

    def target(
        self, groups: Sequence[GroupSpec], blocks: "KVCacheBlocks", external_tokens: int
    ) -> LoadTarget:
        """Return which of the blocks that vLLM allocated a load of so many tokens fills."""
        hit_tokens = self.local_tokens + external_tokens
        fresh: dict[int, list[int]] = {}
        for spec in groups:
            first = self.local_tokens // spec.tokens_per_block
            end = -(-hit_tokens // spec.tokens_per_block)
            # A block with a hash is shared with others and holds its bytes already.
            fresh[spec.group_idx] = [
                0 if block.block_hash is not None else block.block_id
                for block in blocks.blocks[spec.group_idx][first:end]
            ]
        return LoadTarget(self.local_tokens, hit_tokens, fresh)

    def sources(self, external_tokens: int) -> dict[CacheHitSource, int]:
        """Split the tokens of the load by where they come from."""
        disk_tokens = min(self.disk_tokens, external_tokens)
        sources = {
            CacheHitSource.HOST: external_tokens - disk_tokens,
            CacheHitSource.DISK: disk_tokens,
        }
        return {source: count for source, count in sources.items() if count}
