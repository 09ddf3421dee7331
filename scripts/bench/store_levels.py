"""What `bench_store` compares with the raw device: a payload store alone, and a whole store."""

import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from bench.device import Clock, Threads, huge_buffer
from tierstore import Manifest, TierStore
from tierstore.backend.opening import open_backend
from tierstore.backend.record_batch import RecordBatch
from tierstore.codec.places import extent_ends, segments_of
from tierstore.codec.record import EXTENT_RECORDS_MAX, PLACE_DTYPE
from tierstore.config import StoreConfig
from tierstore.executor.splitting import Splitter
from tierstore.geometry import SpaceGeometry
from tierstore.key import OffloadKey, make_offload_keys
from tierstore.layout import PAGE_BYTES, round_up
from tierstore.testing.spread import spread_hashes
from tierstore.transfer import FailureReason, PlaceArray

PATIENCE_SECONDS = 30.0
WARM_UP_RUNS = 3


class Data:
    """Chunks and keys of the runs: the same bytes in every run, other keys."""

    def __init__(self, manifest: Manifest, chunk_bytes: int, count: int) -> None:
        self.manifest = manifest
        self.count = count
        self.chunk_bytes = chunk_bytes
        random_bytes = np.random.default_rng(2).bytes(count * chunk_bytes)
        self.rows = np.frombuffer(random_bytes, np.uint8).reshape(count, chunk_bytes)
        self.out = np.zeros_like(self.rows)

    def keys(self, run: int) -> list[OffloadKey]:
        """Return the keys of one run."""
        hashes = spread_hashes((run, i) for i in range(self.count))
        return make_offload_keys(self.manifest.namespace, 0, hashes)

    @property
    def size_bytes(self) -> int:
        """Bytes of one run."""
        return self.count * self.chunk_bytes


class BackendBench:
    """One payload store, driven as the executor drives it."""

    def __init__(self, config: StoreConfig, data: Data, threads: Threads) -> None:
        self._tier = config.secondary[0]
        self._data = data
        self._threads = threads
        self._slot_bytes = round_up(data.chunk_bytes, PAGE_BYTES)
        self._pool = memoryview(huge_buffer(self._slot_bytes * data.count))
        for i, row in enumerate(data.rows):
            self._pool[i * self._slot_bytes :][: data.chunk_bytes] = row.data
        self._backend = open_backend(self._tier, data.manifest, rank=0, rank_count=1)
        header_pages = 1 if self._tier.backend == "file" else 0
        self._records, self._places = self._layout(header_pages)
        self._segments = segments_of(self._places)

    def run(self, clock: Clock) -> None:
        """Write everything, read it, release it."""
        size_bytes = self._data.size_bytes
        clock.time("backend write", size_bytes, partial(self._move, self._backend.write))
        self._backend.sync()
        self._backend.close()  # pages that are mapped would stay in memory
        drop_page_cache(self._tier.path)
        self._backend.open()
        clock.time("backend read", size_bytes, partial(self._move, self._backend.read))
        self._backend.release([], self._segments)

    def close(self) -> None:
        """Close the backend and remove its files."""
        self._backend.close()
        shutil.rmtree(self._tier.path)

    def _layout(self, header_pages: int) -> tuple[RecordBatch, PlaceArray]:
        stride = self._slot_bytes // PAGE_BYTES + (1 - header_pages)
        geometry = SpaceGeometry.of(self._tier, self._data.manifest, 1)
        segment_pages = geometry.segment_pages(geometry.capacity_bytes, 1, stride)
        places = np.zeros(self._data.count, PLACE_DTYPE)
        segment, page, index = 0, 0, 0
        for place in places:
            end_page = page + header_pages + (index + 1) * stride
            if index == EXTENT_RECORDS_MAX or end_page > segment_pages:
                page += header_pages + index * stride
                index = 0
                if page + header_pages + stride > segment_pages:
                    segment, page = segment + 1, 0
            place["segment"], place["header_page"], place["index"] = segment, page, index
            place["stride_pages"], place["payload_bytes"] = stride, self._data.chunk_bytes
            place["segment_pages"] = segment_pages
            index += 1
        offsets = np.arange(self._data.count) * self._slot_bytes
        keys = self._data.keys(0)
        return RecordBatch.in_pool(keys, places, self._pool, offsets, self._slot_bytes), places

    def _move(self, call: Callable[[RecordBatch], dict[int, FailureReason]]) -> None:
        splitter = Splitter(self._tier.io.threads, find_cuts=extent_ends)
        batches = splitter.batches(self._places, self._data.chunk_bytes)
        self._threads.run([partial(call, self._records[i:j]) for i, j in batches])


