"""What the CUDA copy engine asks of CUDA: the seam between it and CuPy.

Two implementations: `cupy_api` (a real device) and `testing.fake_cuda` (copies host memory, out of
step with the caller). Addresses are plain integers. Every call may raise `DeviceError`.
"""

from dataclasses import dataclass
from typing import NewType, Protocol

from tierstore.transfer import IntArray

__all__ = [
    "COMPUTE_STREAM_DEFAULT",
    "AddressRange",
    "CudaApi",
    "DirectedRuns",
    "Event",
    "Rectangles",
    "Stream",
]

Stream = NewType("Stream", int)
"""A `cudaStream_t`."""
Event = NewType("Event", int)
"""A `cudaEvent_t` without timing."""

COMPUTE_STREAM_DEFAULT = Stream(0)
"""The legacy default stream: where torch works unless told otherwise."""


@dataclass(frozen=True, slots=True)
class AddressRange:
    """Half-open range of addresses [start, stop)."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class DirectedRuns:
    """Copies to make, as three int64 arrays of one length; none depends on another."""

    targets: IntArray
    sources: IntArray
    sizes_bytes: IntArray

    def __len__(self) -> int:
        return len(self.sizes_bytes)

    def __getitem__(self, chosen: slice | IntArray) -> "DirectedRuns":
        return DirectedRuns(self.targets[chosen], self.sources[chosen], self.sizes_bytes[chosen])


@dataclass(frozen=True, slots=True)
class Rectangles:
    """Copies of equally spaced rows of equal width, as six int64 arrays of one length."""

    targets: IntArray
    sources: IntArray
    widths_bytes: IntArray
    row_counts: IntArray
    target_pitches_bytes: IntArray
    source_pitches_bytes: IntArray

    def __len__(self) -> int:
        return len(self.widths_bytes)

    def __getitem__(self, chosen: slice) -> "Rectangles":
        return Rectangles(
            self.targets[chosen],
            self.sources[chosen],
            self.widths_bytes[chosen],
            self.row_counts[chosen],
            self.target_pitches_bytes[chosen],
            self.source_pitches_bytes[chosen],
        )


class CudaApi(Protocol):
    """The calls of one device. Thread-safe; a thread calls `use_device` before anything else.

    Copies and events are enqueued on a stream and return at once. The one exception: a copy from
    or to host memory that is not registered may wait for the bytes to move.
    """

    has_batch: bool
    """`copy_batch` works here."""
    has_kernel: bool
    """`copy_by_kernel` works here: the device reads registered memory at its host address."""

    def use_device(self) -> None:
        """Make the device current in the calling thread."""

    def relax_capture(self) -> None:
        """Let the calling thread register memory while another one captures a CUDA graph."""

    def create_stream(self) -> Stream:
        """Create a stream that never waits for the default stream by itself."""

    def destroy_stream(self, stream: Stream) -> None:
        """Destroy a stream that has nothing left to do."""

    def synchronize(self, stream: Stream) -> None:
        """Wait until the stream has done all that it was given; never on an engine's step."""

    def create_event(self) -> Event:
        """Create an event without timing."""

    def destroy_event(self, event: Event) -> None:
        """Destroy an event."""

    def record_event(self, event: Event, stream: Stream) -> None:
        """Complete the event when the stream has done all that it was given so far."""

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Let the stream's later work wait for the event as recorded now.

        The event may be recorded again right after the call.
        """

    def is_complete(self, event: Event) -> bool:
        """Return whether what was recorded last is done. Never blocks."""

    def copy_each(self, runs: DirectedRuns, stream: Stream) -> None:
        """Enqueue one asynchronous copy per run, of any kind of memory."""

    def copy_pitched(self, rectangles: Rectangles, stream: Stream) -> None:
        """Enqueue one 2-D copy per rectangle."""

    def copy_batch(self, runs: DirectedRuns, stream: Stream, *, early_reads: bool) -> None:
        """Enqueue all runs with one call.

        `early_reads` allows to read the sources before the stream's turn: they are complete.
        """

    def copy_by_kernel(self, table: IntArray, run_count: int, stream: Stream) -> None:
        """Launch one kernel that copies `run_count` rows (target, source, bytes) of a table.

        The table lies in memory of `alloc_host` and is read when the kernel runs.
        """

    def alloc_host(self, size_bytes: int) -> int:
        """Allocate registered host memory; return its address."""

    def free_host(self, address: int) -> None:
        """Free memory of `alloc_host`."""

    def alloc_device(self, size_bytes: int) -> int:
        """Allocate device memory; return its address."""

    def free_device(self, address: int) -> None:
        """Free memory of `alloc_device`."""

    def allocation_of(self, address: int) -> AddressRange | None:
        """Return the device allocation that holds an address; None: unknown.

        No copy may reach across two allocations, even where their addresses are adjacent.
        """

    def register_host(self, address: int, size_bytes: int) -> None:
        """Pin pages and map them for the device.

        Raises:
            DeviceBusyError: a CUDA graph is being captured; try again later.
        """

    def unregister_host(self, address: int) -> None:
        """Undo `register_host`."""

    def numa_node(self) -> int | None:
        """Return the NUMA node next to the device; None: unknown."""
