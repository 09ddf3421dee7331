"""CUDA through CuPy, and through the driver where CuPy has no name for a call.

The one module that imports cupy, when `CupyApi` is built. Streams, events and addresses belong to
the device's primary context, so those of torch are as good here. CuPy's wheels have a CUDA runtime
of their own, other builds share torch's. What is left there as a thread's last error torch would
take for its own: CuPy's calls clear it, but for the one that asks events, so the driver is asked.
Exceptions of CuPy become `DeviceError` here and nowhere else.
"""

import ctypes
import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from tierstore.bounded_log import bounded
from tierstore.dma.gpu.cuda_api import AddressRange, DirectedRuns, Event, Rectangles, Stream
from tierstore.dma.gpu.kernel_source import KERNEL_NAME, KERNEL_SOURCE, THREADS_PER_BLOCK
from tierstore.errors import DeviceBusyError, DeviceError, MissingExtraError
from tierstore.transfer import IntArray

__all__ = ["CupyApi"]

_logger = bounded(logging.getLogger(__name__))

_SUCCESS, _NOT_READY = 0, 600
_CAPTURE_ERRORS = range(900, 908)
"""cudaErrorStreamCaptureUnsupported .. cudaErrorCapturedEvent."""
_MEMCPY_DEFAULT = 4
_EVENT_DISABLE_TIMING = 2
_HOST_PORTABLE_MAPPED = 1 | 2
_CAPTURE_MODE_RELAXED = 2
_ATTRIBUTE_HOST_POINTER_FOR_REGISTERED_MEMORY = 91
_SOURCE_ORDER_STREAM, _SOURCE_ORDER_ANY = 1, 3
_FLAG_OVERLAP_WITH_COMPUTE = 1

_WARPS_PER_BLOCK = THREADS_PER_BLOCK // 32
_PARTS_MAX = 16

_OVERLAP_BYTES_MAX = 128 << 10
"""Larger copies use the copy engines anyway; for them the flag is known to cost bandwidth."""


