"""Measure the bandwidth of a store to and from a device, against the device's raw limit.

    scripts/bench_store.py PATH [--full] [--chunks 64KiB 256KiB] [--requests 1 256] [--json FILE]

Per chunk size and backend, interleaved in every run:

    raw      large sequential O_DIRECT requests to a preallocated file, as many at once as the
             tier has threads: the limit. `overwrite` goes to blocks that were written before,
             which a thinly provisioned device takes faster than new ones
    backend  the payload store alone, extents of a request split among the same threads
    store    TierStore.put until every chunk has its record, TierStore.get from disk

`write` is cold and not flushed, `durable` flushes to the device before the clock stops. `read` is
cold: the pages of the store's files are dropped from the page cache, and memory holds other
chunks. `random` reads the chunks in random order. Every figure is the median of the runs, with the
slowest and the fastest. CPU seconds are those of the whole process, per GB. Peak memory is that of
one chunk size, including the benchmark's own arrays. `--full` measures all chunk sizes and requests
of up to 1024 chunks, `--integrity` keyed records. Cells that are not measured are listed with the
reason.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.device import Clock, RawBench, Threads
from bench.store_levels import BackendBench, Data, StoreBench

from tierstore import Manifest
from tierstore.config import StoreConfig, load_config

FULL_CHUNKS = ["16KiB", "64KiB", "256KiB", "1MiB", "4MiB", "16MiB"]
FULL_REQUESTS = [1, 16, 256, 1024]
CHUNKS = ["64KiB", "256KiB", "1MiB", "4MiB"]
REQUESTS = [16, 256]
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


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
    """Reset the kernel's count of the peak."""
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
    parser.add_argument(
        "path", type=Path, help="directory on the device; only files of this script are removed"
    )
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