class StoreBench:
    """A TierStore, opened again before each read, so that its memory holds nothing of it."""

    def __init__(self, config: StoreConfig, data: Data, requests: Sequence[int]) -> None:
        self._config = config
        self._data = data
        self._requests = [request for request in requests if request <= data.count]
        self._run_count = 0

    def run(self, clock: Clock) -> None:
        """Write with and without a flush into a new tier, then read what was written last."""
        shutil.rmtree(self._config.secondary[0].path, ignore_errors=True)
        self._run_count = 0
        self._write(clock, durable=True)
        self._write(clock, durable=False)
        self._read(clock)

    def _write(self, clock: Clock, *, durable: bool) -> None:
        what = "durable" if durable else "write"
        with TierStore.open(self._config, self._data.manifest) as store:
            # The first touch of memory costs more than all later ones.
            for _ in range(WARM_UP_RUNS):
                self._put(store, self._data.keys(self._run_count), self._data.count, durable=True)
                self._run_count += 1
            for request in self._requests:
                keys = self._data.keys(self._run_count)
                call = partial(self._put, store, keys, request, durable=durable)
                clock.time(f"store {what}, {request}", self._data.size_bytes, call)
                self._run_count += 1

    def _read(self, clock: Clock) -> None:
        first = self._run_count - len(self._requests)
        for order in ("in order", "random"):
            drop_page_cache(self._config.secondary[0].path)
            with TierStore.open(self._config, self._data.manifest) as store:
                for run in range(first - WARM_UP_RUNS, first):
                    self._get(store, self._data.keys(run), self._data.count, expect_all=False)
                for run, request in enumerate(self._requests, first):
                    keys = self._data.keys(run)
                    if order == "random":
                        random.Random(run).shuffle(keys)  # noqa: S311 - no secrets
                    call = partial(self._get, store, keys, request, expect_all=True)
                    clock.time(f"store read {order}, {request}", self._data.size_bytes, call)

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self._config.secondary[0].path)

    def _put(
        self, store: TierStore, keys: list[OffloadKey], request: int, *, durable: bool
    ) -> None:
        before = demoted_chunks(store)
        for i in range(0, len(keys), request):
            store.put(keys[i : i + request], self._data.rows[i : i + request])
        if durable:
            store.flush()
        until = time.monotonic() + PATIENCE_SECONDS
        while demoted_chunks(store) - before < len(keys):
            if time.monotonic() > until:
                raise RuntimeError(f"chunks were not recorded: {store.stats().counters}")
            time.sleep(0.001)

    def _get(
        self, store: TierStore, keys: list[OffloadKey], request: int, *, expect_all: bool
    ) -> None:
        for i in range(0, len(keys), request):
            found = store.get(keys[i : i + request], self._data.out[i : i + request])
            if expect_all and not all(found):
                raise RuntimeError(f"chunks were not found: {store.stats().counters}")


def demoted_chunks(store: TierStore) -> int:
    """Return how many chunks the tier recorded so far."""
    return int(store.stats().counters.get('demoted_chunks_total{tier="disk"}', 0))


def drop_page_cache(path: Path) -> None:
    """Make the next read of payload come from the device; the catalog stays warm."""
    for file in path.glob("rank*/**/*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
