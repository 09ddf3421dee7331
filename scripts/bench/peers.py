"""The tiers that `bench_peers.py` compares, each behind the same few calls.

A file tier moves chunks between a pool in host memory and files, several requests at once:

    store(run)  write all chunks of the pool under the keys of the run; returns when all are visible
    cool()      drop the chunks of earlier runs from memory
    load(run)   read the chunks into the pool; returns when all have arrived

While the stand-in for a fast device is on (`fast_device.c`) no payload arrives: all chunks have the
same bytes then, and `cool` leaves them, so that checksums are right and nothing else is proved.
"""

import itertools
import mmap
import tempfile
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from bench.device import huge_buffer
from bench.reach.fast_device import FastDevice
from tierstore import Manifest
from tierstore.clock import MonotonicClock
from tierstore.config import load_config
from tierstore.embedded.loop import PlaneLoop
from tierstore.executor import TransferExecutor
from tierstore.key import OffloadKey, make_offload_keys
from tierstore.layout import PAGE_BYTES
from tierstore.metrics import Counters
from tierstore.tier.opening import open_stack

__all__ = [
    "FileTier",
    "Load",
    "TierstoreFiles",
    "VllmFiles",
]

STALL_SECONDS = 30.0
CAPACITY = "32GiB"
"""Our tier's; much more than is written, as on a server, so that segments have their full size."""


