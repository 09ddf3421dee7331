"""The devices that `bench_dma` measures: the CPU, and a GPU through CuPy."""

import copy
import ctypes
import importlib.util
import platform
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from tierstore.config import GpuConfig
from tierstore.dma.gpu.cuda_api import DirectedRuns
from tierstore.dma.gpu.cupy_api import CupyApi
from tierstore.dma.gpu.engine import CudaCopyEngine
from tierstore.dma.host import HostCopyEngine
from tierstore.dma.protocol import CopyEngine
from tierstore.metrics import Counters

_NEVER_BYTES = 1 << 40
_OFF = GpuConfig(kernel_below_bytes=0, kernel_runs=1, pitched_from_bytes=_NEVER_BYTES)
_METHODS = {
    "chosen": GpuConfig(),
    "plain": _OFF,
    "batch": _OFF,
    "pitched": GpuConfig(kernel_below_bytes=0, kernel_runs=1, pitched_from_bytes=1),
    "kernel": GpuConfig(
        kernel_below_bytes=_NEVER_BYTES, kernel_runs=1, pitched_from_bytes=_NEVER_BYTES
    ),
}
_COMPUTE_KERNEL = r"""
extern "C" __global__ void compute(float* values, int rounds) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    float value = values[i];
    for (int n = 0; n < rounds; n++) {
        value = value * 1.000001f + 0.5f;
        if ((n & 255) == 0) {
            values[i] = value;
            value += values[i ^ 1024];
        }
    }
    values[i] = value;
}
"""
_COMPUTE_LAUNCHES = 20
_DRIVER_VERSION = Path("/proc/driver/nvidia/version")


class Device(Protocol):
    """What the benchmark needs of a device."""

    name: str

    def methods(self) -> list[str]:
        """Ways of copying that can be forced."""

    def engine(self, method: str) -> CopyEngine:
        """Return an engine that copies that way."""

    def alloc(self, size_bytes: int) -> int:
        """Allocate memory for blocks."""

    def free(self, address: int) -> None:
        """Free it."""

    def large_copy(self, direction: str, blocks: int, slots: int, size_bytes: int) -> float:
        """Return the seconds of one large copy (two at once for `both`)."""


class ComputeDevice(Device, Protocol):
    """A device that computes beside copies."""

    def compute(self, beside: Callable[[], None]) -> float:
        """Return the milliseconds of a kernel while `beside` is called again and again."""


class CpuDevice:
    """Host memory on both sides."""

    def __init__(self) -> None:
        self.name = "cpu"
        self._arrays: dict[int, Any] = {}

    def methods(self) -> list[str]:
        """One."""
        return ["memmove"]

    def engine(self, method: str) -> CopyEngine:
        """Return the host engine."""
        assert method == "memmove"
        return HostCopyEngine()

    def alloc(self, size_bytes: int) -> int:
        """Allocate touched memory."""
        array = np.ones(size_bytes, np.uint8)
        self._arrays[array.ctypes.data] = array
        return int(array.ctypes.data)

    def free(self, address: int) -> None:
        """Free it."""
        del self._arrays[address]

    def large_copy(self, direction: str, blocks: int, slots: int, size_bytes: int) -> float:
        """Time one memmove, or two."""
        started_at = perf_counter()
        if direction in {"offload", "both"}:
            ctypes.memmove(slots, blocks, size_bytes)
        if direction in {"load", "both"}:
            ctypes.memmove(blocks + size_bytes, slots + size_bytes, size_bytes)
        return perf_counter() - started_at


