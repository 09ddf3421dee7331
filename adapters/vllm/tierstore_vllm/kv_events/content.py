"""What the event of a chunk says, read from the request that the chunk was computed for."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tierstore.layout import GroupSpec
from tierstore_vllm.kv_events.engine_words import optional_name

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["ChunkContent", "ContentReader"]


@dataclass(frozen=True, slots=True)
class ChunkContent:
    """One chunk; the hashes are the very objects of vLLM's lists."""

    group_idx: int
    block_hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    token_ids: "array[int]"
    lora_id: int | None
    lora_name: str | None
    extra_keys: tuple[Any, ...] | None

    def follows(self, other: "ChunkContent") -> bool:
        """Return whether one event can name this chunk behind the other."""
        return (
            self.parent_hash == other.block_hashes[-1]
            and self.group_idx == other.group_idx
            and self.lora_id == other.lora_id
        )


class ContentReader:
    """Describes chunks by the tokens and hashes of requests."""

    def __init__(self, groups: Sequence[GroupSpec], hash_tokens: int) -> None:
        """Take all KV cache groups, and the tokens per entry of `Request.block_hashes`."""
        self._groups = groups
        self._hash_tokens = hash_tokens
        self._generate_extra_keys = optional_name(
            "vllm.v1.core.kv_cache_utils", "generate_block_hash_extra_keys"
        )
        self._to_event_extra_keys = optional_name(
            "vllm.v1.core.kv_cache_utils", "to_event_extra_keys"
        )

    def read(self, request: "Request", group_idx: int, hash_idx: int) -> ChunkContent:
        """Describe the chunk that ends with a block hash.

        hash index     first - 1 |   first   ...   hash_idx |
        blocks           parent  | block 0   ...   block n-1|    of hashes_per_block hashes each
        """
        group = self._groups[group_idx]
        hashes = request.block_hashes
        per_block = group.tokens_per_block // self._hash_tokens
        first = hash_idx + 1 - per_block * group.blocks_per_chunk
        end_token = (hash_idx + 1) * self._hash_tokens
        start_token = end_token - group.tokens_per_chunk
        lora = request.lora_request
        return ChunkContent(
            group_idx=group_idx,
            block_hashes=tuple(hashes[first + per_block - 1 : hash_idx + 1 : per_block]),
            parent_hash=hashes[first - 1] if first else None,
            token_ids=array("i", request.all_token_ids[start_token:end_token]),
            lora_id=lora.lora_int_id if lora else None,
            lora_name=lora.lora_name if lora else None,
            extra_keys=self._extra_keys(
                request, range(start_token, end_token, group.tokens_per_block)
            ),
        )

    def _extra_keys(self, request: "Request", starts: range) -> tuple[Any, ...] | None:
        if self._generate_extra_keys is None or self._to_event_extra_keys is None:
            return None
        generate = self._generate_extra_keys
        keys = [generate(request, start, start + starts.step, 0)[0] for start in starts]
        found = self._to_event_extra_keys(keys)
        return None if found is None else tuple(found)
