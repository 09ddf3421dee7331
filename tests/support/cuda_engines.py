"""CUDA copy engines over the fake CUDA, as several tests need them."""

from collections.abc import Callable

from tierstore.config import GpuConfig
from tierstore.dma.gpu.engine import CudaCopyEngine
from tierstore.metrics import Counters
from tierstore.testing.fake_cuda import FakeCuda

NEVER_BYTES = 1 << 30

BATCHES = GpuConfig(kernel_below_bytes=0, kernel_runs=1, pitched_from_bytes=NEVER_BYTES)
KERNELS = GpuConfig(kernel_below_bytes=NEVER_BYTES, kernel_runs=1, pitched_from_bytes=NEVER_BYTES)
RECTANGLES = GpuConfig(kernel_below_bytes=0, kernel_runs=1, pitched_from_bytes=1)
MIXED = GpuConfig(kernel_below_bytes=100, kernel_runs=2, pitched_from_bytes=128)
MEASURED = GpuConfig()


def make_engine(
    api: FakeCuda,
    config: GpuConfig = BATCHES,
    *,
    pinned: bool = True,
    counters: Counters | None = None,
    compute_stream: Callable[[], int] | None = None,
) -> CudaCopyEngine:
    """An engine whose pool is pinned as soon as it is registered, or never."""
    return CudaCopyEngine(
        api,
        device="cuda:0",
        config=config,
        counters=counters or Counters(),
        spawn=(lambda task: task()) if pinned else None,
        compute_stream=compute_stream,
    )
