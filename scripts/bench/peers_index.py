"""The indices of `bench_peers.py`, each behind the same few calls.

An index answers an engine's scheduler for a cache in memory. It moves no bytes.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from bench.peers import Load
from bench.reach.files import ratios_of
from tierstore import Manifest
from tierstore.config import load_config
from tierstore.key import OffloadKey, make_offload_keys
from tierstore.layout import PAGE_BYTES
from tierstore.metrics import Counters
from tierstore.tier.opening import open_stack
from tierstore.transfer import JobId, TransferDone

__all__ = ["Index", "TierstoreIndex", "VllmIndex", "bench_index"]

CHUNKS_PER_RUN = 4096


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


def bench_index(policy: str, request: int, chunk_count: int, pairs: int) -> dict[str, Any]:
    """Let the indices take turns with one policy and one size of requests."""
    indices: list[Index] = [
        TierstoreIndex(policy, chunk_count),
        VllmIndex(policy, chunk_count),
    ]
    load = Load(1, chunk_count, 1)
    for index in indices:
        for run in (-1, -2):  # twice as many as there is room for
            index.store(index.keys(load.hashes(run)))
    load = Load(1, CHUNKS_PER_RUN, 1)
    times: dict[str, list[float]] = defaultdict(list)
    for run in range(pairs + 1):
        for index in indices if run % 2 else indices[::-1]:
            keys = index.keys(load.hashes(run))
            requests = [keys[i : i + request] for i in range(0, len(keys), request)]
            for what, call in (
                ("store", index.store),
                ("find", index.find),
                ("use", index.use),
                ("use, scheduled", index.use_as_scheduled),
            ):
                times[f"{index.name} {what}"].append(_microseconds(call, requests))
    for values in times.values():
        del values[0]
    ours, theirs = (index.name for index in indices)
    return {
        "part": "index",
        "policy": policy,
        "request": request,
        "microseconds_per_chunk": dict(times),
        "ratios": {
            what: ratios_of(times[f"{theirs} {what}"], times[f"{ours} {what}"])
            for what in ("store", "find", "use", "use, scheduled")
        },
    }


def _microseconds(call: Callable[[Any], object], requests: list[Any]) -> float:
    """Return the microseconds per chunk of one call per request."""
    start = time.perf_counter()
    for keys in requests:
        call(keys)
    return (time.perf_counter() - start) / sum(map(len, requests)) * 1e6
