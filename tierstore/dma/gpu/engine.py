r"""Copy engine of CUDA devices: pinned slots <-> GPU blocks, beside the engine's work.

    compute stream   step n ......... | step n+1 (after the fence) ...
                          \ event      ^ event
    offload stream         `-> copies --'
    load stream            `-> copies of promoted chunks        (after what the mark names)
    urgent stream          `-> copies of resident chunks        (likewise)

Nothing here waits on the CPU: streams wait for events, and `poll` asks them. What waits for what:

- an offload reads its blocks after the work launched before `submit_offload`;
- the work launched after `fence` writes after those offloads have read;
- a load writes its blocks after the work launched before its mark (an earlier owner of the blocks
  may still be computing), and so after the offloads fenced before it. Nothing waits for a load:
  the engine schedules the request when `poll` has named its last copy.
"""

import logging
from collections import deque
from collections.abc import Callable

from tierstore.bounded_log import bounded
from tierstore.clock import MonotonicClock
from tierstore.config import GpuConfig
from tierstore.dma.background import BackgroundTurns, Spawn, no_io
from tierstore.dma.gpu.calibration import measure_thresholds
from tierstore.dma.gpu.copy_stream import (
    CopyProgress,
    CopyStream,
    EventPool,
    QueuedCopy,
    StreamMark,
)
from tierstore.dma.gpu.cuda_api import COMPUTE_STREAM_DEFAULT, CudaApi, Stream
from tierstore.dma.gpu.method_check import drop_failing_methods
from tierstore.dma.gpu.methods import (
    CopyCalls,
    CopyDirection,
    MethodSelector,
    RegionBorders,
    Thresholds,
)
from tierstore.dma.gpu.pinning import PoolPinner
from tierstore.dma.protocol import ComputeMark, CopyId
from tierstore.dma.runs import GroupAddressing
from tierstore.errors import DeviceError, LayoutError
from tierstore.layout import CanonicalKVCaches
from tierstore.metrics import Counters
from tierstore.transfer import IntArray

__all__ = ["CudaCopyEngine"]

_logger = bounded(logging.getLogger(__name__))

_STREAM_COUNT = 3
"""Offloads, loads, urgent loads."""

_UNMEASURED = Thresholds(kernel_below_bytes=0, kernel_runs_min=1, pitched_from_bytes=None)
"""Without a measurement: batches, or plain copies, which are right at every size."""


class _EventMark(ComputeMark):
    """A point in the compute stream's work."""

    def __init__(self, point: StreamMark) -> None:
        self.point = point


