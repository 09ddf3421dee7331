"""LMCache's tiers on local disk, for `bench_peers.py`.

LMCache runs in two modes. As a separate server, the recommended mode, it keeps chunks in a pool and
passes them to an adapter: `fs` is Python with aiofiles, `fs_native` is C++ with its own threads.
In the engine's process, a deprecated mode, it uses `LocalDiskBackend`, here `disk`. All are driven
by the calls that LMCache itself makes. The server's index of chunks and its messages between
processes are left out. None of this needs a GPU.

All store one file per chunk, without checksums. `disk` has a capacity, and an index in memory that
a restart loses; `fs` has no capacity, and `fs_native` is given none. Each has its default number of
threads: 4; for `fs` as many as asyncio starts, but one chunk of a request at a time.

Each is measured with default settings, through the page cache, where a store ends when the bytes
are in memory, and as `direct` with its setting `use_odirect`, which does the same work as the
other tiers.
"""

import importlib
import os
import queue
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.peers import STALL_SECONDS, FileTier, Load, digests, filled

__all__ = ["LmcacheAdapter", "LmcacheDisk", "lmcache_tiers", "why_not_measured"]

GIB = 1 << 30
MODEL = "bench"
SPARE_BYTES = 64 << 20
"""In a pool beside the chunks, so that its allocator is never short."""


def why_not_measured() -> str | None:
    """Return the reason if LMCache cannot run here."""
    # Read when it is imported; its warnings are about a server that is not there.
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    try:
        for name in ("lmcache_native", "lmcache_fs", "v1.storage_backend.storage_manager"):
            importlib.import_module(f"lmcache.{name}")
    except ModuleNotFoundError as error:
        if error.name == "lmcache":
            return "not installed"
        return f"its module {error.name} is not installed"
    except ImportError as error:
        return f"cannot be imported: {error}"
    return None


def lmcache_tiers(directory: Path, load: Load) -> Iterator[FileTier]:
    """Open each of its tiers twice: as it comes and with O_DIRECT."""
    for use_odirect in (False, True):
        yield LmcacheDisk(directory, load, use_odirect=use_odirect)
        yield LmcacheAdapter("fs", directory, load, use_odirect=use_odirect)
        yield LmcacheAdapter("fs_native", directory, load, use_odirect=use_odirect)


class LmcacheAdapter:
    """An adapter of LMCache's server, `fs` or `fs_native`, over such a pool as the server has.

    One task per request. The lookup that comes before a load is left out, and so is the allocation
    of the chunks in the pool, which is shared memory of 4 KiB pages.
    """

    def __init__(self, kind: str, directory: Path, load: Load, *, use_odirect: bool) -> None:
        import torch
        from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
        from lmcache.v1.distributed.config import L1MemoryManagerConfig
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter
        from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
        from lmcache.v1.distributed.memory_manager import L1MemoryManager

        self.name = name_of(kind, use_odirect=use_odirect)
        self._load = load
        self._key = ObjectKey
        self._rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
        pool = L1MemoryManagerConfig(
            load.size_bytes + SPARE_BYTES,
            use_lazy=False,  # grows pinned memory, which takes a GPU
            shm_name=f"{directory.name}-{self.name}".replace(" ", "-"),
        )
        self._pool = L1MemoryManager(pool)
        layout = MemoryLayoutDesc([torch.Size([load.chunk_bytes])], [torch.uint8])
        _, self._objects = self._pool.allocate(layout, load.chunk_count)
        self._rows = [np.frombuffer(chunk.byte_array, np.uint8) for chunk in self._objects]
        self._digests = fill(self._rows)
        settings = {"base_path": str(directory / self.name), "use_odirect": use_odirect}
        self._tier = create_l2_adapter(get_l2_adapter_config_class(kind).from_dict(settings))

    def store(self, run: int) -> None:
        """Write all chunks."""
        waiting = {self._tier.submit_store_task(*task) for task in self._tasks(run)}
        for _ in self._turns(self._tier.get_store_event_fd(), waiting):
            for task, result in self._tier.pop_completed_store_tasks().items():
                if not result.is_successful():
                    raise RuntimeError(f"{self.name}: a chunk was not stored")
                waiting.remove(task)

    def cool(self) -> None:
        """Overwrite the pool."""
        for row in self._rows:
            row[:] = 0

    def load(self, run: int) -> None:
        """Read all chunks."""
        waiting = {self._tier.submit_load_task(*task) for task in self._tasks(run)}
        for _ in self._turns(self._tier.get_load_event_fd(), waiting):
            for task in list(waiting):
                if self._tier.query_load_result(task) is not None:
                    waiting.remove(task)

    def wrong_chunks(self) -> int:
        """Count chunks whose bytes are not those stored."""
        return sum(map(int.__ne__, digests(self._rows), self._digests))

    def close(self) -> None:
        """Stop the threads and free the pool."""
        self._tier.close()
        for chunk in self._objects:
            chunk.ref_count_down()
        self._pool.close()

    def _tasks(self, run: int) -> Iterator[tuple[list[Any], list[Any]]]:
        keys = [self._key(chunk, MODEL, self._rank) for chunk in self._load.hashes(run)]
        for request in self._load.requests:
            part = slice(request.start, request.stop)
            yield keys[part], self._objects[part]

    def _turns(self, event_fd: int, waiting: set[int]) -> Iterator[None]:
        """Yield whenever tasks may have ended, until none is pending."""
        poller = select.poll()
        poller.register(event_fd, select.POLLIN)
        while waiting:
            if not poller.poll(STALL_SECONDS * 1000):
                raise RuntimeError(f"{self.name}: makes no progress")
            os.eventfd_read(event_fd)
            yield


