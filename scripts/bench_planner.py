"""Measure the primary tier's calls: microseconds per chunk, bytes per resident chunk.

Every figure is the median of five runs over a full tier. Requests are random contiguous runs of
chunks that were stored together, as the prefixes of an engine's requests are.
"""

import argparse
import os
import platform
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Literal

from tierstore.config import PrimaryConfig
from tierstore.key import OffloadKey
from tierstore.layout import PAGE_BYTES
from tierstore.tier.primary import PrimaryTier

REQUEST_SIZES = (1, 16, 256, 4096)
RUN_COUNT = 5
CALLS_PER_RUN_CHUNKS = 50_000
KEY_PREFIX = b"namespac\0\0\0\0"

Eviction = Literal["lru", "arc"]
_numbers = count()


def make_keys(key_count: int) -> list[OffloadKey]:
    """Return new keys of 44 bytes in a random, repeatable order of hash."""
    numbers = [next(_numbers) for _ in range(key_count)]
    return [OffloadKey(KEY_PREFIX + random.Random(n).randbytes(32)) for n in numbers]  # noqa: S311


def store(tier: PrimaryTier, keys: Sequence[OffloadKey]) -> None:
    """Reserve and commit one request."""
    if tier.reserve(0, keys) is None:
        raise RuntimeError("nothing is pinned, and yet there was no room")
    tier.commit(keys)


def fill(tier: PrimaryTier, chunk_count: int) -> list[OffloadKey]:
    """Turn the whole tier over twice, so that tables and ghosts are in their steady state."""
    keys: list[OffloadKey] = []
    for _ in range(0, 2 * chunk_count, 256):
        request = make_keys(256)
        store(tier, request)
        keys += request
    return keys[-chunk_count:]


def median_us(
    requests: Callable[[], Iterator[list[OffloadKey]]],
    call: Callable[[list[OffloadKey]], None],
) -> float:
    """Return the median over runs of the time per chunk."""
    figures = []
    for _ in range(RUN_COUNT):
        batches = list(requests())
        start = time.perf_counter()
        for batch in batches:
            call(batch)
        seconds = time.perf_counter() - start
        figures.append(seconds / sum(map(len, batches)) * 1e6)
    return statistics.median(figures)


def bench(eviction: Eviction, chunk_count: int) -> None:
    """Print one table."""
    tracemalloc.start()
    config = PrimaryConfig(capacity_bytes=chunk_count * PAGE_BYTES, eviction=eviction)
    tier = PrimaryTier(config, [PAGE_BYTES])
    resident = fill(tier, chunk_count)
    held_by_bench = len(resident) * 8
    bytes_per_chunk = (tracemalloc.get_traced_memory()[0] - held_by_bench) / chunk_count
    tracemalloc.stop()
    print(f"\n{eviction}: {chunk_count} resident chunks, {bytes_per_chunk:.0f} bytes per chunk")
    print(f"{'chunks per call':>16} {'locate':>8} {'reserve+commit':>15} {'same, ghosts':>13}", end="")
    print(f" {'pin+unpin+touch':>16}   us per chunk")

    def pin_unpin_touch(keys: list[OffloadKey]) -> None:
        tier.pin(keys)
        tier.unpin(keys)
        tier.touch(keys)

    for size in REQUEST_SIZES:
        call_count = max(3, CALLS_PER_RUN_CHUNKS // size)

        def known(size: int = size, call_count: int = call_count) -> Iterator[list[OffloadKey]]:
            for _ in range(call_count):
                first = random.randrange(len(resident) - size)  # noqa: S311 - no secret
                yield resident[first : first + size]

        def fresh(size: int = size, call_count: int = call_count) -> Iterator[list[OffloadKey]]:
            for _ in range(call_count):
                request = make_keys(size)
                recent.extend(request)
                yield request

        def returning(size: int = size, call_count: int = call_count) -> Iterator[list[OffloadKey]]:
            for first in range(0, min(call_count * size, len(resident) // 8), size):
                yield resident[first : first + size]
            del resident[: len(resident) // 8]

        recent: list[OffloadKey] = []
        figures = [
            median_us(known, tier.locate),  # type: ignore[arg-type]
            0.0,
            0.0,
            median_us(known, pin_unpin_touch),
        ]
        figures[1] = median_us(fresh, lambda keys: store(tier, keys))
        resident = recent[-chunk_count:] if len(recent) >= chunk_count else fill(tier, chunk_count)
        evicted = fill(tier, chunk_count // 2)
        del evicted
        print(f"{size:16} {figures[0]:8.3f} {figures[1]:15.3f} {'':>13} {figures[3]:16.3f}")
        resident = fill(tier, chunk_count)
    problems = tier.check()
    print("check:", problems or "sound")


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=100_000, help="resident chunks")
    parser.add_argument("--eviction", choices=["lru", "arc"], action="append")
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, ", end="")
    print(f"Python {platform.python_version()}")
    for eviction in arguments.eviction or ["lru", "arc"]:
        bench(eviction, arguments.chunks)


if __name__ == "__main__":
    main()
