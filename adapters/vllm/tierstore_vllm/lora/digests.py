"""Names the chunks of requests with a LoRA adapter by the weights that compute them.

vLLM's block hashes cover an adapter's name and path. So behind each hash stands a digest of what
every rank has in memory for the adapter, as the ranks tell it (`lora_watch`):

    OffloadKey = namespace + group index + block hash + digest

A namespace per adapter would do as well, but every reset, epoch and catalog would have to know it.

An adapter whose weights change under its name and path is not cached any more until the cache is
reset. Under the new digest at once, old blocks would be stored as new: vLLM's own cache still gives
them to new requests, and they cannot be told apart.
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
"""Times a request is told to ask again while the ranks have not said what its adapter is.

An adapter that was loaded beforehand is told of in the next step, be it an empty one, and with
asynchronous scheduling the step's report comes a step later. One that was not is loaded when its
first request is computed.
"""

_DIGEST_BYTES = 16
_DIGEST_COUNT_MAX = 8192
"""Digests that are recognised behind a block hash; events of older ones carry the digest too."""


class AdaptedHashes(Sequence[bytes]):
    """A live view of a request's block hashes, each with the digest of its adapter behind it."""

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
    """What stands behind one adapter's name and path."""

    digests: dict[int, bytes] = field(default_factory=dict)
    """By rank, the last that it told."""
    is_in_doubt: bool = False
    """They have changed since the cache was empty, or a rank cannot tell what they are."""


class AdapterRequests:
    """Knows which requests of adapters may be cached, and under which digest."""

    def __init__(self, rank_count: int) -> None:
        self._rank_count = rank_count
        self._weights: dict[Adapter, _Weights] = {}
        self._ask_counts: dict[str, int] = {}
        """Requests whose adapter no rank, or not every rank, has told of."""
        self._digests: dict[bytes, None] = {}
        """In the order in which they were first used."""
        self._asks_ranks = False

    def hashes(self, request: "Request") -> Sequence[bytes] | None:
        """Return what names a request's chunks; None: it must not be cached, perhaps only yet."""
        if request.lora_request is None:
            block_hashes: Sequence[bytes] = request.block_hashes
            return block_hashes
        if getattr(request.lora_request, "load_inplace", True):
            return None  # its weights are read again when it is computed, or vLLM does not tell
        weights = self._weights.get(Adapter.of(request.lora_request), _Weights())
        if weights.is_in_doubt:
            return None
        if len(weights.digests) < self._rank_count:
            self._ask_counts.setdefault(request.request_id, 0)
            return None
        # With expert parallelism every rank loads other parts.
        every_rank = b"".join(weights.digests[rank] for rank in sorted(weights.digests))
        digest = xxhash.xxh3_128_digest(every_rank)
        self._digests[digest] = None
        if len(self._digests) > _DIGEST_COUNT_MAX:
            del self._digests[next(iter(self._digests))]
        self._ask_counts.pop(request.request_id, None)
        return AdaptedHashes(request.block_hashes, digest)

    def shall_ask_again(self, request_id: str) -> bool:
        """Return whether the next step may tell what a waiting request's adapter is."""
        count = self._ask_counts.get(request_id, ASK_COUNT_MAX)
        if count < ASK_COUNT_MAX:
            self._ask_counts[request_id] = count + 1
        return count < ASK_COUNT_MAX

    def learn(self, uses: Iterable[AdapterUse]) -> set[Adapter]:
        """Take what ranks tell; return the adapters whose weights are in doubt from now on."""
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
        """Return the requests whose adapter was not known when they were last looked at."""
        return list(self._ask_counts)

    def forget_request(self, request_id: str) -> None:
        """Wait for a request's adapter no more."""
        self._ask_counts.pop(request_id, None)

    def reset(self) -> None:
        """Forget all adapters, those that changed too: vLLM's own cache is empty.

        What they are now the ranks are asked for, since one may have been reloaded a moment ago.
        """
        self._ask_counts.clear()
        self._weights.clear()
        self._asks_ranks = True

    def take_question(self) -> bool:
        """Return whether the ranks shall report all adapters: once after each reset."""
        asks, self._asks_ranks = self._asks_ranks, False
        return asks

    def claim(self, lora_request: "LoRARequest") -> AdapterClaim:
        """Return which weights computed the chunks of a request that may be cached."""
        adapter = Adapter.of(lora_request)
        weights = self._weights.get(adapter, _Weights())  # after a reset no rank grants it
        return AdapterClaim(adapter, lora_request.lora_int_id, dict(weights.digests))

    def block_hash(self, chunk_hash: bytes) -> bytes:
        """Return vLLM's own part of what names a chunk."""
        digest = chunk_hash[-_DIGEST_BYTES:]
        return chunk_hash.removesuffix(digest) if digest in self._digests else chunk_hash
