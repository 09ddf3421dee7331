"""A listener of KV cache events that takes nothing on trust, as a router's index would be built.

It hashes the tokens of every stored block itself, behind the hash of its parent, and refuses what
does not come to the hash that the event names.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import BlockHash, hash_block_tokens, maybe_convert_block_hash

__all__ = ["DISK", "MEMORY", "StrictListener"]

MEMORY, DISK = "CPU", "STORAGE"


class StrictListener:
    """Knows what an engine holds, per medium."""

    def __init__(self, hash_tokens: int, adapter_paths: Mapping[str, str] | None = None) -> None:
        self._hash_tokens = hash_tokens
        self.held: dict[str, set[tuple[int, Any]]] = {}
        """Per medium (and the disk's tier): group and hash of each block."""
        self.stored: list[BlockStored] = []
        self.unknown_removals = 0
        self._kinds: dict[int, tuple[str | None, int | None]] = {}
        self._raw: dict[Any, bytes | None] = {None: None}
        """The whole hash behind each that events name."""
        self._adapter_paths = adapter_paths or {}

    def learn(self, block_hashes: Iterable[bytes]) -> None:
        """Get to know blocks whose events went elsewhere."""
        for block_hash in block_hashes:
            self._raw[maybe_convert_block_hash(BlockHash(block_hash))] = block_hash

    def hashes(self) -> list[bytes]:
        """Return the whole hashes of all blocks that were ever named."""
        return [block_hash for block_hash in self._raw.values() if block_hash is not None]

    def blocks(self, medium: str) -> set[tuple[int, Any]]:
        """Return what a medium holds, all of its tiers together."""
        found = [held for place, held in self.held.items() if place.partition("/")[0] == medium]
        return set().union(*found)

    def restart(self) -> None:
        """Take note that the engine was started again: only its disk is still there."""
        self.held = {place: held for place, held in self.held.items() if place.startswith(DISK)}

    def take(self, event: Any) -> None:
        """Apply an event.

        Raises:
            AssertionError: it is incomplete, or says of tokens what is not so.
        """
        if isinstance(event, AllBlocksCleared):
            self.held.clear()
        elif isinstance(event, BlockStored):
            self._check(event)
            self.stored.append(event)
            self._place(event).update((event.group_idx, h) for h in event.block_hashes)
        else:
            assert isinstance(event, BlockRemoved), event
            assert event.block_hashes, event
            gone = {(event.group_idx, h) for h in event.block_hashes}
            self.unknown_removals += len(gone - self._place(event))
            self._place(event).difference_update(gone)

    def _place(self, event: BlockStored | BlockRemoved) -> set[tuple[int, Any]]:
        assert event.medium in ("GPU", MEMORY, DISK), event
        assert (event.medium == DISK) is (event.ownership is not None), event
        place = f"{event.medium}/{event.ownership}" if event.ownership else event.medium
        return self.held.setdefault(place, set())

    def _check(self, event: BlockStored) -> None:
        size = event.block_size
        assert event.block_hashes, event
        assert size > 0, event
        assert len(event.token_ids) == size * len(event.block_hashes), event
        kind = (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
        assert self._kinds.setdefault(event.group_idx, kind) == kind, event
        parent = self._raw[event.parent_block_hash]
        for i, named in enumerate(event.block_hashes):
            extra = event.extra_keys[i] if event.extra_keys else None
            for start in range(i * size, (i + 1) * size, self._hash_tokens):
                tokens = event.token_ids[start : start + self._hash_tokens]
                keys = self._tagged(event, extra, with_salt=start == i * size)
                parent = hash_block_tokens(sha256, parent, tokens, keys)
            assert maybe_convert_block_hash(parent) == named, event
            self._raw[named] = parent

    def _tagged(
        self, event: BlockStored, extra: Any, *, with_salt: bool
    ) -> tuple[tuple[str, ...], ...] | None:
        """Undo what vLLM does to the extra keys of a block before it publishes them."""
        if extra is None:
            return None
        tagged: list[tuple[str, ...]] = []
        rest = list(extra)
        if event.lora_name is not None:
            assert rest.pop(0) == event.lora_name, event
            tagged.append(("lora", event.lora_name, self._adapter_paths[event.lora_name]))
        if with_salt:
            tagged += [("cache_salt", salt) for salt in rest]
        return tuple(tagged) or None
