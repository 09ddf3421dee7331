"""KV cache events: tells vLLM's publisher what tierstore holds in host memory and on disk.

Routers use them to send a request where its prefix is. An event describes itself as those of vLLM's
own block pool do: hashes of engine blocks (a chunk of several blocks has as many), the tokens that
they cover, the hash before them, the adapter. The disk is the medium `STORAGE`; a chunk may be on
both media, and each loses it by an event of its own.

Of the disk, an engine publishes only what it recorded and evicted itself: to list the catalog at
start and at a reset would be O(records). Engines that share a path evict each other's records, and
each publishes its own evictions.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from tierstore.key import Namespace, OffloadKey, get_offload_block_hash, get_offload_group_idx
from tierstore.layout import GroupSpec
from tierstore.tier.movement_log import Movement, MovementLog
from tierstore_vllm.kv_events.content import ChunkContent, ContentReader
from tierstore_vllm.kv_events.engine_words import EventGroup, optional_name
from tierstore_vllm.kv_events.told_blocks import ToldBlocks

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["EventSource", "TokenSpan"]

_MEDIUM_DISK: str = optional_name("vllm.distributed.kv_events", "MEDIUM_STORAGE") or "STORAGE"
"""vLLM's own name for what lies behind host memory."""

_STORED_FIELDS = frozenset(BlockStored.__struct_fields__)
_REMOVED_FIELDS = frozenset(BlockRemoved.__struct_fields__)


class TokenSpan(NamedTuple):
    """Where among a request's tokens chunks may have begun to arrive."""

    request: "Request"
    first_token: int
    end_token: int