class LmcacheDisk:
    """LMCache's `LocalDiskBackend`, opened by its `StorageManager`; memory keeps nothing.

    Requests are stored at once, one task per chunk, and loaded one after the other: LMCache has a
    lock around that. It allocates the chunks that it loads.
    """

    def __init__(self, directory: Path, load: Load, *, use_odirect: bool) -> None:
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.event_manager import EventManager
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.storage_manager import StorageManager

        self.name = name_of("disk", use_odirect=use_odirect)
        self._load = load
        self._new_key = CacheEngineKey
        self._dtype = torch.uint8
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=False,
            max_local_cpu_size=(2 * load.size_bytes + SPARE_BYTES) / GIB,
            local_disk=str(directory / self.name),
            max_local_disk_size=32,
            extra_config={"use_odirect": use_odirect},
        )
        shape = (1, 1, 1, 1, load.chunk_bytes)
        metadata = LMCacheMetadata(MODEL, 1, 1, 0, 0, torch.uint8, shape, role="worker")
        self._manager = StorageManager(config, metadata, EventManager())
        self._tier = self._manager.storage_backends["LocalDiskBackend"]
        size = torch.Size([load.chunk_bytes])
        self._objects = self._manager.batched_allocate(size, torch.uint8, load.chunk_count)
        self._digests = fill([np.frombuffer(c.byte_array, np.uint8) for c in self._objects])
        self._loaded: list[Any] = []

    def store(self, run: int) -> None:
        """Write all chunks."""
        stored: queue.SimpleQueue[object] = queue.SimpleQueue()
        keys = self._keys(run)
        for request in self._load.requests:
            part = slice(request.start, request.stop)
            self._tier.batched_submit_put_task(
                keys[part], self._objects[part], on_complete_callback=stored.put
            )
        for _ in keys:
            stored.get(timeout=STALL_SECONDS)

    def cool(self) -> None:
        """Do nothing: what was loaded was overwritten when it was compared."""

    def load(self, run: int) -> None:
        """Read all chunks."""
        keys = self._keys(run)
        self._loaded = []
        for request in self._load.requests:
            self._loaded += self._tier.batched_get_blocking(keys[request.start : request.stop])
        if any(chunk is None for chunk in self._loaded):
            raise RuntimeError(f"{self.name}: a chunk did not arrive")

    def wrong_chunks(self) -> int:
        """Count chunks whose bytes are not those stored; overwrites and frees all."""
        rows = [np.frombuffer(chunk.byte_array, np.uint8) for chunk in self._loaded]
        wrong = sum(map(int.__ne__, digests(rows), self._digests))
        for row, chunk in zip(rows, self._loaded, strict=True):
            row[:] = 0
            chunk.ref_count_down()
        return wrong

    def close(self) -> None:
        """Stop the threads and free the pool."""
        for chunk in self._objects:
            chunk.ref_count_down()
        self._manager.close()

    def _keys(self, run: int) -> list[Any]:
        return [self._new_key(MODEL, 1, 0, c, self._dtype) for c in self._load.hashes(run)]


def fill(rows: list[npt.NDArray[np.uint8]]) -> list[int]:
    """Write the bytes of all parties to the rows; returns their checksums."""
    for row, chunk in zip(rows, filled(np.empty((len(rows), len(rows[0])), np.uint8)), strict=True):
        row[:] = chunk
    return digests(rows)


def name_of(kind: str, *, use_odirect: bool) -> str:
    """Return the name of a party in the results."""
    return f"lmcache {kind} direct" if use_odirect else f"lmcache {kind}"