class CudaDevice:
    """A GPU; the pool of every engine is pinned before it is used."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.index = int(name.removeprefix("cuda:"))
        self._api = CupyApi(self.index, kernel_sms=GpuConfig().kernel_sms)
        self._streams = [self._api.create_stream() for _ in range(2)]
        self._pinned_address = 0
        self._pinned_bytes = 0

    def methods(self) -> list[str]:
        """Those that driver and device know."""
        missing = set()
        if not self._api.has_batch:
            missing.add("batch")
        if not self._api.has_kernel:
            missing.add("kernel")
        return [method for method in _METHODS if method not in missing]

    def engine(self, method: str) -> CopyEngine:
        """Return an engine with thresholds that leave one method."""
        config = _METHODS[method]
        api = copy.copy(self._api)  # the kernel is compiled once
        if method == "plain":
            api.has_batch = False
        return CudaCopyEngine(
            api,
            device=self.name,
            config=config,
            counters=Counters(),
            spawn=lambda task: task(),
        )

    def alloc(self, size_bytes: int) -> int:
        """Allocate device memory."""
        return self._api.alloc_device(size_bytes)

    def free(self, address: int) -> None:
        """Free it."""
        self._api.free_device(address)

    def large_copy(self, direction: str, blocks: int, slots: int, size_bytes: int) -> float:
        """Time one asynchronous copy per direction.

        From and to memory of CUDA's own allocation instead of the slots: those are registered in
        pieces, and no single copy reaches across two.
        """
        slots = self._pinned(2 * size_bytes)
        started_at = perf_counter()
        if direction in {"offload", "both"}:
            self._api.copy_each(_one(slots, blocks, size_bytes), self._streams[0])
        if direction in {"load", "both"}:
            shifted = _one(blocks + size_bytes, slots + size_bytes, size_bytes)
            self._api.copy_each(shifted, self._streams[1])
        for stream in self._streams:
            self._api.synchronize(stream)
        return perf_counter() - started_at

    def _pinned(self, size_bytes: int) -> int:
        if self._pinned_bytes < size_bytes:
            if self._pinned_bytes:
                self._api.free_host(self._pinned_address)
            self._pinned_address = self._api.alloc_host(size_bytes)
            self._pinned_bytes = size_bytes
        return self._pinned_address

    def compute(self, beside: Callable[[], None]) -> float:
        """Return the milliseconds of a kernel while `beside` is called again and again."""
        import cupy

        values = cupy.zeros(1 << 22, dtype=cupy.float32)
        kernel = cupy.RawKernel(_COMPUTE_KERNEL, "compute")
        stream = cupy.cuda.Stream(non_blocking=True)
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        kernel.compile()  # not between the events
        cupy.cuda.runtime.deviceSynchronize()
        with stream:
            start.record()
            for _ in range(_COMPUTE_LAUNCHES):
                kernel((values.size // 256,), (256,), (values, cupy.int32(20_000)))
            stop.record()
        while not stop.done:
            beside()
        return float(cupy.cuda.get_elapsed_time(start, stop))


def _one(target: int, source: int, size_bytes: int) -> DirectedRuns:
    return DirectedRuns(np.array([target]), np.array([source]), np.array([size_bytes]))


def open_device(name: str | None) -> Device:
    """Open the named device; without a name a GPU if CuPy and a driver are there, else the CPU."""
    if name == "cpu" or (name is None and not _has_gpu()):
        return CpuDevice()
    return CudaDevice(name or "cuda:0")


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() and importlib.util.find_spec("cupy") is not None


def facts(device: Device) -> dict[str, object]:
    """Return where and with what was measured."""
    folder = Path(__file__).parent
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=folder, capture_output=True, text=True
    )
    found: dict[str, object] = {
        "device": device.name,
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "commit": commit.stdout.strip(),
    }
    if isinstance(device, CudaDevice):
        import cupy

        runtime = cupy.cuda.runtime
        found["card"] = runtime.getDeviceProperties(device.index)["name"].decode()
        found["driver"] = _driver_version()
        found["driver_cuda"] = runtime.driverGetVersion()
        found["runtime_cuda"] = runtime.runtimeGetVersion()
        found["cupy"] = cupy.__version__
    return found


def _driver_version() -> str:
    try:
        found = re.search(r"\d+\.\d[.\d]*", _DRIVER_VERSION.read_text())
    except OSError:  # not every container has the file
        found = None
    return found.group() if found else "unknown"
