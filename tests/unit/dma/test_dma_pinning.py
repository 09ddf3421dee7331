"""Pinning in the background: order, growth, refusal, graph capture, and what is left at the end."""

import mmap
import threading
import time
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from tierstore.clock import MonotonicClock
from tierstore.dma.background import BackgroundTurns
from tierstore.dma.gpu.pinning import PoolPinner
from tierstore.dma.host_memory import bind_to_node, prefault
from tierstore.errors import DeviceBusyError
from tierstore.host_pool import HostPool
from tierstore.metrics import Counters
from tierstore.testing.fake_cuda import FakeCuda

PIECE = 1 << 16
PIECES = 6
SIZE = PIECE * PIECES - 4096


class Tasks:
    """Background tasks that run when a test says so."""

    def __init__(self) -> None:
        self.queue = deque()

    def spawn(self, task) -> None:
        self.queue.append(task)

    def run(self) -> None:
        while self.queue:
            self.queue.popleft()()


@pytest.fixture
def pool():
    with HostPool(SIZE) as pool:
        yield pool


def make_pinner(
    api: FakeCuda,
    pool: HostPool,
    counters: Counters | None = None,
    turns: BackgroundTurns | None = None,
) -> PoolPinner:
    return PoolPinner(
        api,
        pool.address,
        pool.size_bytes,
        counters or Counters(),
        turns=turns,
        piece_bytes=PIECE,
        clock=MonotonicClock(),
    )


def addresses(pool: HostPool) -> np.ndarray:
    return pool.address + np.arange(PIECES) * PIECE


def test_the_pool_is_pinned_piece_by_piece_from_its_first_slot_on(pool) -> None:
    seen = []

    class Watched(FakeCuda):
        def register_host(self, address: int, size_bytes: int) -> None:
            super().register_host(address, size_bytes)
            seen.append((address - pool.address, size_bytes))

    tasks = Tasks()
    pinner = make_pinner(Watched(), pool)
    pinner.open(tasks.spawn)
    assert pinner.pinned(addresses(pool)).tolist() == [False] * PIECES
    tasks.run()
    assert pinner.pinned(addresses(pool)) is None
    assert [at for at, _ in seen] == [i * PIECE for i in range(PIECES)]
    assert sum(size for _, size in seen) == SIZE
    assert pinner.borders == [*addresses(pool).tolist(), pool.address + SIZE]
    pinner.close()


def test_pinning_keeps_the_bytes_of_slots_in_use(pool) -> None:
    pool.array[:] = 7
    tasks = Tasks()
    pinner = make_pinner(FakeCuda(), pool)
    pinner.open(tasks.spawn)
    tasks.run()
    assert (pool.array == 7).all()
    pinner.close()


def test_a_refusal_leaves_the_rest_pageable_with_one_warning(pool, caplog) -> None:
    api, tasks, counters = FakeCuda(), Tasks(), Counters()
    api.fail_calls = {2}
    pinner = make_pinner(api, pool, counters)
    pinner.open(tasks.spawn)
    tasks.run()
    assert pinner.pinned(addresses(pool)).tolist() == [True, True, False, False, False, False]
    assert counters.snapshot()["pinned_bytes"] == 2 * PIECE
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "ulimit -l" in caplog.text
    pinner.close()
    assert api.registered_bytes == 0
    assert counters.snapshot()["pinned_bytes"] == 0


def test_no_piece_is_pinned_while_transfers_are_under_way(pool) -> None:
    """They begin at the fourth look and are over at the sixth after that."""
    api, tasks, seen = FakeCuda(), Tasks(), []

    def is_busy() -> bool:
        seen.append(api.registered_bytes)
        return 4 <= len(seen) <= 9

    pinner = make_pinner(api, pool, turns=BackgroundTurns(is_busy, looks_max=20, look_seconds=0))
    pinner.open(tasks.spawn)
    tasks.run()
    assert len(set(seen[3:10])) == 1
    assert seen[2] <= seen[3] < SIZE
    assert pinner.pinned(addresses(pool)) is None
    pinner.close()


def test_a_piece_that_has_its_pages_waits_for_a_transfer_that_began_meanwhile(pool) -> None:
    """The first look is before the piece is taken; the transfer is over at the sixth."""
    api, tasks, seen = FakeCuda(), Tasks(), []

    def is_busy() -> bool:
        seen.append(api.registered_bytes)
        return 2 <= len(seen) <= 5

    pinner = make_pinner(api, pool, turns=BackgroundTurns(is_busy, looks_max=20, look_seconds=0))
    pinner.open(tasks.spawn)
    tasks.run()
    assert seen[:7] == [0] * 6 + [PIECE]
    assert pinner.pinned(addresses(pool)) is None
    pinner.close()


def test_the_pool_is_pinned_though_transfers_never_end(pool) -> None:
    api, tasks, seen = FakeCuda(), Tasks(), []

    def is_busy() -> bool:
        seen.append(api.registered_bytes)
        return True

    pinner = make_pinner(api, pool, turns=BackgroundTurns(is_busy, looks_max=3, look_seconds=0))
    pinner.open(tasks.spawn)
    tasks.run()
    assert pinner.pinned(addresses(pool)) is None
    for piece in range(PIECES):
        assert seen.count(piece * PIECE) >= 3, "a piece was pinned before its time was up"
    pinner.close()


