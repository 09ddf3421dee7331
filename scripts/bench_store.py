"""Measure what a store moves: GB/s to and from a device, beside the raw limit of that device.

    scripts/bench_store.py PATH [--full] [--chunks 64KiB 256KiB] [--requests 1 256] [--json FILE]

Per chunk size and backend, interleaved in every run:

    raw      large sequential O_DIRECT requests, as many at once as the tier has threads, into
             a preallocated file: the limit. `overwrite` goes to blocks written before, which a
             thinly provisioned device takes faster than new ones
    backend  the payload store alone, extents of a request split among the same threads
    store    TierStore.put until every chunk has its record, TierStore.get from disk

`write` is cold and not flushed, `durable` flushes to the device before the clock stops. `read` is
cold: pages of our files are dropped from the page cache, memory holds other chunks. `random` reads
the chunks in another order than they were stored in. Every figure is the median of the runs, with
the slowest and the fastest; CPU seconds are those of the whole process, per GB; peak memory is
that of one chunk size, the benchmark's own arrays included. `--full` measures all chunk sizes and
requests of up to 1024 chunks, `--integrity` keyed records. A cell that is not measured is named
with the reason.
"""

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from bench.device import Clock, RawBench, Threads, huge_buffer

from tierstore import Manifest, TierStore
from tierstore.backend.opening import open_backend
from tierstore.backend.protocol import Backend, RecordIo
from tierstore.codec.record import EXTENT_RECORDS_MAX, PLACE_DTYPE
from tierstore.config import StoreConfig, load_config
from tierstore.executor.job import split_batches
from tierstore.geometry import SpaceGeometry
from tierstore.key import OffloadKey, make_offload_keys
from tierstore.layout import PAGE_BYTES, round_up
from tierstore.testing.spread import spread_hashes
from tierstore.transfer import FailureReason, Place

FULL_CHUNKS = ["16KiB", "64KiB", "256KiB", "1MiB", "4MiB", "16MiB"]
FULL_REQUESTS = [1, 16, 256, 1024]
CHUNKS = ["64KiB", "256KiB", "1MiB", "4MiB"]
REQUESTS = [16, 256]
PATIENCE_SECONDS = 30.0
WARM_UP_RUNS = 3
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


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
        self._backend: Backend = open_backend(self._tier, data.manifest, rank=0, rank_count=1)
        header_pages = 1 if self._tier.backend == "file" else 0
        self._records, self._places = self._layout(header_pages)
        self._segments = sorted({int.from_bytes(place[:4], "little") for place in self._places})

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

    def _layout(self, header_pages: int) -> tuple[list[RecordIo], tuple[Place, ...]]:
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
        encoded = tuple(Place(place.tobytes()) for place in places)
        slots = [
            self._pool[i * self._slot_bytes : (i + 1) * self._slot_bytes]
            for i in range(self._data.count)
        ]
        keys = self._data.keys(0)
        return list(map(RecordIo, keys, encoded, slots)), encoded

    def _move(self, call: Callable[[Sequence[RecordIo]], dict[int, FailureReason]]) -> None:
        batches = split_batches(self._places, self._data.chunk_bytes, self._tier.io.threads)
        self._threads.run([partial(call, self._records[i:j]) for i, j in batches])


class StoreBench:
    """A TierStore, opened anew before each read, so that its memory holds nothing of it."""

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


def config_of(
    directory: Path, backend: str, data_bytes: int, arguments: argparse.Namespace
) -> StoreConfig:
    """Return a store whose memory holds one run and whose disk holds the runs of one pass."""
    tier = {
        "name": "disk",
        "backend": backend,
        "path": str(directory),
        "capacity": f"{data_bytes * (2 * len(arguments.requests) + 7) + (48 << 20)}B",
        "io": {"threads": arguments.threads, "mode": arguments.mode, "deadline": "60s"},
    }
    if backend == "lmdb":
        del tier["io"]["mode"]  # type: ignore[attr-defined]
    if arguments.integrity != "none":
        key_file = directory.parent / "records.key"
        key_file.touch(mode=0o600)
        key_file.write_bytes(os.urandom(32))
        tier["integrity"] = {
            "key_file": str(key_file),
            "encrypt": arguments.integrity == "encrypt",
        }
    primary = {"capacity": f"{2 * data_bytes + (8 << 20)}B"}
    return load_config({"version": 1, "primary": primary, "secondary": [tier]})


