"""One CUDA stream with a bounded queue: what does not fit waits in Python.

    submit --> waiting --(room?)--> stream's queue --(event complete?)--> poll names the copy

A copy call takes 180 us once a stream holds about a thousand of them, and it is made on the
engine's step. So no more than `ENTRIES_MAX` are enqueued; the rest follows in later submissions and
polls. A thread that feeds the streams lost: only plain copies fill one, and those are used only
where drivers know no batches (before CUDA 12.8).
"""

import logging
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from tierstore.bounded_log import Causes, bounded
from tierstore.dma.gpu.cuda_api import CudaApi, Event, Rectangles, Stream
from tierstore.dma.gpu.kernel_table import ROW_BYTES, fill_table, table_at
from tierstore.dma.gpu.methods import TABLE_ROWS, CopyCalls, CopyMethod
from tierstore.dma.protocol import CopyId
from tierstore.errors import DeviceError
from tierstore.transfer import IntArray

__all__ = ["ENTRIES_MAX", "CopyProgress", "CopyStream", "EventPool", "QueuedCopy", "StreamMark"]

_logger = bounded(logging.getLogger(__name__))

ENTRIES_MAX = 768
"""Plain copies that a stream holds at most, unless a fence hurries, or what counts as so many
(`CopyCalls.entry_count`); well below a thousand."""

_TABLE_COUNT = 8
"""Kernel launches in flight per stream; each reads its own table."""
_TABLE_BYTES = TABLE_ROWS * ROW_BYTES


class EventPool:
    """Events to use again; as many as were ever in use at once. Thread-safe."""

    def __init__(self, api: CudaApi) -> None:
        self._api = api
        self._free: deque[Event] = deque()

    def record(self, stream: Stream) -> Event:
        """Return an unused event, recorded on a stream.

        Raises:
            DeviceError: no event, or it could not be recorded.
        """
        try:
            event = self._free.pop()
        except IndexError:
            event = self._api.create_event()
        try:
            self._api.record_event(event, stream)
        except DeviceError:
            self._free.append(event)
            raise
        return event

    def give(self, event: Event) -> None:
        """Take an event back; waits that were enqueued for it stay valid."""
        self._free.append(event)

    def close(self) -> None:
        """Destroy the events that came back."""
        while self._free:
            self._api.destroy_event(self._free.pop())


@dataclass(slots=True)
class StreamMark:
    """A point in another stream's work."""

    event: Event | None
    """None as soon as the point is known to have passed."""


@dataclass(slots=True)
class QueuedCopy:
    """One submitted copy: its calls, and what they wait for."""

    copy_id: CopyId
    calls: deque[CopyCalls]
    after: StreamMark | None
    early_reads: bool
    """The sources are complete now, not only at the stream's turn."""
    failed: bool = False


@dataclass(slots=True)
class CopyProgress:
    """What a poll found out."""

    arrived: list[CopyId] = field(default_factory=list)
    failed: list[CopyId] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Segment:
    """Calls in the stream's queue, and the event behind them."""

    event: Event
    entry_count: int
    table: IntArray | None
    copy: QueuedCopy
    is_last: bool


