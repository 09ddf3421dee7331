"""Identifies the chunks of requests with a LoRA adapter by the weights that compute them.

vLLM's block hashes cover only an adapter's name and path. A digest of the adapter's weights in the
memory of all ranks, as they report it (`lora.watch`), is therefore appended to each hash:

    OffloadKey = namespace + group index + block hash + digest

A namespace per adapter would work, too, but every reset, epoch and catalog would have to know it.

If an adapter's weights change under its name and path, it is not cached until the cache is reset.
Caching it under the new digest at once would store old blocks as new ones: vLLM's own cache still
gives them to new requests, and they cannot be distinguished.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, overload

import xxhash

from tierstore.bounded_log import bounded
from tierstore_vllm.messages import Adapter, AdapterClaim, AdapterUse

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

__all__ = ["ASK_COUNT_MAX", "AdaptedHashes", "AdapterRequests"]

_logger = bounded(logging.getLogger(__name__))

ASK_COUNT_MAX = 2
"""How often a request is asked to wait for a step while not all ranks have reported its adapter.

An adapter that was loaded beforehand is reported in the next step, even if that step is empty; with
asynchronous scheduling, the report arrives one step later. Any other adapter is loaded when its
first request is computed.
"""

_DIGEST_BYTES = 16
_DIGEST_COUNT_MAX = 8192
"""Digests that are recognised after a block hash; events of older ones include the digest."""


class AdaptedHashes(Sequence[bytes]):
    """A live view of a request's block hashes, each followed by the digest of its adapter."""

    def __init__(self, hashes: Sequence[bytes], digest: bytes) -> None:
        self._hashes = hashes
        self._digest = digest

    def __len__(self) -> int:
        return len(self._hashes)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        digest = self._digest
        if isinstance(index, slice):
            return [block_hash + digest for block_hash in self._hashes[index]]
        return self._hashes[index] + digest


@dataclass(slots=True)
class _Weights:
    """The weights of one adapter's name and path."""

    digests: dict[int, bytes] = field(default_factory=dict)
    """The last digest that each rank has reported."""
    is_in_doubt: bool = False
    """The weights have changed since the cache was empty, or a rank cannot digest them."""


class AdapterRequests:
    """Decides which requests of adapters may be cached, and under which digest."""

    def __init__(self, rank_count: int) -> None:
        self._rank_count = rank_count
        self._weights: dict[Adapter, _Weights] = {}
        self._ask_counts: dict[str, int] = {}
        """Requests whose adapter not all ranks have reported yet."""
        self._digests: dict[bytes, None] = {}
        """In the order in which they were first used."""
        self._asks_ranks = False

    def hashes(self, request: "Request") -> Sequence[bytes] | None:
        """Return the hashes of a request's chunks; None: it must not be cached, or not yet."""
        if request.lora_request is None:
            block_hashes: Sequence[bytes] = request.block_hashes
            return block_hashes
        if getattr(request.lora_request, "load_inplace", True):
            return None  # its weights are read again when it is computed, or this is not known
        weights = self._weights.get(Adapter.of(request.lora_request), _Weights())
        if weights.is_in_doubt:
            return None
        if len(weights.digests) < self._rank_count:
            self._ask_counts.setdefault(request.request_id, 0)
            return None
        # With expert parallelism, every rank loads different parts.
        every_rank = b"".join(weights.digests[rank] for rank in sorted(weights.digests))
        digest = xxhash.xxh3_128_digest(every_rank)
        self._digests[digest] = None
        if len(self._digests) > _DIGEST_COUNT_MAX:
            del self._digests[next(iter(self._digests))]
        self._ask_counts.pop(request.request_id, None)
        return AdaptedHashes(request.block_hashes, digest)

    def shall_ask_again(self, request_id: str) -> bool:
        """Return whether the next step may bring the digests for a waiting request."""
        count = self._ask_counts.get(request_id, ASK_COUNT_MAX)
        if count < ASK_COUNT_MAX:
            self._ask_counts[request_id] = count + 1
        return count < ASK_COUNT_MAX

    def learn(self, uses: Iterable[AdapterUse]) -> set[Adapter]:
        """Take the ranks' reports; return the adapters whose weights are in doubt from now on."""
        doubtful: set[Adapter] = set()
        for use in uses:
            weights = self._weights.setdefault(use.adapter, _Weights())
            is_known = use.digest and weights.digests.get(use.rank, use.digest) == use.digest
            weights.digests[use.rank] = use.digest
            if is_known or weights.is_in_doubt:
                continue
            weights.is_in_doubt = True
            doubtful.add(use.adapter)
            _logger.warning(
                "requests of a LoRA adapter are not cached until the cache is reset, since its "
                "weights %s: name=%s path=%s",
                "changed under the same name and path" if use.digest else "are not known",
                use.adapter.name,
                use.adapter.path,
            )
        return doubtful

    def waiting(self) -> list[str]:
        """Return the requests whose adapter was not known when their hashes were last asked for."""
        return list(self._ask_counts)

    def forget_request(self, request_id: str) -> None:
        """Stop waiting for a request's adapter."""
        self._ask_counts.pop(request_id, None)

    def reset(self) -> None:
        """Forget all adapters, also those that changed: vLLM's own cache is empty.

        The ranks are asked to report again, since an adapter may have been reloaded just before.
        """
        self._ask_counts.clear()
        self._weights.clear()
        self._asks_ranks = True

    def take_question(self) -> bool:
        """Return whether to ask the ranks to report all adapters: once after each reset."""
        asks, self._asks_ranks = self._asks_ranks, False
        return asks

    def claim(self, lora_request: "LoRARequest") -> AdapterClaim:
        """Return the weights that computed the chunks of a request that may be cached."""
        adapter = Adapter.of(lora_request)
        weights = self._weights.get(adapter, _Weights())  # empty after a reset: ranks refuse it
        return AdapterClaim(adapter, lora_request.lora_int_id, dict(weights.digests))

    def block_hash(self, chunk_hash: bytes) -> bytes:
        """Return vLLM's own hash, without the digest."""
        digest = chunk_hash[-_DIGEST_BYTES:]
        return chunk_hash.removesuffix(digest) if digest in self._digests else chunk_hash
