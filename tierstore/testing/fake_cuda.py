"""A CUDA that copies host memory, out of step with its caller and as late as a test wants.

    streams   queues of work; each step takes the head of one stream, chosen by a seeded lottery
    events    complete when their place in a stream's queue is reached; waits hold a queue back
    memory    device allocations are host memory; host memory is registered or not, as in CUDA

Nothing happens but in `step`, which `is_complete` and `synchronize` call. What CUDA would refuse is
refused: a copy across two registrations or allocations, a kernel on memory that is not registered,
a thread without a device, an event that does not exist.
"""

import ctypes
import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np

from tierstore.arrays import ByteArray
from tierstore.dma.gpu.cuda_api import AddressRange, DirectedRuns, Event, Rectangles, Stream
from tierstore.errors import DeviceBusyError, DeviceError
from tierstore.testing.fake_streams import FakeStreams
from tierstore.transfer import IntArray

__all__ = ["FakeCuda", "FakeDeviceMemory"]

_EARLY_SHARE = 0.5
"""How many of the batches that may read early do."""


@dataclass(slots=True)
class _Memory:
    ranges: dict[int, ByteArray | int] = field(default_factory=dict)
    """By address: what keeps the bytes, or how many they are."""

    def size_of(self, address: int) -> int:
        found = self.ranges[address]
        return found if isinstance(found, int) else len(found)

    def touched(self, start: int, stop: int) -> list[int]:
        """Return the addresses of the ranges that [start, stop) touches."""
        return [a for a in self.ranges if start < a + self.size_of(a) and a < stop]

    def holds(self, start: int, stop: int) -> bool:
        return any(a <= start and stop <= a + self.size_of(a) for a in self.ranges)