def bench(
    directory: Path, backend: str, chunk: str, arguments: argparse.Namespace
) -> dict[str, object]:
    """Measure one backend with one chunk size."""
    chunk_bytes = parse_size(chunk)
    manifest = Manifest.simple("bench", chunk_bytes=chunk_bytes)
    count = max(1, parse_size(arguments.bytes) // chunk_bytes)
    data = Data(manifest, chunk_bytes, count)
    reset_peak_memory()
    clock, threads = Clock(), Threads(arguments.threads)
    raw = RawBench(directory, data.size_bytes, arguments.runs * len(arguments.levels), threads)
    levels: list[BackendBench | StoreBench] = []
    for level in arguments.levels:
        config = config_of(directory / level, backend, data.size_bytes, arguments)
        if level == "backend":
            levels.append(BackendBench(config, data, threads))
        else:
            levels.append(StoreBench(config, data, arguments.requests))
    for _ in range(arguments.runs):
        for parts in levels:
            raw.run(clock)
            parts.run(clock)
        print(".", end="", flush=True, file=sys.stderr)
    for closing in (raw, *levels):
        closing.close()
    threads.close()
    return {
        "backend": backend,
        "chunk_bytes": chunk_bytes,
        "bytes_per_run": data.size_bytes,
        "gigabytes_per_second": dict(clock.rates),
        "cpu_seconds_per_gigabyte": dict(clock.cpu),
        "peak_memory_bytes": peak_memory_bytes(),
        "not_measured": [
            f"requests of {request} chunks: a run moves {count} chunks (--bytes)"
            for request in arguments.requests
            if request > count and "store" in arguments.levels
        ],
    }


def lines_of(result: dict[str, object]) -> Iterator[str]:
    """Describe one result."""
    rates: dict[str, list[float]] = result["gigabytes_per_second"]  # type: ignore[assignment]
    cpu: dict[str, list[float]] = result["cpu_seconds_per_gigabyte"]  # type: ignore[assignment]
    peak = int(result["peak_memory_bytes"]) >> 20  # type: ignore[call-overload]
    yield f"\n{result['backend']}, chunks of {result['chunk_bytes']} bytes, peak {peak} MiB"
    for name, values in rates.items():
        limit = statistics.median(rates["raw read" if "read" in name else "raw write"])
        median = statistics.median(values)
        yield (
            f"  {name:28} {median:6.2f} GB/s ({min(values):.2f}-{max(values):.2f})"
            f"  {median / limit:5.0%} of raw  {statistics.median(cpu[name]):.2f} CPU s/GB"
        )
    for reason in result["not_measured"]:  # type: ignore[attr-defined]
        yield f"  not measured: {reason}"


def reset_peak_memory() -> None:
    """Let the kernel count the peak anew."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes() -> int:
    """Return the most memory that was in use since the last reset."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def parse_size(text: str) -> int:
    """Return the bytes that a size such as `64KiB` means."""
    return int(float(text[:-3]) * UNITS[text[-3:]])


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="directory on the device; removed files only ours")
    parser.add_argument("--full", action="store_true", help="all chunk sizes and requests")
    parser.add_argument("--chunks", nargs="+", help=f"default {' '.join(CHUNKS)}")
    parser.add_argument("--backends", nargs="+", choices=["file", "lmdb"], default=["file", "lmdb"])
    parser.add_argument(
        "--levels", nargs="+", choices=["backend", "store"], default=["backend", "store"]
    )
    parser.add_argument(
        "--requests", nargs="+", type=int, help=f"chunks per call, default {REQUESTS}"
    )
    parser.add_argument("--bytes", default="64MiB", help="moved per measurement")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--mode", choices=["direct", "buffered", "mmap"], default="direct")
    parser.add_argument("--integrity", choices=["none", "mac", "encrypt"], default="none")
    parser.add_argument("--json", type=Path, help="write all values to this file")
    arguments = parser.parse_args()
    arguments.chunks = arguments.chunks or (FULL_CHUNKS if arguments.full else CHUNKS)
    arguments.requests = arguments.requests or (FULL_REQUESTS if arguments.full else REQUESTS)
    conditions = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{
            name: getattr(arguments, name)
            for name in ("bytes", "runs", "threads", "mode", "integrity")
        },
    }
    print(*(f"{name}={value}" for name, value in conditions.items()))
    results: list[dict[str, object]] = []
    arguments.path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-store-", dir=arguments.path) as name:
        for backend in arguments.backends:
            for chunk in arguments.chunks:
                try:
                    with tempfile.TemporaryDirectory(dir=name) as directory:
                        result = bench(Path(directory), backend, chunk, arguments)
                except RuntimeError as error:
                    print(f"\n{backend}, chunks of {chunk}: not measured: {error}", flush=True)
                    reason = {"backend": backend, "chunk": chunk, "not_measured": [str(error)]}
                    results.append(reason)
                    continue
                results.append(result)
                print(*lines_of(result), sep="\n", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"conditions": conditions, "results": results}))


if __name__ == "__main__":
    main()
