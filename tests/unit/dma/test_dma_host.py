"""The host copy engine passes the conformance suite; the address arithmetic coalesces."""

import ctypes
import os
import threading
from collections import deque

import numpy as np
import pytest

from tierstore.dma.host import HostCopyEngine
from tierstore.dma.protocol import CopyId
from tierstore.dma.runs import GroupAddressing
from tierstore.dma.shared_copy import pieces_of
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
        return HostCopyEngine(
            self.threads.submit_urgent, share_bytes_min=0, share_run_bytes_min=0, part_bytes_min=1
        )

    def make_memory(self, data):
        return HostMemory(data)


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


def test_one_large_run_is_divided_among_threads(monkeypatch):
    """Adjacent blocks in adjacent slots: one run, of which a helper copies its part."""
    helper_began = threading.Event()
    memmove = ctypes.memmove
    moved = deque()

    def counting(target, source, size_bytes):
        is_helper = threading.current_thread() is not threading.main_thread()
        if is_helper:
            helper_began.set()
        else:
            assert helper_began.wait(60.0)
        moved.append((is_helper, size_bytes))
        return memmove(target, source, size_bytes)

    monkeypatch.setattr(ctypes, "memmove", counting)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    blocks = np.arange(16 << 20, dtype=np.uint32).astype(np.uint8).reshape(-1, 1 << 20)
    pool = np.zeros_like(blocks)
    threads = IoPool(2, "copies")
    threads.open()
    engine = HostCopyEngine(threads.submit_urgent)
    engine.register(one_layer(blocks), 1, pool.ctypes.data, pool.nbytes)
    ids = np.arange(len(blocks))
    engine.submit_offload(CopyId(1), 0, ids[:, None], ids * (blocks.shape[1] // PAGE_BYTES))
    engine.close()
    assert threads.close(60.0)
    assert np.array_equal(pool, blocks)
    assert sum(size_bytes for _, size_bytes in moved) == blocks.nbytes
    assert max(size_bytes for _, size_bytes in moved) <= blocks.nbytes // 8
    assert {is_helper for is_helper, _ in moved} == {False, True}


@pytest.mark.parametrize("piece_count", [1, 2, 7, 40])
@pytest.mark.parametrize("part_bytes_min", [1, PAGE_BYTES, 1 << 20])
@pytest.mark.parametrize("seed", range(4))
def test_pieces_hold_each_byte_once_and_about_as_many_as_each_other(
    piece_count, part_bytes_min, seed
):
    rng = np.random.default_rng(seed)
    sizes = rng.choice([1, 100, PAGE_BYTES, 3 * PAGE_BYTES + 5, 9 << 20], rng.integers(1, 30))
    gaps = rng.integers(0, 3, len(sizes)) * PAGE_BYTES
    sources = np.cumsum(sizes + gaps) - sizes
    targets = sources[::-1].copy()
    pieces = pieces_of((targets, sources, sizes), piece_count, part_bytes_min)
    moved = [part for piece in pieces for part in zip(*map(np.ndarray.tolist, piece), strict=True)]
    at = 0
    for target, source, size_bytes in zip(targets, sources, sizes, strict=True):
        done = 0
        while done < size_bytes:
            part = moved[at]
            assert part[:2] == (target + done, source + done)
            done += part[2]
            at += 1
        assert done == size_bytes
    assert at == len(moved)
    assert 1 <= len(pieces) <= piece_count
    part_max = max(part_bytes_min, -(-int(sizes.sum()) // piece_count)) + PAGE_BYTES
    assert max(int(piece[2].sum()) for piece in pieces) <= 2 * part_max


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