class EventSource:
    """Translates what the tiers note into vLLM's events. One thread."""

    def __init__(
        self,
        log: MovementLog,
        groups: Sequence[GroupSpec],
        namespace: Namespace,
        *,
        hash_tokens: int,
        own_hash: Callable[[bytes], bytes],
        event_groups: Sequence[EventGroup] = (),
    ) -> None:
        """Take the tiers' log.

        Args:
            log: What the stack writes to.
            groups: All KV cache groups, in order.
            namespace: The manifest's; records of others may be evicted, too.
            hash_tokens: Tokens per entry of `Request.block_hashes`.
            own_hash: Says which part of what names a chunk is vLLM's own.
            event_groups: What to say of each group.
        """
        self._log = log
        self._groups = groups
        self._namespace = namespace
        self._hash_tokens = hash_tokens
        self._own_hash = own_hash
        self._event_groups = event_groups or [EventGroup()] * len(groups)
        self._margin_tokens = 2 * max((group.tokens_per_chunk for group in groups), default=0)
        self._contents = ContentReader(groups, hash_tokens)
        self._events: list[KVCacheEvent] = []
        self._told = ToldBlocks()

    def describe(self, spans: Sequence[TokenSpan]) -> None:
        """Note what chunks hold that have begun to arrive since the last call.

        They belong to the requests of `spans`, and mostly lie there; a request that is computed
        again may have them anywhere before. Costs a lookup per block hash of the spans, if any
        chunk is arriving at all.
        """
        wanted: dict[bytes, list[OffloadKey]] = {}
        for key in self._log.take_undescribed():
            wanted.setdefault(self._key_hash(key), []).append(key)
        for span in spans:
            # A step offers chunks that an earlier one completed, if they were not hashed by then.
            self._find(wanted, span.request, span.first_token - self._margin_tokens, span.end_token)
        for span in spans:
            self._find(wanted, span.request, 0, span.end_token)

    def _find(
        self, wanted: dict[bytes, list[OffloadKey]], request: "Request", first: int, end: int
    ) -> None:
        if not wanted:
            return
        hashes = request.block_hashes
        first_hash = max(first // self._hash_tokens, 0)
        end_hash = min(-(-end // self._hash_tokens), len(hashes))
        for i in range(first_hash, end_hash):
            for key in wanted.pop(hashes[i], ()):
                self._log.describe(key, self._contents.read(request, get_offload_group_idx(key), i))

    def reset(self, namespace: Namespace) -> None:
        """Take note that the tiers were reset, and which namespace chunks have from now on.

        vLLM's own pool says that all blocks are cleared, and before any event from here. So
        what was recorded before the reset is not taken back, but must not be published any more.
        """
        is_forgotten = namespace != self._namespace
        for change in self._log.take():
            if change.tier_name is None or not is_forgotten:
                self._events += self._translate(change)
        if is_forgotten:
            self._told.forget_recorded()
        self._namespace = namespace

    def take(self) -> list[KVCacheEvent]:
        """Return the events since the last call."""
        for change in self._log.take():
            self._events += self._translate(change)
        events, self._events = self._events, []
        return events

    def _translate(self, change: Movement) -> Iterable[KVCacheEvent]:
        if change.is_there:
            return self._stored(change)
        by_group: dict[int, list[bytes]] = {}
        for key, hashes in self._went(change):
            by_group.setdefault(get_offload_group_idx(key), []).extend(hashes)
        return [
            BlockRemoved(
                block_hashes=_external(hashes),
                medium=_medium(change),
                group_idx=group_idx,
                **_owner(change, _REMOVED_FIELDS),
            )
            for group_idx, hashes in by_group.items()
        ]

    def _stored(self, change: Movement) -> list[KVCacheEvent]:
        runs: list[list[ChunkContent]] = []
        for key, content in zip(change.keys, change.descriptions, strict=True):
            if not isinstance(content, ChunkContent):
                continue  # without tokens a listener cannot use it
            if len(content.block_hashes) > 1:
                self._told.hold(change.tier_name, key, content.block_hashes)
            if runs and content.follows(runs[-1][-1]):
                runs[-1].append(content)
            else:
                runs.append([content])
        return [self._stored_run(change, run) for run in runs]

    def _stored_run(self, change: Movement, run: Sequence[ChunkContent]) -> BlockStored:
        head = run[0]
        token_ids: array[int] = array("i")
        for content in run:
            token_ids.extend(content.token_ids)
        kind, window_tokens = self._event_groups[head.group_idx]
        extra_keys = [keys for content in run for keys in content.extra_keys or ()]
        optional = {
            "extra_keys": extra_keys or None,
            "kv_cache_spec_kind": kind,
            "kv_cache_spec_sliding_window": window_tokens,
        }
        return BlockStored(
            block_hashes=_external(h for content in run for h in content.block_hashes),
            parent_block_hash=_external([head.parent_hash])[0] if head.parent_hash else None,
            token_ids=token_ids.tolist(),
            block_size=self._groups[head.group_idx].tokens_per_block,
            lora_id=head.lora_id,
            medium=_medium(change),
            lora_name=head.lora_name,
            group_idx=head.group_idx,
            **{name: value for name, value in optional.items() if name in _STORED_FIELDS},
            **_owner(change, _STORED_FIELDS),
        )

    def _went(self, change: Movement) -> Iterable[tuple[OffloadKey, Sequence[bytes]]]:
        """Yield the chunks that a listener may know, with the hashes of their blocks."""
        if change.tier_name is None:
            for key, content in zip(change.keys, change.descriptions, strict=True):
                if isinstance(content, ChunkContent):
                    yield key, self._told.release(None, key, content.block_hashes)
            return
        for key in change.keys:
            if key.startswith(self._namespace):
                hashes = self._told.take_recorded(change.tier_name, key)
                yield key, [self._key_hash(key)] if hashes is None else hashes

    def _key_hash(self, key: OffloadKey) -> bytes:
        return self._own_hash(get_offload_block_hash(key))


def _medium(change: Movement) -> str:
    return MEDIUM_CPU if change.tier_name is None else _MEDIUM_DISK


def _owner(change: Movement, fields: frozenset[str]) -> dict[str, str]:
    """Name the tier: with several, a chunk that one has lost may be in another."""
    if change.tier_name is None or "ownership" not in fields:
        return {}
    return {"ownership": change.tier_name}


def _external(hashes: Iterable[bytes]) -> list[bytes | int]:
    return [maybe_convert_block_hash(BlockHash(block_hash)) for block_hash in hashes]
