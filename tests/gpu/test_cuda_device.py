"""The CUDA copy engine on a real device: bytes, order, and what CUDA's documents leave open."""

import ctypes
import threading
from collections import deque

import numpy as np
import pytest
from cuda_device import (
    ALL,
    METHODS,
    NEEDS_GPU,
    CudaMemory,
    make_api,
    make_engine,
    offload_what_is_overwritten,
    registered,
    wait,
)
from cuda_engines import BATCHES, KERNELS, MEASURED, MIXED, RECTANGLES

from tierstore.dma.gpu.copy_stream import ENTRIES_MAX
from tierstore.dma.gpu.cuda_api import DirectedRuns
from tierstore.dma.gpu.kernel_table import ROW_BYTES, fill_table, table_at
from tierstore.dma.gpu.method_check import drop_failing_methods
from tierstore.dma.gpu.pinning import PoolPinner
from tierstore.dma.protocol import CopyId
from tierstore.host_pool import HostPool
from tierstore.layout import PAGE_BYTES, ChunkOrder
from tierstore.metrics import Counters
from tierstore.testing.copy_conformance import BLOCK_COUNT, CopyConformance, make_caches

pytestmark = NEEDS_GPU


class OnDevice(CopyConformance):
    config = MEASURED
    pinned = True
    has_batch = True

    def make_memory(self, data):
        return CudaMemory(data)

    def make_engine(self):
        api = make_api()
        api.has_batch = api.has_batch and self.has_batch
        return make_engine(api, self.config, pinned=self.pinned)


class TestMeasuredThresholds(OnDevice):
    pass


class TestBatches(OnDevice):
    config = BATCHES


class TestPlainCopies(OnDevice):
    config = BATCHES
    has_batch = False


class TestRectangles(OnDevice):
    config = RECTANGLES


class TestKernels(OnDevice):
    config = KERNELS


class TestMixedMethods(OnDevice):
    config = MIXED


class TestPageablePool(OnDevice):
    pinned = False


@METHODS
def test_an_offload_reads_what_the_running_step_writes_and_a_fence_holds_the_next(config) -> None:
    memory = CudaMemory(np.zeros(BLOCK_COUNT * PAGE_BYTES, np.uint8))
    with HostPool(BLOCK_COUNT * PAGE_BYTES) as pool:
        engine = registered(config, memory, pool)
        memory.compute(7)
        offload_what_is_overwritten(engine, ALL, lambda: memory.compute(8))
        assert (pool.array == 7).all()
        assert (memory.read() == 8).all()
        engine.close()


@METHODS
@pytest.mark.parametrize("urgent", [False, True])
def test_a_load_writes_after_the_step_that_uses_its_blocks(config, urgent) -> None:
    memory = CudaMemory(np.zeros(BLOCK_COUNT * PAGE_BYTES, np.uint8))
    with HostPool(BLOCK_COUNT * PAGE_BYTES) as pool:
        pool.array[:] = 9
        engine = registered(config, memory, pool)
        memory.compute(7)
        mark = engine.mark_compute()
        engine.submit_load(CopyId(1), 0, ALL[:, None], ALL, after=mark, urgent=urgent)
        wait(engine, 1)
        assert (memory.read() == 9).all()
        engine.close()


@METHODS
@pytest.mark.parametrize(
    ("page", "gap", "order", "blocks_outside"),
    [
        (16 << 10, 0, ChunkOrder.LAYER_MAJOR, False),
        (64 << 10, 512, ChunkOrder.LAYER_MAJOR, False),
        (256 << 10, 0, ChunkOrder.BLOCK_MAJOR, True),
        (1 << 20, 0, ChunkOrder.LAYER_MAJOR, False),
    ],
)
def test_large_pages_go_both_ways_at_once(config, page, gap, order, blocks_outside) -> None:
    """Half of the blocks is offloaded to poisoned slots, the other half is poisoned and loaded."""
    layers, half = 4, BLOCK_COUNT // 2
    random = np.random.default_rng(page)
    blocks = random.permutation(BLOCK_COUNT)
    slots = random.permutation(BLOCK_COUNT) * layers * page // PAGE_BYTES
    before = random.integers(0, 256, BLOCK_COUNT * layers * (page + gap), np.uint8)
    before_pool = random.integers(0, 256, BLOCK_COUNT * layers * page, np.uint8)
    memory = CudaMemory(before)
    caches = make_caches(memory, [page] * layers, gap, order, blocks_outside=blocks_outside)
    after, after_pool = before.copy(), before_pool.copy()
    for block, slot in zip(blocks.tolist(), slots.tolist(), strict=True):
        is_offload = block in blocks[:half]
        for layer, tensor in enumerate(caches.tensors):
            start = tensor.address - memory.address + block * tensor.block_stride_bytes
            on_device = slice(start, start + page)
            start = slot * PAGE_BYTES + layer * page
            in_slot = slice(start, start + page)
            if is_offload:
                after_pool[in_slot] = before[on_device]
            else:
                after[on_device] = before_pool[in_slot]
    with HostPool(len(before_pool)) as pool:
        pool.array[:] = before_pool
        engine = make_engine(make_api(), config)
        engine.register(caches, 1, pool.address, pool.size_bytes)
        engine.submit_offload(CopyId(1), 0, blocks[:half, None], slots[:half])
        engine.submit_load(CopyId(2), 0, blocks[half:, None], slots[half:])
        wait(engine, 1, 2)
        assert np.array_equal(pool.array, after_pool)
        assert np.array_equal(memory.read(), after)
        engine.close()