class _MemLocation(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _MemcpyAttributes(ctypes.Structure):
    """CUmemcpyAttributes of CUDA 12.8 and 13."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_location_hint", _MemLocation),
        ("target_location_hint", _MemLocation),
        ("flags", ctypes.c_uint),
    )


class CupyApi:
    """`CudaApi` of one device."""

    def __init__(self, device_index: int, *, kernel_sms: int) -> None:
        """Look at the device, and compile the kernel (some 100 ms).

        The kernel keeps at most `kernel_sms` multiprocessors busy.

        Raises:
            MissingExtraError: CuPy is not installed.
            DeviceError: there is no such device, or no driver, or CuPy cannot start.
        """
        cupy = self._cupy = _import_cupy()
        self._runtime: Any = cupy.cuda.runtime
        self._device_index = device_index
        self._kernel_sms = kernel_sms
        self._streams: dict[int, Any] = {}
        self._driver = _load_driver(ctypes.CDLL)
        # Keeps the interpreter: to release it for a question that does not wait costs more.
        self._quick_driver = _load_driver(ctypes.PyDLL)
        self.has_batch = False
        self.has_kernel = False
        self.use_device()
        with self._translated("device attributes"):
            same_pointer = self._runtime.deviceGetAttribute(
                _ATTRIBUTE_HOST_POINTER_FOR_REGISTERED_MEMORY, device_index
            )
        # Elsewhere the device knows registered memory by another address, which only plain copies
        # translate; no server has such a device.
        if same_pointer:
            self.has_batch = _has(self._driver, "cuMemcpyBatchAsync")
            self._kernel = self._compile()
            self.has_kernel = self._kernel is not None

    def use_device(self) -> None:
        """Make the device current in the calling thread."""
        with self._translated("cudaSetDevice"):
            self._runtime.setDevice(self._device_index)

    def relax_capture(self) -> None:
        """Let the calling thread register memory while another one captures a CUDA graph."""
        if _has(self._driver, "cuThreadExchangeStreamCaptureMode"):
            mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def create_stream(self) -> Stream:
        """Create a non-blocking stream of the lowest priority."""
        with self._translated("cudaStreamCreate"):
            stream = self._cupy.cuda.Stream(non_blocking=True)
        self._streams[stream.ptr] = stream
        return Stream(stream.ptr)

    def destroy_stream(self, stream: Stream) -> None:
        """Destroy a stream; CuPy's object owns it."""
        self._streams.pop(stream, None)

    def synchronize(self, stream: Stream) -> None:
        """Wait for a stream."""
        with self._translated("cudaStreamSynchronize"):
            self._runtime.streamSynchronize(stream)

    def create_event(self) -> Event:
        """Create an event without timing."""
        with self._translated("cudaEventCreate"):
            return Event(self._runtime.eventCreateWithFlags(_EVENT_DISABLE_TIMING))

    def destroy_event(self, event: Event) -> None:
        """Destroy an event."""
        with self._translated("cudaEventDestroy"):
            self._runtime.eventDestroy(event)

    def record_event(self, event: Event, stream: Stream) -> None:
        """Record an event."""
        with self._translated("cudaEventRecord"):
            self._runtime.eventRecord(event, stream)

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Let a stream wait for an event."""
        with self._translated("cudaStreamWaitEvent"):
            self._runtime.streamWaitEvent(stream, event)

    def is_complete(self, event: Event) -> bool:
        """Ask an event; it is not complete while a graph is captured that forbids to ask."""
        status = int(self._quick_driver.cuEventQuery(ctypes.c_void_p(event)))
        if status == _SUCCESS:
            return True
        if status == _NOT_READY or status in _CAPTURE_ERRORS:
            return False
        raise DeviceError(f"cuEventQuery: CUresult {status}")

    def copy_each(self, runs: DirectedRuns, stream: Stream) -> None:
        """Enqueue one `cudaMemcpyAsync` per run."""
        with self._translated("cudaMemcpyAsync"):
            deque(
                map(
                    self._runtime.memcpyAsync,
                    runs.targets.tolist(),
                    runs.sources.tolist(),
                    runs.sizes_bytes.tolist(),
                    repeat(_MEMCPY_DEFAULT),
                    repeat(int(stream)),
                ),
                maxlen=0,
            )

    def copy_pitched(self, rectangles: Rectangles, stream: Stream) -> None:
        """Enqueue one `cudaMemcpy2DAsync` per rectangle."""
        with self._translated("cudaMemcpy2DAsync"):
            deque(
                map(
                    self._runtime.memcpy2DAsync,
                    rectangles.targets.tolist(),
                    rectangles.target_pitches_bytes.tolist(),
                    rectangles.sources.tolist(),
                    rectangles.source_pitches_bytes.tolist(),
                    rectangles.widths_bytes.tolist(),
                    rectangles.row_counts.tolist(),
                    repeat(_MEMCPY_DEFAULT),
                    repeat(int(stream)),
                ),
                maxlen=0,
            )

    def copy_batch(self, runs: DirectedRuns, stream: Stream, *, early_reads: bool) -> None:
        """Enqueue all runs with one `cuMemcpyBatchAsync`."""
        small = int(runs.sizes_bytes.max()) <= _OVERLAP_BYTES_MAX
        attributes = _MemcpyAttributes(
            source_access_order=_SOURCE_ORDER_ANY if early_reads else _SOURCE_ORDER_STREAM,
            flags=_FLAG_OVERLAP_WITH_COMPUTE if small else 0,
        )
        first_of_attributes, failed_at = ctypes.c_size_t(0), ctypes.c_size_t(0)
        targets, sources, sizes = (
            np.ascontiguousarray(part, dtype=np.int64)
            for part in (runs.targets, runs.sources, runs.sizes_bytes)
        )
        self._call(
            "cuMemcpyBatchAsync",
            ctypes.c_void_p(targets.ctypes.data),
            ctypes.c_void_p(sources.ctypes.data),
            ctypes.c_void_p(sizes.ctypes.data),
            ctypes.c_size_t(len(runs)),
            ctypes.byref(attributes),
            ctypes.byref(first_of_attributes),
            ctypes.c_size_t(1),
            ctypes.byref(failed_at),
            ctypes.c_void_p(stream),
        )

    def copy_by_kernel(self, table: IntArray, run_count: int, stream: Stream) -> None:
        """Launch the gather/scatter kernel."""
        parts = min(max(self._kernel_sms * _WARPS_PER_BLOCK // run_count, 1), _PARTS_MAX)
        blocks = min(self._kernel_sms, -(-run_count * parts // _WARPS_PER_BLOCK))
        arguments = (
            np.int64(table.ctypes.data),
            np.int64(run_count),
            np.int64(parts),
        )
        with self._translated("cuLaunchKernel"):
            self._kernel((blocks,), (THREADS_PER_BLOCK,), arguments, stream=self._streams[stream])

    def alloc_host(self, size_bytes: int) -> int:
        """Allocate pinned, mapped host memory."""
        with self._translated("cudaHostAlloc"):
            return int(self._runtime.hostAlloc(size_bytes, _HOST_PORTABLE_MAPPED))

    def free_host(self, address: int) -> None:
        """Free memory of `alloc_host`."""
        with self._translated("cudaFreeHost"):
            self._runtime.freeHost(address)

    def alloc_device(self, size_bytes: int) -> int:
        """Allocate device memory, past every caching allocator."""
        with self._translated("cudaMalloc"):
            return int(self._runtime.malloc(size_bytes))

    def free_device(self, address: int) -> None:
        """Free memory of `alloc_device`."""
        with self._translated("cudaFree"):
            self._runtime.free(address)

    def allocation_of(self, address: int) -> AddressRange | None:
        """Ask the driver for the allocation around an address."""
        base, size = ctypes.c_uint64(0), ctypes.c_size_t(0)
        try:
            self._call(
                "cuMemGetAddressRange_v2",
                ctypes.byref(base),
                ctypes.byref(size),
                ctypes.c_uint64(address),
            )
        except DeviceError as error:
            _logger.info("allocation unknown: cause=%s", error)
            return None
        return AddressRange(base.value, base.value + size.value)

    def register_host(self, address: int, size_bytes: int) -> None:
        """Pin and map pages."""
        with self._translated("cudaHostRegister"):
            self._runtime.hostRegister(address, size_bytes, _HOST_PORTABLE_MAPPED)

    def unregister_host(self, address: int) -> None:
        """Unpin pages."""
        with self._translated("cudaHostUnregister"):
            self._runtime.hostUnregister(address)

    def numa_node(self) -> int | None:
        """Read the device's node from sysfs."""
        try:
            with self._translated("cudaDeviceGetPCIBusId"):
                bus_id = self._runtime.deviceGetPCIBusId(self._device_index).lower()
            node = int(Path(f"/sys/bus/pci/devices/{bus_id}/numa_node").read_text())
        except (DeviceError, OSError, ValueError) as error:
            _logger.info("NUMA node of the device unknown: cause=%s", error)
            return None
        return node if node >= 0 else None

    def _compile(self) -> Any:
        """Return the kernel; None where CuPy cannot compile (no NVRTC library, for example)."""
        cuda = self._cupy.cuda
        try:
            # Not by `RawKernel`, which keeps what it compiled in the user's home directory.
            binary, _ = cuda.compiler.compile_using_nvrtc(KERNEL_SOURCE, cache_in_memory=True)
            module = cuda.Module()
            module.load(binary)
            return module.get_function(KERNEL_NAME)
        except (cuda.compiler.CompileException, RuntimeError, OSError) as error:
            _logger.warning("gather kernel not available, small runs are slower: cause=%s", error)
            return None

    def _call(self, name: str, *arguments: object) -> None:
        """Call the driver; ctypes releases the interpreter meanwhile."""
        status = int(getattr(self._driver, name)(*arguments))
        if status != _SUCCESS:
            raise DeviceError(f"{name}: CUresult {status}")

    @contextmanager
    def _translated(self, call: str) -> Iterator[None]:
        """Turn CuPy's exceptions into ours."""
        try:
            yield
        except (
            self._runtime.CUDARuntimeError,
            self._cupy.cuda.driver.CUDADriverError,
        ) as error:
            if error.status in _CAPTURE_ERRORS:
                raise DeviceBusyError(f"{call}: {error}") from error
            raise DeviceError(f"{call}: {error}") from error


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise MissingExtraError(
            "KV caches on a GPU need CuPy: install tierstore[cuda12] or tierstore[cuda13], as "
            f"the driver and torch are ({error})"
        ) from error
    except OSError as error:  # from version 14 on it makes its folder when it is imported
        raise DeviceError(
            f"CuPy cannot make its folder: {error}; set CUPY_CACHE_DIR to one that exists"
        ) from error
    return cupy


def _load_driver(kind: type[ctypes.CDLL]) -> ctypes.CDLL:
    """Open the driver's library, which has one name for each version of a signature.

    The runtime's `cudaMemcpyBatchAsync` lost an argument between CUDA 12.8 and 13 without changing
    its name; the driver's `cuMemcpyBatchAsync` keeps that of 12.8 (13 adds a `_v2`).
    """
    try:
        driver = kind("libcuda.so.1")
    except OSError as error:
        raise DeviceError(f"no NVIDIA driver: {error}") from error
    return driver


def _has(library: ctypes.CDLL, name: str) -> bool:
    return hasattr(library, name)