class FakeCuda:
    """`CudaApi` for tests; thread-safe. Public fields may be read and set by tests."""

    def __init__(
        self,
        *,
        seed: int = 0,
        has_batch: bool = True,
        has_kernel: bool = True,
        steps_per_query: int = 3,
    ) -> None:
        """`steps_per_query`: how much work each question after an event lets happen."""
        self.has_batch = has_batch
        self.has_kernel = has_kernel
        self.calls: list[str] = []
        """Names of the calls that enqueued work or changed memory, in order."""
        self.fail_calls: set[int] = set()
        """Which calls to refuse, counted from 0, of those that enqueue, create, or take memory."""
        self.busy = False
        """Refuse registrations for the time being."""
        self.capturing = False
        """A graph is being captured: threads register memory only after `relax_capture`."""
        self.node: int | None = None
        """What `numa_node` answers."""
        self.fallible_count = 0
        """How many such calls there have been."""
        self._steps_per_query = steps_per_query
        self._random = random.Random(seed)  # noqa: S311 - a lottery of a test
        self.streams = FakeStreams(self._random)
        self._lock = threading.RLock()
        self._here = threading.local()
        self._device = _Memory()
        self._registered = _Memory()

    def step(self) -> bool:
        """Do the next piece of work of some stream; False: none can go on."""
        with self._lock:
            return self.streams.step()

    def run_all(self) -> None:
        """Do all work that can be done."""
        while self.step():
            pass

    def launch(self, stream: Stream, kernel: Callable[[], None]) -> None:
        """Enqueue any work: what the engine's kernels do."""
        with self._lock:
            self.streams.launch(stream, kernel)

    @property
    def registered_bytes(self) -> int:
        """Host memory that is registered now, `alloc_host` included."""
        return sum(self._registered.size_of(address) for address in self._registered.ranges)

    @property
    def resource_count(self) -> int:
        """Streams, events and allocations that are not given back."""
        streams, events = len(self.streams.handles) - 1, self.streams.event_count
        return streams + events + len(self._device.ranges) + len(self._registered.ranges)

    def use_device(self) -> None:
        """Note that the thread has the device."""
        self._here.device = True

    def relax_capture(self) -> None:
        """Note that the thread may register memory during a capture."""
        with self._enter("relax_capture"):
            self._here.relaxed = True

    def create_stream(self) -> Stream:
        """Create a stream."""
        with self._enter("create_stream", fallible=True):
            return self.streams.create_stream()

    def destroy_stream(self, stream: Stream) -> None:
        """Destroy an idle stream."""
        with self._enter("destroy_stream"):
            self.streams.destroy_stream(stream)

    def synchronize(self, stream: Stream) -> None:
        """Step until the stream is idle."""
        with self._enter("synchronize"):
            while not self.streams.is_idle(stream):
                assert self.step(), "no stream can go on: a deadlock on the device"

    def create_event(self) -> Event:
        """Create an event, complete."""
        with self._enter("create_event", fallible=True):
            return self.streams.create_event()

    def destroy_event(self, event: Event) -> None:
        """Destroy an event."""
        with self._enter("destroy_event"):
            self.streams.destroy_event(event)

    def record_event(self, event: Event, stream: Stream) -> None:
        """Complete this recording when the stream gets there."""
        with self._enter("record_event", fallible=True):
            self.streams.record(event, stream)

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Hold the stream back until the event's last recording is complete."""
        with self._enter("wait_event", fallible=True):
            self.streams.wait(stream, event)

    def is_complete(self, event: Event) -> bool:
        """Let some work happen, then ask."""
        with self._enter(""):
            for _ in range(self._steps_per_query):
                self.step()
            return self.streams.is_complete(event)

    def copy_each(self, runs: DirectedRuns, stream: Stream) -> None:
        """Enqueue one copy per run."""
        with self._enter("copy_each", fallible=True):
            for run in _rows(runs):
                self._check(*run)
            for run in _rows(runs):
                self._enqueue_copy(stream, [run])

    def copy_pitched(self, rectangles: Rectangles, stream: Stream) -> None:
        """Enqueue one copy of all rows per rectangle."""
        with self._enter("copy_pitched", fallible=True):
            for i in range(len(rectangles)):
                rows = _rows(_unrolled(rectangles, i))
                (first_to, first_from, _), (last_to, last_from, width) = rows[0], rows[-1]
                self._check_side(first_to, last_to + width)
                self._check_side(first_from, last_from + width)
                self._enqueue_copy(stream, rows)

    def copy_batch(self, runs: DirectedRuns, stream: Stream, *, early_reads: bool) -> None:
        """Enqueue all runs as one entry; with `early_reads`, sources may be read now."""
        with self._enter("copy_batch", fallible=True):
            if not self.has_batch or stream == 0:
                raise DeviceError("cuMemcpyBatchAsync: CUresult 1")
            rows = _rows(runs)
            for run in rows:
                self._check(*run)
            if early_reads and self._random.random() < _EARLY_SHARE:
                data = [ctypes.string_at(source, size) for _, source, size in rows]
                self.streams.enqueue(stream, lambda: _write(rows, data))
            else:
                self._enqueue_copy(stream, rows)

    def copy_by_kernel(self, table: IntArray, run_count: int, stream: Stream) -> None:
        """Enqueue a kernel that reads its table when it runs."""
        with self._enter("copy_by_kernel", fallible=True):
            if not self._registered.holds(table.ctypes.data, table.ctypes.data + run_count * 24):
                raise DeviceError("the kernel cannot read its table")

            def kernel() -> None:
                for target, source, size in table[:run_count].tolist():
                    for side in (target, source):
                        memories = (self._device, self._registered)
                        assert any(m.holds(side, side + size) for m in memories), "wild pointer"
                    ctypes.memmove(target, source, size)

            self.streams.enqueue(stream, kernel)

    def alloc_host(self, size_bytes: int) -> int:
        """Allocate registered memory."""
        with self._enter("alloc_host", fallible=True):
            return _keep(self._registered, np.zeros(size_bytes, np.uint8))

    def free_host(self, address: int) -> None:
        """Free registered memory."""
        with self._enter("free_host"):
            del self._registered.ranges[address]

    def alloc_device(self, size_bytes: int) -> int:
        """Allocate device memory, full of the byte 0xA5."""
        with self._enter("alloc_device", fallible=True):
            return _keep(self._device, np.full(size_bytes, 0xA5, np.uint8))

    def free_device(self, address: int) -> None:
        """Free device memory."""
        with self._enter("free_device"):
            del self._device.ranges[address]

    def allocation_of(self, address: int) -> AddressRange | None:
        """Return the device allocation that holds an address."""
        for start in self._device.touched(address, address + 1):
            return AddressRange(start, start + self._device.size_of(start))
        return None

    def register_host(self, address: int, size_bytes: int) -> None:
        """Register a range that touches no other registration."""
        with self._enter("register_host", fallible=True):
            if self.busy or (self.capturing and not getattr(self._here, "relaxed", False)):
                raise DeviceBusyError("cudaHostRegister: error 900")
            if self._registered.touched(address, address + size_bytes):
                raise DeviceError("cudaHostRegister: already registered")
            self._registered.ranges[address] = size_bytes

    def unregister_host(self, address: int) -> None:
        """Undo a registration."""
        with self._enter("unregister_host"):
            del self._registered.ranges[address]

    def numa_node(self) -> int | None:
        """Return what the test says."""
        return self.node

    def _enter(self, name: str, *, fallible: bool = False) -> AbstractContextManager[bool]:
        """Check the thread and the test's wishes; return the lock."""
        if not getattr(self._here, "device", False):
            raise DeviceError(f"{name}: the thread has no device")
        with self._lock:
            if name:
                self.calls.append(name)
            if fallible:
                self.fallible_count += 1
                if self.fallible_count - 1 in self.fail_calls:
                    raise DeviceError(f"{name}: refused by the test")
        return self._lock

    def _enqueue_copy(self, stream: Stream, rows: list[tuple[int, int, int]]) -> None:
        order = self._random.sample(rows, len(rows))
        self.streams.enqueue(stream, lambda: [ctypes.memmove(*row) for row in order])

    def _check(self, target: int, source: int, size: int) -> None:
        self._check_side(target, target + size)
        self._check_side(source, source + size)

    def _check_side(self, start: int, stop: int) -> None:
        for memory in (self._device, self._registered):
            if memory.touched(start, stop) and not memory.holds(start, stop):
                raise DeviceError("cudaErrorInvalidValue: the range crosses a border")


