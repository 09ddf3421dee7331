"""The raw limit of a device, and the clock and the threads of benchmarks that compare with it."""

import mmap
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from tierstore.io_pool import IoPool

RAW_REQUEST_BYTES = 4 << 20
PATIENCE_SECONDS = 30.0


@dataclass
class Clock:
    """GB/s and CPU seconds per GB of each measurement, by name."""

    rates: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def time(self, name: str, size_bytes: int, call: Callable[[], object]) -> None:
        """Run `call`, which moves `size_bytes`."""
        start, cpu_start = time.perf_counter(), time.process_time()
        call()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        self.rates[name].append(size_bytes / seconds / 1e9)
        self.cpu[name].append(cpu * 1e9 / size_bytes)


class Threads:
    """Runs tasks in the threads of a pool and waits for all of them."""

    def __init__(self, count: int) -> None:
        self._pool = IoPool(count, "bench")
        self._pool.open()

    def run(self, tasks: Sequence[Callable[[], object]]) -> None:
        """Run all tasks; returns when the last has ended."""
        left = threading.Semaphore(0)
        problems: list[object] = []

        def run_one(task: Callable[[], object]) -> None:
            try:
                problem = task()
                if problem:
                    problems.append(problem)
            finally:
                left.release()

        for task in tasks:
            self._pool.submit_deferred(partial(run_one, task))
        for _ in tasks:
            left.acquire()
        if problems:
            raise RuntimeError(f"benchmark task failed: {problems[0]}")

    def close(self) -> None:
        """Stop the threads."""
        self._pool.close(PATIENCE_SECONDS)


class RawBench:
    """Large sequential O_DIRECT I/O on one preallocated file, from and to huge pages.

    The first write to a block is slower than all later ones where the device below is thinly
    provisioned, so both are measured: `raw write` goes to blocks that were not written since they
    were allocated, as the new segments of a store do; `raw overwrite` goes there again.
    """

    def __init__(self, directory: Path, size_bytes: int, run_count: int, threads: Threads) -> None:
        self._path = directory / "raw"
        self._size_bytes = size_bytes
        self._threads = threads
        self._buffer = memoryview(huge_buffer(size_bytes))
        self._buffer[:] = np.random.default_rng(1).bytes(size_bytes)
        self._run = 0

        # One file for all runs: freeing its blocks would keep the device busy during others' turns.
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, size_bytes * run_count)

    def run(self, clock: Clock) -> None:
        """Write the next part of the file twice and read it."""
        clock.time("raw write", self._size_bytes, partial(self._move, _write))
        clock.time("raw overwrite", self._size_bytes, partial(self._move, _write))
        os.fdatasync(self._fd)
        clock.time("raw read", self._size_bytes, partial(self._move, _read))
        self._run += 1

    def close(self) -> None:
        """Close and remove the file."""
        os.close(self._fd)
        self._path.unlink()

    def _move(self, call: Callable[[int, memoryview, int], int]) -> None:
        starts = range(0, self._size_bytes, RAW_REQUEST_BYTES)
        self._threads.run([partial(self._one, call, start) for start in starts])

    def _one(self, call: Callable[[int, memoryview, int], int], start: int) -> str:
        stop = min(start + RAW_REQUEST_BYTES, self._size_bytes)
        moved = call(self._fd, self._buffer[start:stop], self._run * self._size_bytes + start)
        return "" if moved == stop - start else f"short I/O at {start}"


def huge_buffer(size_bytes: int) -> mmap.mmap:
    """Map memory as the primary tier does, in huge pages where the kernel has them."""
    buffer = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


def _write(fd: int, buffer: memoryview, offset: int) -> int:
    return os.pwrite(fd, buffer, offset)


def _read(fd: int, buffer: memoryview, offset: int) -> int:
    return os.preadv(fd, [buffer], offset)
