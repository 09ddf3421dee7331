"""The host copy engine passes the conformance suite; the address arithmetic coalesces."""

import ctypes
import mmap
import os
import threading
from collections import deque

import numpy as np
import pytest

from tierstore.dma.host import HostCopyEngine
from tierstore.dma.protocol import CopyId
from tierstore.dma.runs import GroupAddressing
from tierstore.errors import LayoutError
from tierstore.io_pool import IoPool
from tierstore.layout import (
    PAGE_BYTES,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    ChunkOrder,
)
from tierstore.testing.copy_conformance import (
    BLOCK_COUNT,
    CopyConformance,
    HostMemory,
    make_caches,
)


class TestHostCopyEngine(CopyConformance):
    def make_engine(self):
        return HostCopyEngine()

    def make_memory(self, data):
        return HostMemory(data)


class TestSharedHostCopies(CopyConformance):
    """The same, with threads that take their part of every copy."""

    @pytest.fixture(autouse=True)
    def _threads(self):
        self.threads = IoPool(2, "copies")
        self.threads.open()
        yield
        assert self.threads.close(60.0)

    def make_engine(self):
        return HostCopyEngine(self.threads.submit_urgent, share_bytes_min=0, share_run_bytes_min=0)

    def make_memory(self, data):
        return HostMemory(data)


POOL_BYTES = 40 << 20


@pytest.fixture
def pool():
    """Return memory without pages, its address, and a count of those that have come."""
    mapping = mmap.mmap(-1, POOL_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    here = (ctypes.c_ubyte * (POOL_BYTES // PAGE_BYTES))()

    def page_count():
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        assert mincore(ctypes.c_void_p(address), ctypes.c_size_t(POOL_BYTES), here) == 0
        return sum(byte & 1 for byte in here)

    return mapping, address, page_count


def no_caches():
    return CanonicalKVCaches(
        tensors=(), group_refs=(), chunk_order=ChunkOrder.LAYER_MAJOR, device="cpu"
    )


def test_the_pool_gets_its_pages_in_the_background_and_keeps_its_bytes(pool):
    mapping, address, page_count = pool
    mapping[:PAGE_BYTES] = b"k" * PAGE_BYTES
    tasks = deque()
    HostCopyEngine(tasks.append).register(no_caches(), 1, address, POOL_BYTES)
    assert page_count() < POOL_BYTES // PAGE_BYTES
    while tasks:
        tasks.popleft()()
    assert page_count() == POOL_BYTES // PAGE_BYTES
    assert mapping[:PAGE_BYTES] == b"k" * PAGE_BYTES


def test_no_page_comes_after_the_engine_was_closed(pool):
    _, address, page_count = pool
    tasks = deque()
    engine = HostCopyEngine(tasks.append)
    engine.register(no_caches(), 1, address, POOL_BYTES)
    tasks.popleft()()
    before = page_count()
    engine.close()
    while tasks:
        tasks.popleft()()
    assert 0 < before == page_count() < POOL_BYTES // PAGE_BYTES


def one_layer(blocks):
    block_count, page_bytes = blocks.shape
    tensor = CanonicalKVCacheTensor(
        address=blocks.ctypes.data,
        block_count=block_count,
        block_stride_bytes=page_bytes,
        page_bytes=page_bytes,
        owner=blocks,
    )
    return CanonicalKVCaches(
        tensors=(tensor,),
        group_refs=((CanonicalKVCacheRef(layer_name="0", tensor_idx=0),),),
        chunk_order=ChunkOrder.LAYER_MAJOR,
        device="cpu",
    )


def offload_reversed(engine, blocks):
    """Offload all blocks, the last one to the first slot."""
    block_count, page_bytes = blocks.shape
    order = np.arange(block_count)[::-1]
    slots = np.arange(block_count) * page_bytes // PAGE_BYTES
    engine.submit_offload(CopyId(1), 0, order[:, None], slots)


@pytest.mark.parametrize(("page_bytes", "is_shared"), [(1 << 16, True), (1 << 15, False)])
def test_large_copies_of_large_runs_are_shared_and_end_without_a_helper_too(page_bytes, is_shared):
    blocks = np.arange(8 << 20, dtype=np.uint32).astype(np.uint8).reshape(-1, page_bytes)
    pool = np.zeros_like(blocks)
    spawned = []
    engine = HostCopyEngine(spawned.append)
    engine.register(one_layer(blocks), 1, pool.ctypes.data, pool.nbytes)
    spawned.clear()  # the prefault
    offload_reversed(engine, blocks)
    assert bool(spawned) is (is_shared and len(os.sched_getaffinity(0)) > 1)
    for task in spawned:
        task()  # late: nothing is left
    assert np.array_equal(pool, blocks[::-1])


def test_the_part_of_a_helper_that_dies_is_copied_by_others(monkeypatch):
    """Every call of a helper fails, as if there were no memory; the copy ends, and is whole."""
    helper_failed = threading.Event()
    memmove = ctypes.memmove

    def failing(*arguments):
        if threading.current_thread() is not threading.main_thread():
            helper_failed.set()
            raise MemoryError
        assert helper_failed.wait(60.0)  # the helper has its part before all are copied
        return memmove(*arguments)

    monkeypatch.setattr(ctypes, "memmove", failing)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    blocks = np.repeat(np.arange(64, dtype=np.uint8), PAGE_BYTES).reshape(64, PAGE_BYTES)
    pool = np.zeros_like(blocks)
    threads = IoPool(1, "copies")
    threads.open()
    engine = HostCopyEngine(threads.submit_urgent, share_bytes_min=0, share_run_bytes_min=0)
    engine.register(one_layer(blocks), 1, pool.ctypes.data, pool.nbytes)
    offload_reversed(engine, blocks)
    assert threads.close(60.0)
    assert np.array_equal(pool, blocks[::-1])


def test_adjacent_blocks_in_adjacent_slots_become_one_run():
    memory = HostMemory(np.zeros(BLOCK_COUNT * PAGE_BYTES, np.uint8))
    caches = make_caches(memory, [PAGE_BYTES], 0, ChunkOrder.LAYER_MAJOR)
    addressing = GroupAddressing(caches, 0, 1, 1 << 20, 64 * PAGE_BYTES)
    runs = addressing.runs(np.array([[2], [3], [4], [9]]), np.array([7, 8, 9, 10]))
    assert runs.sizes_bytes.tolist() == [3 * PAGE_BYTES, PAGE_BYTES]
    assert runs.pool_addresses.tolist() == [(1 << 20) + 7 * PAGE_BYTES, (1 << 20) + 10 * PAGE_BYTES]


def test_caches_of_another_device_are_refused():
    caches = CanonicalKVCaches(
        tensors=(), group_refs=(), chunk_order=ChunkOrder.LAYER_MAJOR, device="cuda:0"
    )
    with pytest.raises(LayoutError, match="expected device cpu, got cuda:0"):
        HostCopyEngine().register(caches, 1, 0, 0)
