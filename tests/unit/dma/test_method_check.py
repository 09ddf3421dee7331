"""What a device does not do right is not used: copies are slower then, never wrong or refused."""

import numpy as np
import pytest
from cuda_engines import BATCHES, KERNELS, MEASURED, make_engine

from tierstore.dma.gpu.method_check import drop_failing_methods
from tierstore.dma.protocol import CopyId
from tierstore.errors import DeviceError
from tierstore.host_pool import HostPool
from tierstore.layout import PAGE_BYTES, ChunkOrder
from tierstore.testing.copy_conformance import BLOCK_COUNT, make_caches
from tierstore.testing.fake_cuda import FakeCuda, FakeDeviceMemory


class RefusesBatches(FakeCuda):
    def copy_batch(self, runs, stream, *, early_reads) -> None:
        raise DeviceError("cuMemcpyBatchAsync: CUresult 801")


class RefusesKernels(FakeCuda):
    def copy_by_kernel(self, table, run_count, stream) -> None:
        raise DeviceError("cuLaunchKernel: too many resources requested for launch")


class SpoilsBatches(FakeCuda):
    def copy_batch(self, runs, stream, *, early_reads) -> None:
        super().copy_batch(runs[slice(len(runs) - 1)], stream, early_reads=early_reads)


class SpoilsKernels(FakeCuda):
    def copy_by_kernel(self, table, run_count, stream) -> None:
        super().copy_by_kernel(table, run_count - 1, stream)


@pytest.mark.parametrize("seed", range(5))
def test_a_device_that_does_all_right_keeps_all_methods(seed, caplog) -> None:
    api = FakeCuda(seed=seed)
    api.use_device()
    drop_failing_methods(api)
    assert (api.has_batch, api.has_kernel) == (True, True)
    assert api.resource_count == 0
    assert not caplog.records


@pytest.mark.parametrize("config", [BATCHES, KERNELS, MEASURED])
@pytest.mark.parametrize("device", [RefusesBatches, RefusesKernels, SpoilsBatches, SpoilsKernels])
def test_copies_arrive_without_the_method_that_fails(device, config, caplog) -> None:
    api = device()
    memory = FakeDeviceMemory(api, np.full(BLOCK_COUNT * PAGE_BYTES, 3, np.uint8))
    pool = HostPool(BLOCK_COUNT * PAGE_BYTES)
    engine = make_engine(api, config)
    caches = make_caches(memory, [PAGE_BYTES], 0, ChunkOrder.LAYER_MAJOR)
    engine.register(caches, 1, pool.address, pool.size_bytes)
    blocks = np.array([2, 4, 8])
    engine.submit_offload(CopyId(1), 0, blocks[:, None], blocks)
    while not engine.poll():
        assert engine.take_failed() == []
    assert (pool.array.reshape(BLOCK_COUNT, PAGE_BYTES)[blocks] == 3).all()
    engine.close()
    api.free_device(memory.address)
    assert api.resource_count == 0
    method = "batch" if "Batches" in device.__name__ else "kernel"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"method={method}" in caplog.text


def test_a_device_without_methods_to_try_is_left_alone() -> None:
    api = FakeCuda(has_batch=False, has_kernel=False)
    api.use_device()
    drop_failing_methods(api)
    assert api.calls == []