class CopyStream:
    """Copies in order on one stream. Thread-safe.

    A copy that CUDA refuses is reported as failed, but only after those of its calls that were
    accepted have ended: nothing writes to memory that its owner took back.
    """

    def __init__(self, api: CudaApi, events: EventPool) -> None:
        self._api = api
        self._causes = Causes()
        self._events = events
        self._stream = api.create_stream()
        self._table_address: int | None = None
        self._tables: list[IntArray] = []
        if api.has_kernel:
            try:
                first = self._table_address = api.alloc_host(_TABLE_COUNT * _TABLE_BYTES)
            except DeviceError:
                api.destroy_stream(self._stream)
                raise
            addresses = range(first, first + _TABLE_COUNT * _TABLE_BYTES, _TABLE_BYTES)
            self._tables = [table_at(address, TABLE_ROWS) for address in addresses]
        self._lock = threading.Lock()
        self._waiting: deque[QueuedCopy] = deque()
        self._in_flight: deque[_Segment] = deque()
        self._entry_count = 0
        self._progress = CopyProgress()
        """What the next poll tells."""

    def submit(self, copy: QueuedCopy) -> None:
        """Enqueue a copy, on the stream as far as there is room."""
        with self._lock:
            # What has ended since the last poll makes room: a step may lie between two of them.
            self._pop()
            self._waiting.append(copy)
            self._push()

    @property
    def is_under_way(self) -> bool:
        """Whether copies had not ended when somebody last looked; takes no lock."""
        return bool(self._waiting or self._in_flight)

    def poll(self) -> CopyProgress:
        """Look what is complete and use the room. Never blocks.

        Finds nothing while another thread submits: the next call will.
        """
        if not self._lock.acquire(blocking=False):
            return CopyProgress()
        try:
            self._pop()
            self._push()
            progress, self._progress = self._progress, CopyProgress()
        finally:
            self._lock.release()
        return progress

    def hold_stream(self, stream: Stream, copy_ids: set[CopyId]) -> None:
        """Let another stream wait until these copies are done.

        Those that still wait for room are enqueued now, however long the queue gets.
        """
        with self._lock:
            self._pop()
            hurried = [i for i, copy in enumerate(self._waiting) if copy.copy_id in copy_ids]
            if hurried:
                self._push(hurried=hurried[-1] + 1)
            for segment in reversed(self._in_flight):
                if segment.copy.copy_id in copy_ids:
                    self._api.wait_event(stream, segment.event)
                    return

    def close(self) -> CopyProgress:
        """Wait for everything that was submitted, destroy the stream, free its memory."""
        with self._lock:
            while self._waiting or self._in_flight:
                self._push()
                self._api.synchronize(self._stream)
                self._pop()
            self._api.destroy_stream(self._stream)
            self._tables = []
            if self._table_address is not None:
                self._api.free_host(self._table_address)
                self._table_address = None
        return self._progress

    def _pop(self) -> None:
        while self._in_flight and self._has_ended(self._in_flight[0]):
            segment = self._in_flight.popleft()
            self._events.give(segment.event)
            self._entry_count -= segment.entry_count
            if segment.table is not None:
                self._tables.append(segment.table)
            if segment.is_last:
                failed = segment.copy.failed
                ids = self._progress.failed if failed else self._progress.arrived
                ids.append(segment.copy.copy_id)

    def _has_ended(self, segment: _Segment) -> bool:
        try:
            return self._api.is_complete(segment.event)
        except DeviceError as error:
            # An error of an earlier launch, which ends everything on the device.
            self._fail(segment.copy, "query", error)
            return True

    def _push(self, *, hurried: int = 0) -> None:
        """Enqueue waiting copies while there is room; the first `hurried` ones in any case."""
        while self._waiting:
            copy = self._waiting[0]
            self._wait_for_mark(copy)
            while True:
                if copy.calls and not hurried and not self._has_room(copy.calls[0]):
                    return
                self._enqueue(copy)
                if not copy.calls:
                    break
            self._waiting.popleft()
            hurried = max(hurried - 1, 0)

    def _has_room(self, calls: CopyCalls) -> bool:
        if calls.method is CopyMethod.KERNEL and not self._tables:
            return False
        return not self._in_flight or self._entry_count + calls.entry_count <= ENTRIES_MAX

    def _wait_for_mark(self, copy: QueuedCopy) -> None:
        event = None if copy.after is None else copy.after.event
        copy.after = None
        if event is not None:
            try:
                self._api.wait_event(self._stream, event)
            except DeviceError as error:
                self._fail(copy, "wait", error)

    def _enqueue(self, copy: QueuedCopy) -> None:
        """Enqueue a copy's next calls (an empty copy has none) and an event behind them."""
        calls = copy.calls.popleft() if copy.calls else None
        table = None
        if calls is not None:
            try:
                if calls.method is CopyMethod.KERNEL and self._tables:
                    table = self._tables.pop()
                self._call(calls, table, early_reads=copy.early_reads)
            except DeviceError as error:
                self._fail(copy, calls.method.value, error)
        try:
            event = self._events.record(self._stream)
        except DeviceError as error:
            self._fail(copy, "record", error)
            self._end_without_event(copy)
            if table is not None:
                self._tables.append(table)
            return
        entry_count = calls.entry_count if calls is not None else 0
        self._entry_count += entry_count
        self._in_flight.append(_Segment(event, entry_count, table, copy, is_last=not copy.calls))

    def _end_without_event(self, copy: QueuedCopy) -> None:
        # Nothing but waiting tells now when the accepted calls end; a lost device has ended them.
        with suppress(DeviceError):
            self._api.synchronize(self._stream)
        self._progress.failed.append(copy.copy_id)

    def _fail(self, copy: QueuedCopy, what: str, error: DeviceError) -> None:
        if self._causes.is_new(what, type(error).__name__):
            _logger.error(
                "copy failed (further ones are only counted): copy=%d call=%s cause=%s",
                copy.copy_id,
                what,
                error,
            )
        copy.failed = True
        copy.calls.clear()

    def _call(self, calls: CopyCalls, table: IntArray | None, *, early_reads: bool) -> None:
        runs, method = calls.runs, calls.method
        if method is CopyMethod.KERNEL and table is None:
            # A hurried copy whose tables are all in flight: slower, but no waiting.
            method = CopyMethod.BATCH if self._api.has_batch else CopyMethod.PLAIN
        if isinstance(runs, Rectangles):
            self._api.copy_pitched(runs, self._stream)
        elif method is CopyMethod.BATCH:
            self._api.copy_batch(runs, self._stream, early_reads=early_reads)
        elif table is not None:
            fill_table(table, runs)
            self._api.copy_by_kernel(table, len(runs), self._stream)
        else:
            self._api.copy_each(runs, self._stream)
