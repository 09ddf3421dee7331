"""The CUDA copy engine passes the conformance suite by every method, over the fake CUDA."""

from cuda_engines import BATCHES, KERNELS, MIXED, RECTANGLES, make_engine

from tierstore.testing.copy_conformance import CopyConformance
from tierstore.testing.fake_cuda import FakeCuda, FakeDeviceMemory


class OverFakeCuda(CopyConformance):
    config = BATCHES
    pinned = True
    has_batch = True
    has_kernel = True

    def make_memory(self, data):
        self.api = FakeCuda(seed=len(data), has_batch=self.has_batch, has_kernel=self.has_kernel)
        return FakeDeviceMemory(self.api, data)

    def make_engine(self):
        return make_engine(self.api, self.config, pinned=self.pinned)


class TestBatches(OverFakeCuda):
    pass


class TestPlainCopies(OverFakeCuda):
    has_batch = False
    has_kernel = False


class TestRectangles(OverFakeCuda):
    config = RECTANGLES


class TestKernels(OverFakeCuda):
    config = KERNELS


class TestMixedMethods(OverFakeCuda):
    config = MIXED


class TestPageablePool(OverFakeCuda):
    pinned = False
