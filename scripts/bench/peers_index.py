"""The indices of `bench_peers.py`, each behind the same few calls.

An index answers an engine's scheduler for a cache in memory. It moves no bytes.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from tierstore import Manifest
from tierstore.config import load_config
from tierstore.key import OffloadKey, make_offload_keys
from tierstore.layout import PAGE_BYTES
from tierstore.metrics import Counters
from tierstore.tier.opening import open_stack
from tierstore.transfer import JobId, TransferDone

__all__ = ["Index", "TierstoreIndex", "VllmIndex"]


class Index(Protocol):
    """A party that knows which chunks are in memory."""

    name: str

    def keys(self, block_hashes: Sequence[bytes]) -> Any:
        """Return the keys of chunks, in its own form."""

    def store(self, keys: Any) -> None:
        """Reserve and commit chunks, evicting as many."""

    def find(self, keys: Any) -> int:
        """Return how many of the chunks are there."""

    def use(self, keys: Any) -> None:
        """Pin chunks, release and touch them."""

    def use_as_scheduled(self, keys: Any) -> None:
        """Do the same by the calls that the engine's scheduler makes."""


class VllmIndex:
    """vLLM's `CPUOffloadingManager`; one lookup call per chunk, for it has no other."""

    def __init__(self, policy: str, chunk_count: int) -> None:
        from vllm.v1.kv_offload.base import LookupResult, ReqContext
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self.name = f"vllm {policy}"
        self._hit = LookupResult.HIT
        self._new_context = ReqContext
        self._manager = CPUOffloadingManager(chunk_count, cache_policy=policy)

    def keys(self, block_hashes: Sequence[bytes]) -> Any:
        """Return the keys of chunks."""
        return [block_hash + bytes(4) for block_hash in block_hashes]

    def store(self, keys: Any) -> None:
        """Reserve and commit chunks, evicting as many."""
        context = self._new_context("bench")
        self._manager.prepare_store(keys, context)
        self._manager.complete_store(keys, context)

    def find(self, keys: Any) -> int:
        """Return how many of the chunks are there."""
        context = self._new_context("bench")
        return sum(self._manager.lookup(key, context) is self._hit for key in keys)

    def use(self, keys: Any) -> None:
        """Pin chunks, release and touch them."""
        self._manager.touch(keys, self._pin_and_release(keys))

    def use_as_scheduled(self, keys: Any) -> None:
        """Pin and release chunks; their use is recorded when the request ends, never by `touch`."""
        self._manager.on_request_finished(self._pin_and_release(keys))

    def _pin_and_release(self, keys: Any) -> Any:
        context = self._new_context("bench")
        self._manager.prepare_load(keys, context)
        self._manager.complete_load(keys, context)
        return context


class TierstoreIndex:
    """The control plane of tierstore, without a secondary tier."""

    def __init__(self, policy: str, chunk_count: int) -> None:
        self.name = f"tierstore {policy}"
        self._manifest = Manifest.simple("bench", chunk_bytes=PAGE_BYTES)
        primary = {"capacity": f"{chunk_count * PAGE_BYTES}B", "eviction": policy}
        config = load_config({"version": 1, "primary": primary})
        self._stack = open_stack(config, self._manifest, rank_count=1, counters=Counters())
        self._done = TransferDone(job_id=JobId(0))  # a worker's answer: the load is over

    def keys(self, block_hashes: Sequence[bytes]) -> list[OffloadKey]:
        """Return the keys of chunks."""
        return make_offload_keys(self._manifest.namespace, 0, block_hashes)

    def store(self, keys: list[OffloadKey]) -> None:
        """Reserve and commit chunks, evicting as many."""
        self._stack.finish_offload(self._stack.reserve_offload(0, keys))

    def find(self, keys: list[OffloadKey]) -> int:
        """Return how many of the chunks are there."""
        return self._stack.match_prefix(keys)

    def use(self, keys: list[OffloadKey]) -> None:
        """Pin chunks, release and touch them."""
        reservation = self._stack.reserve_load([(0, keys)])
        if reservation is None:
            raise RuntimeError("tierstore: a chunk is not resident")
        self._stack.finish_load(reservation, self._done)

    use_as_scheduled = use
