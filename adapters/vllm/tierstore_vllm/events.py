"""KV cache events: tells vLLM's publisher what tierstore holds in host memory.

Routers use them to send a request where its prefix is. Tiers on disk publish nothing: engines that
share a path evict each other's chunks, so no engine knows what is there at any moment.
"""

from collections.abc import Callable, Sequence

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from tierstore.key import OffloadKey, get_offload_block_hash, get_offload_group_idx
from tierstore.layout import GroupSpec
from tierstore.tier.residency import ResidencyChange, ResidencyLog

__all__ = ["EventSource"]


class EventSource:
    """Translates changes of the primary tier."""

    def __init__(
        self,
        log: ResidencyLog,
        groups: Sequence[GroupSpec],
        block_hash: Callable[[bytes], bytes],
    ) -> None:
        """`block_hash` says which part of what names a chunk is vLLM's own."""
        self._log = log
        self._groups = groups
        self._block_hash = block_hash

    def take(self) -> list[KVCacheEvent]:
        """Return the events since the last call.

        One event per group and change. A chunk is named by vLLM's hash of its last block, and its
        `block_size` is the chunk's tokens. Tokens, the adapter and the parent's hash, which a
        listener knows from the event of the GPU's own block of that hash, are left empty.
        """
        return [event for change in self._log.take() for event in self._translate(change)]

    def _translate(self, change: ResidencyChange) -> list[KVCacheEvent]:
        by_group: dict[int, list[OffloadKey]] = {}
        for key in change.keys:
            by_group.setdefault(get_offload_group_idx(key), []).append(key)
        return [
            self._stored(group_idx, keys) if change.is_resident else self._removed(group_idx, keys)
            for group_idx, keys in by_group.items()
        ]

    def _stored(self, group_idx: int, keys: Sequence[OffloadKey]) -> BlockStored:
        return BlockStored(
            block_hashes=self._hashes(keys),
            parent_block_hash=None,
            token_ids=[],
            block_size=self._groups[group_idx].tokens_per_chunk,
            lora_id=None,
            medium=MEDIUM_CPU,
            lora_name=None,
            group_idx=group_idx,
        )

    def _removed(self, group_idx: int, keys: Sequence[OffloadKey]) -> BlockRemoved:
        return BlockRemoved(block_hashes=self._hashes(keys), medium=MEDIUM_CPU, group_idx=group_idx)

    def _hashes(self, keys: Sequence[OffloadKey]) -> list[bytes | int]:
        own = map(self._block_hash, map(get_offload_block_hash, keys))
        return [maybe_convert_block_hash(BlockHash(block_hash)) for block_hash in own]
