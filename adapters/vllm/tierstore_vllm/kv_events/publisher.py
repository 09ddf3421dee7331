"""KV cache events: tells vLLM's publisher what tierstore holds in host memory and on disk.

Routers use them to send a request where its prefix is. An event describes itself as those of vLLM's
own block pool do: hashes of engine blocks (a chunk of several blocks has as many), the tokens that
they cover, the hash before them, the adapter. The disk is the medium `STORAGE`; a chunk may be on
both media, and each loses it by an event of its own.

Of the disk an engine tells only what it did itself: what it recorded, and what it evicted. Engines
that share a path evict each other's records, and say so for themselves alone.
"""

import importlib
import logging
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from tierstore.bounded_log import bounded
from tierstore.config import StoreConfig
from tierstore.key import Namespace, OffloadKey, get_offload_block_hash, get_offload_group_idx
from tierstore.layout import GroupSpec
from tierstore.tier.movements import Movement, MovementLog

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

__all__ = ["EventGroup", "EventSource", "TokenSpan", "describe_event_groups"]

_logger = bounded(logging.getLogger(__name__))


def _optional(module: str, name: str) -> Any:
    """Return a name of vLLM that not every version has."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


_MEDIUM_DISK: str = _optional("vllm.distributed.kv_events", "MEDIUM_STORAGE") or "STORAGE"
"""vLLM's own name for what lies behind host memory."""

_STORED_FIELDS = frozenset(BlockStored.__struct_fields__)
_REMOVED_FIELDS = frozenset(BlockRemoved.__struct_fields__)

_NAMED_CHUNKS_MAX = 1 << 16
"""Recorded chunks of several blocks whose hashes are kept for the day when they are evicted.

Of older ones only the last block's is known, which is in their key: the event names that one.
"""


class EventGroup(NamedTuple):
    """What events say of a KV cache group, in vLLM's words."""

    kind: str | None = None
    window_tokens: int | None = None


class _Place(NamedTuple):
    """A block somewhere; `tier_name` as in `Movement`."""

    tier_name: str | None
    group_idx: int
    block_hash: bytes


class TokenSpan(NamedTuple):
    """Where among a request's tokens chunks may have begun to arrive."""

    request: "Request"
    first_token: int
    end_token: int


@dataclass(frozen=True, slots=True)
class _Content:
    """What the event of a chunk says; the hashes are the very objects of vLLM's lists."""

    group_idx: int
    block_hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    token_ids: "array[int]"
    lora_id: int | None
    lora_name: str | None
    extra_keys: tuple[Any, ...] | None

    def follows(self, other: "_Content") -> bool:
        """Return whether one event can name this chunk behind the other."""
        return (
            self.parent_hash == other.block_hashes[-1]
            and self.group_idx == other.group_idx
            and self.lora_id == other.lora_id
        )


def describe_event_groups(
    config: StoreConfig, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig"
) -> tuple[EventGroup, ...] | None:
    """Return what events say of each KV cache group; None: no events are wanted."""
    if not config.offload.events:
        return None
    publisher = vllm_config.kv_events_config
    if publisher is None or not publisher.enable_kv_cache_events:
        _logger.warning(
            "offload.events is true, but vLLM publishes no events: give it --kv-events-config with "
            "enable_kv_cache_events"
        )
        return None
    kind = _optional("vllm.v1.kv_cache_interface", "get_kv_cache_spec_kind")
    window = _optional("vllm.v1.kv_cache_interface", "get_kv_cache_spec_sliding_window")
    return tuple(
        EventGroup(kind(group.kv_cache_spec).value, window(group.kv_cache_spec))
        if kind and window
        else EventGroup()
        for group in kv_cache_config.kv_cache_groups
    )


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
        self._generate_extra_keys = _optional(
            "vllm.v1.core.kv_cache_utils", "generate_block_hash_extra_keys"
        )
        self._to_event_extra_keys = _optional("vllm.v1.core.kv_cache_utils", "to_event_extra_keys")
        self._events: list[KVCacheEvent] = []
        self._named: OrderedDict[OffloadKey, tuple[bytes, ...]] = OrderedDict()
        self._shared: Counter[_Place] = Counter()
        """Chunks that hold a block, but for the last block of each, which no other chunk has."""

    def describe(self, spans: Sequence[TokenSpan]) -> None:
        """Note what chunks hold that have begun to arrive since the last call.

        They belong to the requests of `spans`, and mostly lie there; a request that is computed
        anew may have them anywhere before. Costs a lookup per block hash of the spans, if any
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
                self._log.describe(key, self._content(request, get_offload_group_idx(key), i))

    def _content(self, request: "Request", group_idx: int, hash_idx: int) -> _Content:
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
        return _Content(
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

    def reset(self, namespace: Namespace) -> None:
        """Take note that the tiers were reset, and which namespace chunks have from now on.

        vLLM's own pool says that all blocks are cleared, and before anything that is said here. So
        what was recorded before the reset need not be taken back, but must not be said any more.
        """
        is_forgotten = namespace != self._namespace
        for change in self._log.take():
            if change.tier_name is None or not is_forgotten:
                self._events += self._translate(change)
        if is_forgotten:
            self._named.clear()
            for place in [place for place in self._shared if place.tier_name is not None]:
                del self._shared[place]
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
        runs: list[list[_Content]] = []
        for key, content in zip(change.keys, change.descriptions, strict=True):
            if not isinstance(content, _Content):
                continue  # without tokens it would be of no use to a listener
            if len(content.block_hashes) > 1:
                self._hold(change.tier_name, key, content.block_hashes)
            if runs and content.follows(runs[-1][-1]):
                runs[-1].append(content)
            else:
                runs.append([content])
        return [self._stored_run(change, run) for run in runs]

    def _hold(self, tier_name: str | None, key: OffloadKey, hashes: tuple[bytes, ...]) -> None:
        """Take note of the blocks of a chunk that came."""
        if tier_name is not None:
            if key in self._named:
                return
            self._named[key] = hashes
            if len(self._named) > _NAMED_CHUNKS_MAX:
                self._release(tier_name, *self._named.popitem(last=False))
        group_idx = get_offload_group_idx(key)
        self._shared.update(_Place(tier_name, group_idx, shared) for shared in hashes[:-1])

    def _release(
        self, tier_name: str | None, key: OffloadKey, hashes: Sequence[bytes]
    ) -> Sequence[bytes]:
        """Return the blocks that are gone now that a chunk of them is."""
        group_idx = get_offload_group_idx(key)
        gone = []
        for shared in hashes[:-1]:
            place = _Place(tier_name, group_idx, shared)
            self._shared[place] -= 1
            if self._shared[place] <= 0:
                del self._shared[place]
                gone.append(shared)
        return [*gone, hashes[-1]]

    def _stored_run(self, change: Movement, run: Sequence[_Content]) -> BlockStored:
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
                if isinstance(content, _Content):
                    yield key, self._release(None, key, content.block_hashes)
            return
        for key in change.keys:
            if key.startswith(self._namespace):
                hashes = self._named.pop(key, None)
                yield (
                    key,
                    [self._key_hash(key)]
                    if hashes is None
                    else self._release(change.tier_name, key, hashes),
                )

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