class CudaCopyEngine:
    """Copies on three streams of its own; see `CopyEngine` for the contract.

    `submit_load` may be called from any thread, everything else from one. Costs numpy arithmetic
    per page and one call per method that the runs need, up to 250 to 4096 runs each.
    """

    def __init__(
        self,
        api: CudaApi,
        *,
        device: str,
        config: GpuConfig,
        counters: Counters,
        spawn: Spawn | None,
        is_io_under_way: Callable[[], bool] = no_io,
        compute_stream: Callable[[], int] | None = None,
    ) -> None:
        """Do nothing yet; `register` takes streams and memory.

        Args:
            api: of the device `device`.
            device: what `CanonicalKVCaches.device` must say.
            config: given thresholds; those missing are measured.
            counters: bytes and seconds of pinning.
            spawn: runs pinning tasks in the background; None: the pool stays pageable.
            is_io_under_way: whether slots are read or written; pinning gives way to that, too.
            compute_stream: returns the `cudaStream_t` on which the engine launches its work, when
                called by the thread that does; None: the legacy default stream.
        """
        self._api = api
        self._device = device
        self._config = config
        self._counters = counters
        self._spawn = spawn
        self._is_io_under_way = is_io_under_way
        self._compute_stream = compute_stream
        self._groups: dict[int, GroupAddressing] = {}
        self._caches: CanonicalKVCaches | None = None
        self._marks: deque[StreamMark] = deque()
        self._events = EventPool(api)
        self._streams: list[CopyStream] = []
        self._pinner: PoolPinner | None = None
        self._selector: MethodSelector | None = None
        self._failed: list[CopyId] = []

    def register(
        self, caches: CanonicalKVCaches, blocks_per_chunk: int, pool_address: int, pool_bytes: int
    ) -> None:
        """Learn the regions, try and measure the methods, take streams, start to pin the pool.

        Raises:
            LayoutError: the caches are on another device.
            DeviceError: the device refused a stream or memory.
        """
        if caches.device != self._device:
            raise LayoutError(
                f"CUDA copy engine: expected device {self._device}, got {caches.device}"
            )
        self._api.use_device()
        groups = {
            group_idx: GroupAddressing(
                caches, group_idx, blocks_per_chunk, pool_address, pool_bytes
            )
            for group_idx, refs in enumerate(caches.group_refs)
            if refs
        }
        pinned_bytes = pool_bytes if self._spawn is not None else 0
        self._pinner = PoolPinner(
            self._api,
            pool_address,
            pinned_bytes,
            self._counters,
            turns=BackgroundTurns(self._is_transferring),
        )
        drop_failing_methods(self._api)
        self._selector = MethodSelector(
            _thresholds(self._api, self._config),
            RegionBorders(_device_borders(self._api, caches), self._pinner.borders),
            has_batch=self._api.has_batch,
            has_kernel=self._api.has_kernel,
        )
        try:
            while len(self._streams) < _STREAM_COUNT:
                self._streams.append(CopyStream(self._api, self._events))
        except DeviceError:
            self.close()
            raise
        self._caches = caches
        self._groups = groups
        if self._spawn is not None:
            self._pinner.open(self._spawn)

    def submit_offload(
        self, copy_id: CopyId, group_idx: int, block_ids: IntArray, slots: IntArray
    ) -> None:
        """Copy blocks to slots, after the work that the engine has launched so far."""
        calls = self._calls(group_idx, block_ids, slots, CopyDirection.OFFLOAD)
        after = self._mark()
        self._stream_for(CopyDirection.OFFLOAD).submit(
            QueuedCopy(copy_id, calls, after, early_reads=False)
        )

    def submit_load(
        self,
        copy_id: CopyId,
        group_idx: int,
        block_ids: IntArray,
        slots: IntArray,
        *,
        after: ComputeMark | None = None,
        urgent: bool = False,
    ) -> None:
        """Copy slots to blocks, after the work that `after` names; from any thread."""
        calls = self._calls(group_idx, block_ids, slots, CopyDirection.LOAD)
        point = after.point if isinstance(after, _EventMark) else None
        self._stream_for(CopyDirection.LOAD, urgent=urgent).submit(
            QueuedCopy(copy_id, calls, point, early_reads=True)
        )

    def mark_compute(self) -> ComputeMark:
        """Name the work that the engine has launched so far. Costs one event.

        Taken when a load's command arrives. An event recorded once its record is read would come
        from another thread, and wait for later steps too.
        """
        self._api.use_device()
        return _EventMark(self._mark())

    def poll(self) -> list[CopyId]:
        """Return the copies whose bytes have arrived, and submit what was held back."""
        if not self._streams:
            return []
        self._api.use_device()
        self._drop_passed_marks()
        arrived: list[CopyId] = []
        for stream in self._streams:
            progress = stream.poll()
            arrived += progress.arrived
            self._failed += progress.failed
        return arrived

    def take_failed(self) -> list[CopyId]:
        """Return the copies that CUDA refused, once; none of their calls is under way."""
        failed, self._failed = self._failed, []
        return failed

    def fence(self, copy_ids: tuple[CopyId, ...]) -> None:
        """Let the compute stream wait until these offloads have read their blocks."""
        if copy_ids and self._streams:
            self._api.use_device()
            self._stream_for(CopyDirection.OFFLOAD).hold_stream(self._compute(), set(copy_ids))

    def close(self) -> None:
        """Wait for what was submitted, unpin the pool, give everything back; idempotent."""
        streams, self._streams = self._streams, []
        self._groups = {}
        if not streams or self._pinner is None:
            return
        self._api.use_device()
        for stream in streams:
            try:
                _report_lost(stream.close())
            except DeviceError as error:
                _logger.error("stream could not be closed: cause=%s", error)
        for mark in self._marks:
            if mark.event is not None:
                self._events.give(mark.event)
        self._marks.clear()
        self._pinner.close()
        try:
            self._events.close()
        except DeviceError as error:
            _logger.error("events could not be destroyed: cause=%s", error)
        self._caches = None

    def _calls(
        self, group_idx: int, block_ids: IntArray, slots: IntArray, direction: CopyDirection
    ) -> deque[CopyCalls]:
        addressing = self._groups.get(group_idx)
        if addressing is None or self._selector is None or self._pinner is None:
            raise LayoutError(f"group {group_idx} is not registered for copies")
        self._api.use_device()
        runs = self._selector.cut(addressing.runs(block_ids, slots))
        pinned = self._pinner.pinned(runs.pool_addresses)
        return deque(self._selector.select(runs, pinned, direction))

    def _is_transferring(self) -> bool:
        return self._is_io_under_way() or any(stream.is_under_way for stream in self._streams)

    def _stream_for(self, direction: CopyDirection, *, urgent: bool = False) -> CopyStream:
        if not self._streams:
            raise LayoutError("the copy engine is closed")
        offloads, loads, urgent_loads = self._streams
        if direction is CopyDirection.OFFLOAD:
            return offloads
        return urgent_loads if urgent else loads

    def _compute(self) -> Stream:
        if self._compute_stream is None:
            return COMPUTE_STREAM_DEFAULT
        return Stream(self._compute_stream())

    def _mark(self) -> StreamMark:
        mark = StreamMark(self._events.record(self._compute()))
        self._marks.append(mark)
        return mark

    def _drop_passed_marks(self) -> None:
        # In order: they were recorded on one stream. A thread that read the event just before it
        # is used again waits for a later point; that is late, never wrong, and never a circle.
        while self._marks:
            event = self._marks[0].event
            if event is not None and not self._api.is_complete(event):
                return
            self._marks.popleft().event = None
            if event is not None:
                self._events.give(event)