def test_more_copies_than_a_stream_holds_arrive_in_order() -> None:
    api = make_api()
    api.has_batch = False
    memory = CudaMemory(np.repeat(ALL, PAGE_BYTES).astype(np.uint8))
    with HostPool(BLOCK_COUNT * PAGE_BYTES) as pool:
        engine = make_engine(api, BATCHES)
        caches = make_caches(memory, [PAGE_BYTES], 0, ChunkOrder.LAYER_MAJOR)
        engine.register(caches, 1, pool.address, pool.size_bytes)
        for _ in range(20):  # longer than it takes to submit all
            memory.compute(5)
        count = 3 * ENTRIES_MAX
        for copy_id in range(count):
            block = copy_id % BLOCK_COUNT
            engine.submit_offload(CopyId(copy_id), 0, np.array([[block]]), np.array([block]))
        arrived: list[int] = []
        while len(arrived) < count:
            arrived += engine.poll()
        assert arrived == list(range(count))
        assert (pool.array == 5).all()
        engine.close()


@pytest.mark.parametrize("shift", [0, 1, 4, 8, 15])
def test_the_kernel_copies_every_length_at_every_alignment(shift) -> None:
    api = make_api()
    lengths = np.concatenate([np.arange(1, 70), [500, 511, 512, 513, 2047, 2048, 2049, 70_001]])
    starts = np.cumsum(lengths + 17) - lengths
    size = int(starts[-1] + lengths[-1]) + 64
    source = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    memory = CudaMemory(np.zeros(size, np.uint8))
    host = api.alloc_host(size + ROW_BYTES * (len(lengths) + 1))
    ctypes.memmove(host, source.ctypes.data, size)
    table = table_at(host + (size + 7) // 8 * 8, len(lengths))
    fill_table(table, DirectedRuns(memory.address + starts + shift, host + starts, lengths))
    stream = api.create_stream()
    api.copy_by_kernel(table, len(lengths), stream)
    api.synchronize(stream)
    expected = np.zeros(size, np.uint8)
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        expected[start + shift : start + shift + length] = source[start : start + length]
    assert np.array_equal(memory.read(), expected)
    api.destroy_stream(stream)
    api.free_host(host)


def test_the_device_does_all_methods_right() -> None:
    api = make_api()
    has_batch = api.has_batch  # an old driver has none
    drop_failing_methods(api)
    assert api.has_kernel
    assert api.has_batch == has_batch


def test_pinning_and_capturing_a_graph_do_not_disturb_each_other() -> None:
    import cupy

    api = make_api()
    tasks: deque = deque()
    with HostPool(8 << 20) as pool:
        pinner = PoolPinner(api, pool.address, pool.size_bytes, Counters(), piece_bytes=1 << 20)
        pinner.open(tasks.append)
        values = cupy.zeros(1024, dtype=cupy.float32)
        values += 1  # compiles outside of the capture
        cupy.cuda.runtime.deviceSynchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
            values += 1
            background = threading.Thread(target=tasks.popleft(), daemon=True)
            background.start()
            background.join(5)
            graph = stream.end_capture()
            graph.launch()
        stream.synchronize()
        assert float(values[0]) == 2
        background.join(60)
        while tasks:
            tasks.popleft()()
        assert pinner.pinned(np.array([pool.address])) is None
        pinner.close()