def test_close_ends_pinning_that_gives_way(pool) -> None:
    api, is_asked = FakeCuda(), threading.Event()

    def is_busy() -> bool:
        is_asked.set()
        return True

    pinner = make_pinner(api, pool, turns=BackgroundTurns(is_busy, look_seconds=3600))
    pinner.open(in_threads)
    assert is_asked.wait(60)
    pinner.close()
    assert pinner._task_count == 0, "a thread still waits for its turn"
    assert api.registered_bytes == 0


class Capturing(FakeCuda):
    """Refuses registrations while a graph is captured, and tells of it."""

    def __init__(self) -> None:
        super().__init__()
        self.busy = True
        self.refused = threading.Semaphore(0)

    def register_host(self, address: int, size_bytes: int) -> None:
        try:
            super().register_host(address, size_bytes)
        except DeviceBusyError:
            self.refused.release()
            raise


def in_threads(task) -> None:
    threading.Thread(target=task, daemon=True).start()


def test_pinning_goes_on_by_itself_when_a_graph_has_been_captured(pool, caplog) -> None:
    api = Capturing()
    api.use_device()
    pinner = make_pinner(api, pool)
    pinner.open(in_threads)
    for _ in range(2):
        assert api.refused.acquire(timeout=60)
    assert pinner.pinned(addresses(pool)).tolist() == [False] * PIECES
    api.busy = False
    until = time.monotonic() + 60
    while pinner.pinned(addresses(pool)) is not None:
        assert time.monotonic() < until
    assert caplog.records == []
    pinner.close()
    assert api.registered_bytes == 0


def test_close_does_not_wait_for_the_end_of_a_capture(pool) -> None:
    api, counters = Capturing(), Counters()
    pinner = make_pinner(api, pool, counters)
    pinner.open(in_threads)
    assert api.refused.acquire(timeout=60)
    pinner.close()
    api.busy = False
    assert not api.refused.acquire(timeout=0.3)
    assert api.registered_bytes == 0


def test_close_stops_halfway_and_unregisters_what_was_pinned(pool) -> None:
    class Stopping(FakeCuda):
        def register_host(self, address: int, size_bytes: int) -> None:
            super().register_host(address, size_bytes)
            pinner._queue = deque(list(pinner._queue)[:1])

    api, tasks, counters = Stopping(), Tasks(), Counters()
    pinner = make_pinner(api, pool, counters)
    pinner.open(tasks.spawn)
    tasks.run()
    assert 0 < api.registered_bytes < SIZE
    pinner.close()
    pinner.close()
    assert api.registered_bytes == 0
    sums = counters.snapshot()
    assert sums["pinned_bytes"] == 0
    assert sums["pin_seconds_total"] > 0


def test_a_pool_that_is_never_pinned_says_so() -> None:
    pinner = PoolPinner(FakeCuda(), 1 << 20, 0, Counters())
    assert pinner.pinned(np.array([1 << 20, 2 << 20])).tolist() == [False, False]
    pinner.close()


def test_threads_that_pin_are_not_held_up_by_a_capture_elsewhere(pool) -> None:
    api, tasks = FakeCuda(), Tasks()
    api.capturing = True
    pinner = make_pinner(api, pool)
    pinner.open(tasks.spawn)
    tasks.run()
    assert pinner.pinned(addresses(pool)) is None
    pinner.close()


def test_the_pool_lies_on_the_node_of_the_device(pool) -> None:
    api, tasks = FakeCuda(), Tasks()
    api.node = 0
    pinner = make_pinner(api, pool)
    pinner.open(tasks.spawn)
    tasks.run()
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    (policy,) = (line.split()[1] for line in lines if line.startswith(f"{pool.address:x} "))
    assert policy.startswith("prefer")
    pinner.close()


def test_pages_are_there_before_they_are_registered(pool) -> None:
    """So that threads take them side by side, and the driver holds its lock for less time."""
    if not prefault(pool.address, 4096):
        pytest.skip("this kernel cannot give pages beforehand")
    tasks = Tasks()
    pinner = make_pinner(FakeCuda(), pool)
    pinner.open(tasks.spawn)
    before = resident_bytes()
    tasks.run()
    assert resident_bytes() - before >= SIZE - 4096
    pinner.close()


def test_a_pool_asks_for_huge_pages_only_if_told_to() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no transparent huge pages")
    with HostPool(8 << 20) as plain, HostPool(8 << 20, huge_pages=True) as huge:
        assert "hg" not in flags_of(plain.address)
        assert "hg" in flags_of(huge.address)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_prefault_and_placement_change_no_byte(pool) -> None:
    pool.array[:100] = 5
    prefault(pool.address, pool.size_bytes)
    bind_to_node(pool.address, pool.size_bytes, 0)
    assert not bind_to_node(pool.address, pool.size_bytes, 4000)
    assert (pool.array[:100] == 5).all()
    assert (pool.array[100:] == 0).all()


def flags_of(address: int) -> list[str]:
    """Return the kernel's flags of the mapping that holds an address."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = line.split(" ")[0]
        if "-" in bounds and not line.endswith("kB"):
            start, stop = (int(bound, 16) for bound in bounds.split("-"))
            here = start <= address < stop
        elif here and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


def test_a_fork_shares_no_page_that_the_device_writes_to(pool) -> None:
    """Or the parent's next write would move it to a copy, and the device would write to the old."""
    tasks = Tasks()
    pinner = make_pinner(FakeCuda(), pool)
    assert "dc" not in flags_of(pool.address)
    pinner.open(tasks.spawn)
    tasks.run()
    assert "dc" in flags_of(pool.address)
    assert "dc" in flags_of(pool.address + SIZE - 1)
    pinner.close()