def _thresholds(api: CudaApi, config: GpuConfig) -> dict[CopyDirection, Thresholds]:
    """Measure what the configuration leaves open."""
    given = (config.kernel_below_bytes, config.kernel_runs, config.pitched_from_bytes)
    measured = dict.fromkeys(CopyDirection, _UNMEASURED)
    if None in given:
        try:
            measured = measure_thresholds(api, MonotonicClock())
        except DeviceError as error:
            _logger.warning("copies not measured, batches it is: cause=%s", error)
    return {
        direction: Thresholds(
            kernel_below_bytes=_or(config.kernel_below_bytes, found.kernel_below_bytes),
            kernel_runs_min=_or(config.kernel_runs, found.kernel_runs_min),
            pitched_from_bytes=found.pitched_from_bytes
            if config.pitched_from_bytes is None
            else config.pitched_from_bytes,
        )
        for direction, found in measured.items()
    }


def _or(given: int | None, measured: int) -> int:
    return measured if given is None else given


def _device_borders(api: CudaApi, caches: CanonicalKVCaches) -> list[int]:
    """Return where the device allocations of the caches start and end."""
    borders: list[int] = []
    for tensor in caches.tensors:
        found = api.allocation_of(tensor.address)
        if found is None:
            pages = tensor.block_count - 1
            end = tensor.address + pages * tensor.block_stride_bytes + tensor.page_bytes
            borders += [tensor.address, end]
        else:
            borders += [found.start, found.stop]
    return borders


def _report_lost(progress: CopyProgress) -> None:
    if progress.failed:
        _logger.error("copies failed at close: copies=%d", len(progress.failed))