class FakeDeviceMemory:
    """Device memory with some bytes, for the conformance suite."""

    def __init__(self, api: FakeCuda, data: ByteArray) -> None:
        self._api = api
        self.device = "cuda:0"
        api.use_device()
        self.address = api.alloc_device(len(data))
        buffer = (ctypes.c_uint8 * len(data)).from_address(self.address)
        self._bytes: ByteArray = np.frombuffer(memoryview(buffer).cast("B"), dtype=np.uint8)
        self.write(data)

    def read(self) -> ByteArray:
        """Do all work, then copy all bytes."""
        self._api.run_all()
        return self._bytes.copy()

    def write(self, data: ByteArray) -> None:
        """Overwrite all bytes."""
        self._bytes[:] = data


def _keep(memory: _Memory, data: ByteArray) -> int:
    address = int(data.ctypes.data)
    memory.ranges[address] = data
    return address


def _rows(runs: DirectedRuns) -> list[tuple[int, int, int]]:
    return list(
        zip(runs.targets.tolist(), runs.sources.tolist(), runs.sizes_bytes.tolist(), strict=True)
    )


def _write(rows: list[tuple[int, int, int]], data: list[bytes]) -> None:
    for (target, _, size), row in zip(rows, data, strict=True):
        ctypes.memmove(target, row, size)


def _unrolled(rectangles: Rectangles, i: int) -> DirectedRuns:
    rows = np.arange(rectangles.row_counts[i])
    return DirectedRuns(
        rectangles.targets[i] + rows * rectangles.target_pitches_bytes[i],
        rectangles.sources[i] + rows * rectangles.source_pitches_bytes[i],
        np.full(len(rows), rectangles.widths_bytes[i]),
    )
