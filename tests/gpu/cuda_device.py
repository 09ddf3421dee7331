"""A real CUDA device, as the tests of this folder need it."""

import copy
import importlib.util
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from cuda_engines import BATCHES, KERNELS, MEASURED, RECTANGLES

from tierstore.dma.gpu.engine import CudaCopyEngine
from tierstore.dma.protocol import CopyId
from tierstore.layout import PAGE_BYTES, ChunkOrder
from tierstore.metrics import Counters
from tierstore.testing.copy_conformance import BLOCK_COUNT, make_caches

HAS_GPU = Path("/dev/nvidiactl").exists() and importlib.util.find_spec("cupy") is not None
NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device and CuPy"),
]

ALL = np.arange(BLOCK_COUNT)
METHODS = pytest.mark.parametrize("config", [BATCHES, KERNELS, RECTANGLES, MEASURED])

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
    """A `CupyApi` of its own, for a method may be taken from it; the kernel is compiled once."""
    return copy.copy(_first_api())


@cache
def _first_api():
    from tierstore.dma.gpu.cupy_api import CupyApi

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


def make_engine(api, config, *, pinned=True, compute_stream=None):
    return CudaCopyEngine(
        api,
        device="cuda:0",
        config=config,
        counters=Counters(),
        spawn=(lambda task: task()) if pinned else None,
        compute_stream=compute_stream,
    )


def registered(config, memory, pool, *, page=PAGE_BYTES, compute_stream=None):
    """An engine for one layer, whose blocks of one page each are all of `memory`."""
    engine = make_engine(make_api(), config, compute_stream=compute_stream)
    caches = make_caches(memory, [page], 0, ChunkOrder.LAYER_MAJOR)
    engine.register(caches, 1, pool.address, pool.size_bytes)
    return engine


def offload_what_is_overwritten(engine, slots, overwrite) -> None:
    """Offload all blocks; they are overwritten by the next step, which a fence holds back."""
    engine.submit_offload(CopyId(1), 0, ALL[:, None], slots)
    engine.fence((CopyId(1),))
    overwrite()
    assert engine.poll() == []  # nothing waited on the CPU
    wait(engine, 1)


def wait(engine, *copy_ids) -> None:
    missing = set(copy_ids)
    while missing:
        missing.difference_update(engine.poll())
        assert engine.take_failed() == []
