"""Very many chunks through one store, with evictions and a device that fails now and then.

    PYTHONPATH=.:tests/support python tests/faults/support/long_run.py PATH --chunks 1000000

Goal: memory, descriptors and threads stay as they are after the beginning, and what lies below the
path stays below the capacity. The last line is what was seen.
"""

import argparse
import dataclasses
import json
import os
import random
import re
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from filesystems import KINDS, mounted, sampled
from store_kit import MIB, Chunks, config_of
from waiting import within_seconds

from tierstore import TierStore
from tierstore.embedded.planes import Patience
from tierstore.errors import TierStoreError
from tierstore.testing.faults import FaultPlan, FaultRule

__all__ = ["LongRun", "run_long"]

CAPACITY_BYTES = 48 * MIB
FILE_SYSTEM_BYTES = 512 * MIB
BATCH = 64
NUMBERS = 40_000
WRITES = ("pwritev", "allocate", "flush", "database.write", "database.commit")
RULES = (
    FaultRule(kind="error", error="EIO"),
    FaultRule(kind="error", error="ENOSPC", calls=WRITES),
    FaultRule(kind="hang"),
)
FAULT_EVERY = 400
"""Batches between two faults, each of which lasts for some batches."""
FAULT_BATCHES = 12
WARM_SHARE = 0.2
"""Part of the run after which nothing may grow."""
SAMPLES = 50
SAMPLE_SECONDS = 0.01
IO = {
    "threads": 4,
    "deadline": "200ms",
    "breaker": {"retry_after": "500ms", "retry_after_max": "2s"},
}
PATIENCE = Patience(put_seconds=1, flush_seconds=5, close_seconds=10)


@dataclass(kw_only=True)
class LongRun:
    """What was seen of one run."""

    backend: str
    file_system: str
    chunk_bytes: int
    seed: int
    chunks: int = 0
    hits: int = 0
    evicted: int = 0
    faults: int = 0
    strikes: int = 0
    """Calls to the device that a fault struck."""
    refused: int = 0
    """Flushes that said that something is missing."""
    recomputed: int = 0
    """Chunks that a fault kept from being served."""
    retried: int = 0
    """Writes that failed, or did not begin: tried again as long as memory has the chunk."""
    is_back: bool = False
    sample_count: int = 0
    over_quota_bytes: int = 0
    seconds: float = 0
    stall_seconds: float = 0
    """The longest time that any call took."""
    memory_bytes: list[int] = field(default_factory=list)
    """Of the process, without mapped files, at equal distances after the beginning; its descriptors
    and threads below."""
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def growth(self, values: Sequence[int]) -> int:
        """Return by how much the middle of the last third is above that of the first third."""
        third = len(values) // 3
        first, last = sorted(values[:third]), sorted(values[-third:])
        return last[third // 2] - first[third // 2]


def run_long(
    path: Path,
    *,
    backend: str,
    chunk_count: int,
    chunk_bytes: int = 4096,
    seed: int = 1,
    file_system: str = "",
    fault_every: int = FAULT_EVERY,
) -> LongRun:
    """Put and get `chunk_count` chunks below an empty path; if asked, in a new file system."""
    seen = LongRun(backend=backend, file_system=file_system, chunk_bytes=chunk_bytes, seed=seed)
    mount = (
        mounted(file_system, FILE_SYSTEM_BYTES, below=path) if file_system else nullcontext(path)
    )
    with mount as place, sampled(place / "tier", pause_seconds=SAMPLE_SECONDS) as usage:
        began_at = time.monotonic()
        _run(place / "tier", seen, chunk_count, fault_every)
        seen.seconds = time.monotonic() - began_at
    seen.sample_count = usage.sample_count
    seen.over_quota_bytes = max(0, usage.bytes_max - CAPACITY_BYTES)
    return seen


def _run(path: Path, seen: LongRun, chunk_count: int, fault_every: int) -> None:
    chunks = Chunks(seen.chunk_bytes, model="long")
    dice = random.Random(seen.seed)
    plan = FaultPlan()
    config = config_of(
        path,
        backend=seen.backend,
        primary=f"{BATCH * 8 * -(-seen.chunk_bytes // 4096) * 4096}B",
        capacity=f"{CAPACITY_BYTES}B",
        io=IO,
    )
    batch_count = chunk_count // (2 * BATCH)
    distance = max(1, int(batch_count * (1 - WARM_SHARE)) // SAMPLES)
    with TierStore.open(
        config, chunks.manifest, open_system=plan.open_system, patience=PATIENCE
    ) as store:
        for batch in range(batch_count):
            if batch % fault_every == fault_every - 1:
                seen.faults += 1
                plan.inject(dice.choice(RULES))
            if batch % fault_every == FAULT_BATCHES - 1:
                plan.heal()
            _use(store, chunks, seen, dice)
            if batch % fault_every == fault_every // 2:
                seen.refused += not _is_flushed(store)
            if batch > batch_count * WARM_SHARE and batch % distance == 0:
                _note(seen)
        plan.heal()
        seen.is_back = within_seconds(lambda: _is_flushed(store))
        seen.problems += store.check()
        seen.strikes = plan.strike_count
        _count(store, seen)


def _use(store: TierStore, chunks: Chunks, seen: LongRun, dice: random.Random) -> None:
    """Put a batch, and get one that was put before or not."""
    first = dice.randrange(NUMBERS)
    began_at = time.monotonic()
    chunks.put(store, [(first + i) % NUMBERS for i in range(BATCH)])
    put_at = time.monotonic()
    first = (first - dice.randrange(NUMBERS // 8)) % NUMBERS
    try:
        seen.hits += len(chunks.found(store, [(first + i) % NUMBERS for i in range(BATCH)]))
    except AssertionError as error:
        seen.problems.append(str(error))
    got_at = time.monotonic()
    seen.stall_seconds = max(seen.stall_seconds, put_at - began_at, got_at - put_at)
    seen.chunks += 2 * BATCH


def _is_flushed(store: TierStore) -> bool:
    try:
        store.flush()
    except TierStoreError:
        return False
    return True


def _note(seen: LongRun) -> None:
    status = Path("/proc/self/status").read_text()
    (kilobytes,) = re.findall(r"RssAnon:\s+(\d+) kB", status)
    seen.memory_bytes.append(int(kilobytes) << 10)
    seen.descriptors.append(len(os.listdir("/proc/self/fd")))  # noqa: PTH208 - names alone
    seen.threads.append(threading.active_count())


def _count(store: TierStore, seen: LongRun) -> None:
    stats = store.stats()
    seen.evicted = stats.secondary["disk"].evicted_count
    for name, count in stats.counters.items():
        if name.startswith("dropped_demotes"):
            seen.retried += int(count)
        elif name.startswith("misses") and '"absent"' not in name:
            seen.recomputed += int(count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--backend", choices=["file", "lmdb"], default="file")
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--chunk-bytes", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fault-every", type=int, default=FAULT_EVERY, help="batches")
    parser.add_argument("--file-system", choices=KINDS, default="", help="made below the path")
    arguments = parser.parse_args()
    seen = run_long(
        arguments.path,
        backend=arguments.backend,
        chunk_count=arguments.chunks,
        chunk_bytes=arguments.chunk_bytes,
        seed=arguments.seed,
        file_system=arguments.file_system,
        fault_every=arguments.fault_every,
    )
    print(json.dumps(dataclasses.asdict(seen)), flush=True)


if __name__ == "__main__":
    main()