class Load:
    """The load of a file tier: chunks of one size, divided into requests."""

    def __init__(self, chunk_bytes: int, chunk_count: int, request_count: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.chunk_count = chunk_count
        per_request = -(-chunk_count // request_count)
        self.requests = [
            range(i, min(i + per_request, chunk_count)) for i in range(0, chunk_count, per_request)
        ]

    @property
    def size_bytes(self) -> int:
        """Bytes of one run."""
        return self.chunk_bytes * self.chunk_count

    @lru_cache(maxsize=2)  # noqa: B019 - a load lives as long as its benchmark
    def hashes(self, run: int) -> list[bytes]:
        """Return the block hashes of one run, spread as real ones are.

        An engine has them already: ask once before the clock starts.
        """
        return [
            xxh3_64_intdigest(f"{run} {i}".encode()).to_bytes(8, "big")
            + f"{run:08}{i:016}".encode()
            for i in range(self.chunk_count)
        ]


class FileTier(Protocol):
    """A party that keeps chunks in files."""

    name: str

    def store(self, run: int) -> None:
        """Write all chunks."""

    def cool(self) -> None:
        """Forget in memory what was stored."""

    def load(self, run: int) -> None:
        """Read all chunks."""

    def wrong_chunks(self) -> int:
        """Count the chunks of the last load whose bytes are not those stored."""

    def close(self) -> None:
        """Stop."""


class VllmFiles:
    """vLLM's `fs` tier: its manager, its threads and, where it is built, its C extension.

    One job per request; a job is one task of its pool. The existence check before a load, which
    vLLM's scheduler makes one step earlier, is left out. Its pool is shared memory, as in vLLM
    (`SharedOffloadRegion`); with `huge_pages` it is such a pool as ours, which vLLM does not have.
    """

    def __init__(self, directory: Path, load: Load, *, huge_pages: bool) -> None:
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        self.name = "vllm fs on huge pages" if huge_pages else "vllm fs"
        self._load = load
        self._new_job = TransferJob
        self._context = ReqContext("bench")
        self._job_ids = itertools.count()
        pool = huge_buffer(load.size_bytes) if huge_pages else shared_buffer(load.size_bytes)
        self._is_imagined = FastDevice().is_on
        rows = np.frombuffer(pool, np.uint8).reshape(load.chunk_count, -1)
        self._rows = filled(rows, alike=self._is_imagined)
        self._digests = digests(self._rows)
        self._tier = FileSystemTierManager(
            vllm_spec(), self._rows.data, "fs", root_dir=str(directory)
        )

    def store(self, run: int) -> None:
        """Write all chunks."""
        for job in self._jobs(run, is_promotion=False):
            self._tier.submit_store(job)
        self._wait()

    def cool(self) -> None:
        """Overwrite the pool."""
        if not self._is_imagined:
            self._rows[:] = 0

    def load(self, run: int) -> None:
        """Read all chunks."""
        for job in self._jobs(run, is_promotion=True):
            self._tier.submit_load(job)
        self._wait()

    def wrong_chunks(self) -> int:
        """Count chunks whose bytes are not those stored."""
        return sum(map(int.__ne__, digests(self._rows), self._digests))

    def close(self) -> None:
        """Stop the threads."""
        self._tier.shutdown()

    def _jobs(self, run: int, *, is_promotion: bool) -> Iterator[Any]:
        keys = [block_hash + bytes(4) for block_hash in self._load.hashes(run)]
        for request in self._load.requests:
            yield self._new_job(
                job_id=next(self._job_ids),
                keys=keys[request.start : request.stop],
                chunk_ids=np.arange(request.start, request.stop),
                is_promotion=is_promotion,
                req_context=self._context,
            )

    def _wait(self) -> None:
        self._tier.drain_jobs()
        results = list(self._tier.get_finished_jobs())
        if len(results) != len(self._load.requests) or not all(r.success for r in results):
            raise RuntimeError(f"{self.name}: a job failed: {results}")


class TierstoreFiles:
    """The file tier of tierstore, with its catalog, its checksums and its capacity.

    Chunks lie in the slots of the primary tier, as a GPU would have left them there.
    """

    name = "tierstore"

    def __init__(self, directory: Path, load: Load, *, threads: int) -> None:
        self._load = load
        self._manifest = Manifest.simple("bench", chunk_bytes=load.chunk_bytes)
        pool_bytes = 2 * load.size_bytes + (8 << 20)
        tier = {
            "name": "disk",
            "backend": "file",
            "path": str(directory),
            "capacity": CAPACITY,
            "io": {"threads": threads, "deadline": "60s", "write_queue": f"{pool_bytes}B"},
        }
        self._config = load_config(
            {"version": 1, "primary": {"capacity": f"{pool_bytes}B"}, "secondary": [tier]}
        )
        self._is_imagined = FastDevice().is_on
        self._loaded: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._open_count = 0
        self._open()
        self._digest_of_slot = dict(enumerate(digests(self._slots())))
        self._digests: list[int] = []

    def store(self, run: int) -> None:
        """Write all chunks."""
        keys = self._keys(run)
        stored = []
        for request in self._load.requests:
            reservation = self._stack.reserve_offload(0, keys[request.start : request.stop])
            stored += reservation.slots.tolist()
            self._stack.finish_offload(reservation)
            self._loop.pump()
        if not self._loop.settle(lambda: not self._stack.has_work(), STALL_SECONDS):
            raise RuntimeError("tierstore: the write queue makes no progress")
        size = self._load.chunk_bytes
        self._digests = [self._digest_of_slot[slot * PAGE_BYTES // size] for slot in stored]

    def cool(self) -> None:
        """Open it again, with other bytes in its pool."""
        self.close()
        self._open()

    def load(self, run: int) -> None:
        """Read all chunks."""
        keys = self._keys(run)
        loads = []
        for request in self._load.requests:
            reservation = self._stack.reserve_load([(0, keys[request.start : request.stop])])
            if reservation is None:
                raise RuntimeError("tierstore: a chunk is not recorded")
            loads.append(self._loop.start_load(reservation))
        for pending in loads:
            if self._loop.wait_for(pending):
                raise RuntimeError("tierstore: a chunk did not arrive")
            self._loop.finish_load(pending)
        self._loaded = np.concatenate([pending.reservation.slots[0] for pending in loads])

    def wrong_chunks(self) -> int:
        """Count chunks whose bytes are not those stored."""
        rows = self._slots()[self._loaded * PAGE_BYTES // self._load.chunk_bytes]
        wrong = sum(map(int.__ne__, digests(rows), self._digests))
        self._loop.settle(lambda: not self._loop.has_messages(), STALL_SECONDS)  # uses are recorded
        filled(self._slots(), alike=self._is_imagined)
        return wrong

    def close(self) -> None:
        """Flush and stop."""
        self._loop.flush()
        self._executor.close()
        self._stack.close()

    def _open(self) -> None:
        counters = Counters()
        self._stack = open_stack(self._config, self._manifest, rank_count=1, counters=counters)
        self._executor = TransferExecutor.open(
            self._config, self._manifest, rank=0, rank_count=1, caches=None, counters=counters
        )
        self._loop = PlaneLoop(self._stack, self._executor, MonotonicClock())
        filled(self._slots(), alike=self._is_imagined)
        # A server creates a segment once per GiB: here one chunk does it before the clock starts.
        self._open_count += 1
        opening = [f"opening {self._open_count:24}".encode()]
        keys = make_offload_keys(self._manifest.namespace, 0, opening)
        self._stack.finish_offload(self._stack.reserve_offload(0, keys))
        self._loop.flush()

    def _slots(self) -> npt.NDArray[np.uint8]:
        pool = self._executor.pool.array
        count = len(pool) // self._load.chunk_bytes
        return pool[: count * self._load.chunk_bytes].reshape(count, -1)

    def _keys(self, run: int) -> list[OffloadKey]:
        return make_offload_keys(self._manifest.namespace, 0, self._load.hashes(run))


def filled(rows: npt.NDArray[np.uint8], *, alike: bool = False) -> npt.NDArray[np.uint8]:
    """Write bytes to all rows, always the same; no two have them in common, or they are alike."""
    noise = np.frombuffer(np.random.default_rng(3).bytes(rows.shape[1]), np.uint8)
    rows[:] = noise
    if not alike:
        rows[:, :8] = np.arange(len(rows), dtype=np.uint64)[:, None].view(np.uint8)
    return rows


def shared_buffer(size_bytes: int) -> mmap.mmap:
    """Map a file of /dev/shm that has no name any more."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(size_bytes)
        return mmap.mmap(file.fileno(), size_bytes)


def digests(rows: Iterable[npt.NDArray[np.uint8]]) -> list[int]:
    """Return a checksum of each row."""
    return [xxh3_64_intdigest(row.data) for row in rows]


def vllm_spec() -> Any:
    """Return what vLLM's file tier wants to know of an engine: one group on one worker."""
    from vllm.v1.kv_offload import config
    from vllm.v1.kv_offload.base import OffloadingKVEventsConfig

    parallel = config.OffloadingParallelConfig(
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=True,
    )
    described = config.OffloadingConfig(
        groups=(config.OffloadingGroupConfig(16, ("layer",), 0),),
        worker_kv_bytes_per_block=PAGE_BYTES,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="bench",
        model=config.OffloadingModelConfig("bench", "uint8"),
        cache=config.OffloadingCacheConfig(16, 1),
        parallel=parallel,
    )
    events = OffloadingKVEventsConfig(False, False)
    return SimpleNamespace(config=described, blocks_per_chunk=1, kv_events_config=events)
