"""The CUDA copy engine on a real device: bytes, order, and what CUDA's documents leave open."""

import ctypes
import importlib.util
import threading
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from cuda_engines import BATCHES, KERNELS, MEASURED, MIXED, RECTANGLES

from tierstore.dma.cuda import CudaCopyEngine
from tierstore.dma.cuda_api import DirectedRuns
from tierstore.dma.kernel_table import ROW_BYTES, fill_table, table_at
from tierstore.dma.lane import ENTRIES_MAX
from tierstore.dma.pinning import PoolPinner
from tierstore.dma.protocol import CopyId
from tierstore.dma.trial import drop_failing_methods
from tierstore.layout import PAGE_BYTES, ChunkOrder
from tierstore.memory import HostPool
from tierstore.metrics import Counters
from tierstore.testing.copy_conformance import BLOCK_COUNT, CopyConformance, make_caches

HAS_GPU = Path("/dev/nvidiactl").exists() and importlib.util.find_spec("cupy") is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device and CuPy"),
]

SPIN = r"""
extern "C" __global__ void spin_then_fill(
    unsigned char* bytes, const long long count, const int value, const long long cycles)
{
    const long long start = clock64();
    while (clock64() - start < cycles) { }
    for (long long i = threadIdx.x; i < count; i += blockDim.x) {
        bytes[i] = (unsigned char)value;
    }
}
"""
CYCLES = 50_000_000
"""Some tens of milliseconds: longer than any copy here."""


def make_api():
    from tierstore.dma.cupy_api import CupyApi

    return CupyApi(0, kernel_sms=4)


class CudaMemory:
    """Bytes on the device, as the conformance suite wants them."""

    def __init__(self, data) -> None:
        import cupy

        self._array = cupy.asarray(data)
        self.device = "cuda:0"
        self.address = self._array.data.ptr

    def read(self):
        import cupy

        cupy.cuda.runtime.deviceSynchronize()
        return self._array.get()

    def write(self, data) -> None:
        import cupy

        self._array.set(data)
        cupy.cuda.runtime.deviceSynchronize()

    def compute(self, value: int) -> None:
        """Launch slow work on the default stream that fills all bytes at its end."""
        import cupy

        kernel = cupy.RawKernel(SPIN, "spin_then_fill")
        arguments = (self._array, np.int64(self._array.size), np.int32(value), np.int64(CYCLES))
        kernel((1,), (256,), arguments)


def make_engine(api, config, *, pinned=True):
    return CudaCopyEngine(
        api,
        device="cuda:0",
        config=config,
        counters=Counters(),
        spawn=(lambda task: task()) if pinned else None,
    )


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


def registered(config, memory, pool):
    engine = make_engine(make_api(), config)
    caches = make_caches(memory, [PAGE_BYTES], 0, ChunkOrder.LAYER_MAJOR)
    engine.register(caches, 1, pool.address, pool.size_bytes)
    return engine


def wait(engine, *copy_ids) -> None:
    missing = set(copy_ids)
    while missing:
        missing.difference_update(engine.poll())
        assert engine.take_failed() == []


ALL = np.arange(BLOCK_COUNT)
METHODS = pytest.mark.parametrize("config", [BATCHES, KERNELS, RECTANGLES, MEASURED])


@METHODS
def test_an_offload_reads_what_the_running_step_writes_and_a_fence_holds_the_next(config) -> None:
    memory = CudaMemory(np.zeros(BLOCK_COUNT * PAGE_BYTES, np.uint8))
    with HostPool(BLOCK_COUNT * PAGE_BYTES) as pool:
        engine = registered(config, memory, pool)
        memory.compute(7)
        engine.submit_offload(CopyId(1), 0, ALL[:, None], ALL)
        engine.fence((CopyId(1),))
        memory.compute(8)
        assert engine.poll() == []  # nothing waited on the CPU
        wait(engine, 1)
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
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
            values += 1
            background = threading.Thread(target=tasks.popleft())
            background.start()
            background.join()
            graph = stream.end_capture()
            graph.launch()
        stream.synchronize()
        assert float(values[0]) == 2
        while tasks:
            tasks.popleft()()
        assert pinner.pinned(np.array([pool.address])) is None
        pinner.close()
