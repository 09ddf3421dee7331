"""Very many chunks through one store, with evictions and a device that fails now and then.

    PYTHONPATH=.:tests:tests/faults python tests/faults/long_run.py PATH --chunks 1000000

Goal: memory, descriptors and threads stay as they are after the beginning, and what lies below the
path stays below the capacity. The last line is what was seen.
"""

import argparse
import dataclasses
import errno
import json
import os
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path

from controlled_device import ControlledDevice
from store_kit import MIB, Chunks, config_of, du

from tierstore import TierStore
from tierstore.errors import TierStoreError
from tierstore.planes import Patience

__all__ = ["LongRun", "run_long"]

CAPACITY_BYTES = 48 * MIB
BATCH = 64
NUMBERS = 40_000
FAULT_EVERY = 400
"""Batches between two faults, each of which lasts for some batches."""
FAULT_BATCHES = 12
WARM_SHARE = 0.2
"""Part of the run after which nothing may grow."""
SAMPLES = 50


@dataclass(kw_only=True)
class LongRun:
    """What was seen of one run."""

    backend: str
    chunk_bytes: int
    chunks: int = 0
    hits: int = 0
    faults: int = 0
    refused_flushes: int = 0
    du_samples: int = 0
    over_quota_bytes: int = 0
    resident_bytes: list[int] = field(default_factory=list)
    """Of the process, at equal distances after the beginning; its descriptors and threads below."""
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def run_long(path: Path, *, backend: str, chunk_count: int, chunk_bytes: int, seed: int) -> LongRun:
    """Put and get `chunk_count` chunks."""
    seen = LongRun(backend=backend, chunk_bytes=chunk_bytes)
    chunks = Chunks(chunk_bytes, model="long")
    dice = random.Random(seed)
    device = ControlledDevice()
    config = config_of(
        path,
        backend=backend,
        primary=f"{BATCH * 8 * -(-chunk_bytes // 4096) * 4096}B",
        capacity=f"{CAPACITY_BYTES}B",
        io={"threads": 4, "deadline": "200ms"},
    )
    patience = Patience(put_seconds=1, flush_seconds=5, close_seconds=10)
    with (
        _sampled(path, seen),
        TierStore.open(
            config, chunks.manifest, open_system=lambda _: device, patience=patience
        ) as store,
    ):
        batch_count = chunk_count // (2 * BATCH)
        fault_until = -1
        for batch in range(batch_count):
            if batch % FAULT_EVERY == FAULT_EVERY - 1:
                seen.faults += 1
                fault_until = batch + FAULT_BATCHES
                kind = dice.choice([errno.EIO, errno.ENOSPC, 0])
                device.fail(kind) if kind else device.hang()
            if batch == fault_until:
                device.heal()
            first = dice.randrange(NUMBERS)
            numbers = [(first + i) % NUMBERS for i in range(BATCH)]
            chunks.put(store, numbers)
            first = (first - dice.randrange(NUMBERS // 8)) % NUMBERS
            wanted = [(first + i) % NUMBERS for i in range(BATCH)]
            seen.hits += len(chunks.found(store, wanted))
            seen.chunks += 2 * BATCH
            if batch % FAULT_EVERY == 0:
                try:
                    store.flush()
                except TierStoreError:
                    seen.refused_flushes += 1
            share = batch / batch_count
            if share > WARM_SHARE and batch % max(1, batch_count // SAMPLES) == 0:
                _note(seen)
        device.heal()
        seen.problems += store.check()
    return seen


def _note(seen: LongRun) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    seen.resident_bytes.append(pages * os.sysconf("SC_PAGE_SIZE"))
    seen.descriptors.append(len(os.listdir("/proc/self/fd")))  # noqa: PTH208 - names alone
    seen.threads.append(threading.active_count())


class _sampled:  # noqa: N801 - used as a function
    """Take `du` all the time; three times where it is too much, for files come and go."""

    def __init__(self, path: Path, seen: LongRun) -> None:
        self._path, self._seen = path, seen
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            excess = du(self._path) - CAPACITY_BYTES
            if excess > 0:
                excess = min(excess, *(du(self._path) - CAPACITY_BYTES for _ in range(2)))
            self._seen.over_quota_bytes = max(self._seen.over_quota_bytes, excess)
            self._seen.du_samples += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--backend", choices=["file", "lmdb"], default="file")
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--chunk-bytes", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    seen = run_long(
        arguments.path,
        backend=arguments.backend,
        chunk_count=arguments.chunks,
        chunk_bytes=arguments.chunk_bytes,
        seed=arguments.seed,
    )
    print(json.dumps(dataclasses.asdict(seen)), flush=True)


if __name__ == "__main__":
    main()
