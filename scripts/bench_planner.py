"""Measure the primary tier's calls: microseconds per chunk, and bytes per resident chunk.

The tier is full, so every new chunk evicts one. Requests are runs of chunks that were stored
together, as the prefixes of an engine's requests are; keys have 44 bytes. Every figure is the
median of five runs, with the fastest and the slowest beside it.

    locate              where the chunks of a resident request are
    new                 reserve + commit of chunks never seen
    returning           reserve + commit of chunks that were evicted before (ghosts of ARC)
    pin+unpin+touch     of a resident request
"""

import argparse
import os
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Literal

from tierstore.config import PrimaryConfig
from tierstore.key import OffloadKey
from tierstore.layout import PAGE_BYTES
from tierstore.tier.primary import PrimaryTier

REQUEST_SIZES = (1, 16, 256, 4096)
RUN_COUNT = 5
RUN_CHUNKS = 8192
FILL_SIZE = 256
KEY_PREFIX = b"namespac\0\0\0\0"

Requests = list[list[OffloadKey]]


def new_requests(size: int, chunk_count: int) -> Requests:
    """Return requests with keys that were never seen."""
    return [
        [OffloadKey(KEY_PREFIX + os.urandom(32)) for _ in range(size)]
        for _ in range(max(1, chunk_count // size))
    ]


def store(tier: PrimaryTier, keys: Sequence[OffloadKey]) -> None:
    """Reserve and commit one request."""
    if tier.reserve(0, keys) is None:
        raise RuntimeError("nothing is pinned, and yet there was no room")
    tier.commit(keys)


def fill(tier: PrimaryTier, chunk_count: int) -> Requests:
    """Store so many new chunks; touch every other request once, so that ARC fills both lists."""
    requests = new_requests(FILL_SIZE, chunk_count)
    for number, keys in enumerate(requests):
        store(tier, keys)
        if number % 2:
            tier.touch(keys)
    return requests


class Bench:
    """One tier in its steady state."""

    def __init__(self, eviction: Literal["lru", "arc"], chunk_count: int) -> None:
        self._chunk_count = chunk_count
        config = PrimaryConfig(capacity_bytes=chunk_count * PAGE_BYTES, eviction=eviction)
        tracemalloc.start()
        self._tier = PrimaryTier(config, [PAGE_BYTES])
        fill(self._tier, 2 * chunk_count)
        self.bytes_per_chunk = tracemalloc.get_traced_memory()[0] / chunk_count
        tracemalloc.stop()

    def row(self, size: int) -> dict[str, list[float]]:
        """Return the times of all runs per figure, in microseconds per chunk."""
        tier = self._tier
        figures: dict[str, list[float]] = {}
        for _ in range(RUN_COUNT):
            fill(tier, self._chunk_count // 4)
            known = self._resident(size)
            for name, call, requests in (
                ("locate", tier.locate, known),
                ("pin+unpin+touch", self._pin_unpin_touch, known),
                ("new", self._store, new_requests(size, RUN_CHUNKS)),
                ("returning", self._store, self._evicted(size)),
            ):
                figures.setdefault(name, []).append(time_us(call, requests))
        problems = tier.check()
        if problems:
            raise RuntimeError("; ".join(problems))
        return figures

    def _store(self, keys: list[OffloadKey]) -> None:
        store(self._tier, keys)

    def _pin_unpin_touch(self, keys: list[OffloadKey]) -> None:
        self._tier.pin(keys)
        self._tier.unpin(keys)
        self._tier.touch(keys)

    def _resident(self, size: int) -> Requests:
        # From the middle of the order: neither just stored nor about to go.
        middle = self._tier.coldest(self._chunk_count * 3 // 4)[-RUN_CHUNKS:]
        return [middle[first : first + size] for first in range(0, len(middle), size)]

    def _evicted(self, size: int) -> Requests:
        leaving = self._tier.coldest(RUN_CHUNKS)
        for keys in new_requests(FILL_SIZE, 2 * RUN_CHUNKS):
            store(self._tier, keys)
        slots = self._tier.locate(leaving)
        gone = [key for key, slot in zip(leaving, slots, strict=True) if slot is None]
        return [gone[first : first + size] for first in range(0, len(gone), size)]


def time_us(call: Callable[[list[OffloadKey]], object], requests: Requests) -> float:
    """Return the microseconds per chunk of one run over all requests."""
    start = time.perf_counter()
    for keys in requests:
        call(keys)
    return (time.perf_counter() - start) / sum(map(len, requests)) * 1e6


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunks", type=int, default=100_000, help="resident chunks")
    parser.add_argument("--eviction", choices=["lru", "arc"], nargs="+", default=["lru", "arc"])
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    for eviction in arguments.eviction:
        bench = Bench(eviction, arguments.chunks)
        print(f"\n{eviction}: {arguments.chunks} chunks, {bench.bytes_per_chunk:.0f} bytes each")
        for size in REQUEST_SIZES:
            print(f"{size:5} per call", end="")
            for name, times in bench.row(size).items():
                median, low, high = statistics.median(times), min(times), max(times)
                print(f" | {name} {median:.3f} ({low:.3f}-{high:.3f})", end="")
            print(" us per chunk")


if __name__ == "__main__":
    main()
