"""Blocks into which another connector of the same engine loads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierstore.layout import GroupSpec
from tierstore.planner import EngineStep, FullTable

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks

__all__ = ["ForeignLoads"]


@dataclass(frozen=True, slots=True)
class _SetAside:
    """What vLLM allocated for a request that loads nothing from here."""

    blocks: "KVCacheBlocks"
    held_tokens: int | None
    """What vLLM itself had of the request; None: it did not look, its tokens are computed."""


class ForeignLoads:
    """Concludes from what vLLM allocates what others load: no hook tells of it."""

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        self._groups = groups
        self._held_tokens: dict[str, int] = {}
        """Of requests that vLLM has asked about since it last allocated for them: what it holds."""
        self._set_aside: dict[str, _SetAside] = {}
        """Requests that load nothing from here and got blocks since the last step."""

    def note_asked(self, request_id: str, held_tokens: int) -> None:
        """Note that vLLM asks what can be loaded beyond the tokens that it holds."""
        self._held_tokens[request_id] = held_tokens

    def note_allocated(self, request_id: str, blocks: "KVCacheBlocks") -> None:
        """Note blocks that were just allocated, and are not for a load from here."""
        self._set_aside[request_id] = _SetAside(blocks, self._held_tokens.pop(request_id, None))

    def forget_question(self, request_id: str) -> None:
        """Forget what was asked about a request that has ended, or that loads from here."""
        self._held_tokens.pop(request_id, None)

    def take(self, step: EngineStep) -> Iterator[list[int]]:
        """Yield the blocks into which others load from this step on, by request.

        While their request waits, these are all that were set aside; for one that the step
        computes, those of the tokens that count as computed beyond what vLLM held.
        """
        for table in step.full_tables:
            aside = self._set_aside.pop(table.request_id, None)
            if aside is not None and aside.held_tokens is not None:
                loaded = self._loaded_into(table, aside.held_tokens)
                if loaded:
                    yield loaded
        for aside in self._set_aside.values():
            yield [
                block.block_id
                for group in aside.blocks.blocks
                for block in group
                # A block with a hash is shared with others and holds its bytes already.
                if block.block_hash is None
            ]
        self._set_aside.clear()

    def _loaded_into(self, table: FullTable, held_tokens: int) -> list[int]:
        """Return what is loaded for the very step; vLLM has given these blocks their hashes."""
        loaded: list[int] = []
        if held_tokens < table.computed_tokens:
            for spec in self._groups:
                first = held_tokens // spec.tokens_per_block
                end = -(-table.computed_tokens // spec.tokens_per_block)
                loaded += table.block_ids[spec.group_idx][first:end]
        return loaded
