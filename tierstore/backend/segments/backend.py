"""Segment files: an extent is one vectored write, adjacent records are one vectored read.

Bytes go straight from and to the slots. Nothing is overwritten in place: what another process frees
during a read arrives as zeros or not at all, and never verifies.
"""

import logging
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierstore.backend.failure import FailureLog, name_of, reason_of
from tierstore.backend.protocol import RecordIo
from tierstore.backend.segments.extent import (
    end_page,
    split_extents,
    valid_places,
)
from tierstore.backend.segments.files import SegmentFiles
from tierstore.backend.segments.header_pages import HeaderRoom
from tierstore.backend.segments.probe import probe
from tierstore.backend.segments.reader import RecordReader
from tierstore.bounded_log import bounded
from tierstore.codec.plain import PlainCodec, RecordCodec
from tierstore.codec.record import EXTENT_RECORDS_MAX, parse_places
from tierstore.config.model import IoMode
from tierstore.device.marker import open_below
from tierstore.device.remedies import explain, remedy_of
from tierstore.device.system import SYSTEM, SystemCalls
from tierstore.errors import BackendError
from tierstore.layout import PAGE_BYTES
from tierstore.transfer import FailureReason, PageRun

__all__ = ["FileBackend"]

_logger = bounded(logging.getLogger(__name__))


class FileBackend:
    """Payload of one rank in segment files below `directory`. See `Backend`."""

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        mode: IoMode = "direct",
        durable: bool = False,
        tier: Path | None = None,
        leftovers: Callable[[], Sequence[Path]] = tuple,
        codec: RecordCodec | None = None,
        system: SystemCalls = SYSTEM,
    ) -> None:
        """Describe the backend; `system` is replaced by tests that let system calls fail.

        `durable` flushes what `write` wrote before it returns. `tier` is the path of the tier,
        marked as one, below which no link is followed. `leftovers` names the directories of
        ranks of earlier runs, whose segments are released with ours. `codec` makes and verifies
        the records (None: with checksums).
        """
        self._leftovers = leftovers
        self._directory = directory
        self._tier = tier
        self._rank = rank
        self._codec = PlainCodec() if codec is None else codec
        self._mode: IoMode = mode
        self._durable = durable
        self._system = system
        self._files = SegmentFiles(directory, system=system, tier=tier)
        self._room = HeaderRoom()
        self._failures = FailureLog(directory)
        self._reader = RecordReader(self._files, self._room, self._codec, self._failures, rank=rank)
        self._opened = False

    def open(self) -> None:
        """Make the directory and probe the file system; idempotent.

        Raises:
            BackendError: the path cannot be used; the message says what to change.
        """
        if self._opened:
            return
        try:
            open_below(self._tier, self._directory, create=True, system=self._system).close()
        except OSError as error:
            raise BackendError(explain(self._directory, error)) from error
        able = probe(self._directory, self._system)
        mode = self._mode
        if (mode == "direct" and not able.direct) or (mode == "mmap" and not able.mapped):
            _logger.warning("io.mode %s is refused, using buffered: %s", mode, self._directory)
            mode = "buffered"
        self._files.open(direct=mode == "direct", mapped=mode == "mmap")
        self._opened = True
        _logger.info("file backend open: directory=%s mode=%s", self._directory, mode)

    def write(self, records: Sequence[RecordIo]) -> dict[int, FailureReason]:
        """Write extents, each by one vectored call. See `Backend.write`.

        A record whose place or slot does not fit, or that does not continue its extent from index
        0, fails with `LAYOUT`.
        """
        if not self._opened:
            return dict.fromkeys(range(len(records)), FailureReason.CLOSED)
        if not records:
            return {}
        places = parse_places([record.place for record in records])
        fits = _fits(records, places)
        failed: dict[int, FailureReason] = {}
        for start, stop in split_extents(places):
            is_whole = places["index"][start] == 0 and fits[start:stop].all()
            segment_pages = int(places["segment_pages"][start])
            if is_whole and end_page(places[start:stop]) <= segment_pages:
                reason = self._write_extent(records[start:stop], places[start:stop])
            else:
                reason = FailureReason.LAYOUT
            if reason is not None:
                failed.update(dict.fromkeys(range(start, stop), reason))
        if self._durable:
            for segment in set(places["segment"].tolist()):
                reason = self._try("flush", partial(self._files.flush, segment))
                if reason is not None:
                    failed.update(
                        dict.fromkeys(np.flatnonzero(places["segment"] == segment).tolist(), reason)
                    )
        return failed

    def read(self, records: Sequence[RecordIo]) -> dict[int, FailureReason]:
        """Read and verify records, adjacent ones by one vectored call. See `Backend.read`."""
        if not self._opened:
            return dict.fromkeys(range(len(records)), FailureReason.CLOSED)
        if not records:
            return {}
        places = parse_places([record.place for record in records])
        fits = _fits(records, places)
        failed = dict.fromkeys(np.flatnonzero(~fits).tolist(), FailureReason.CORRUPT)
        if failed:
            self._failures.report("read", "impossible place", record_count=len(failed))
        return failed | self._reader.read(records, places, np.flatnonzero(fits))

    def release(
        self, runs: Sequence[PageRun], empty_segments: Sequence[int]
    ) -> FailureReason | None:
        """Punch holes and unlink empty segments; what is absent is no failure.

        All of it is tried; the reason is that of the first failure.
        """
        if not self._opened:
            return FailureReason.CLOSED
        empty = set(empty_segments)
        self._reader.forget(empty.union(run.segment for run in runs))
        punched = [run for run in runs if run.segment not in empty]
        reasons = self._release(self._files, punched, empty_segments)
        for directory in self._list_leftovers(reasons):
            files = SegmentFiles(directory, system=self._system, tier=self._tier)
            try:
                reasons += self._release(files, punched, empty_segments)
            finally:
                files.close()
        return next((reason for reason in reasons if reason is not None), None)

    def sync(self) -> None:
        """Flush the segments written since the last call.

        Raises:
            BackendError: the device refused.
        """
        for segment in self._files.unflushed:
            try:
                self._files.flush(segment)
            except OSError as error:
                raise BackendError(
                    f"{self._directory}: flush of segment {segment} failed: {error.strerror}; "
                    f"{remedy_of(error)}"
                ) from error

    def lost_segments(self, relied_on: AbstractSet[int] = frozenset()) -> AbstractSet[int]:
        """Return the segments whose files are gone. See `Backend.lost_segments`."""
        return self._files.take_lost(relied_on) if self._opened else frozenset()

    def close(self) -> None:
        """Close all descriptors; idempotent. Calls that are still under way end undisturbed."""
        self._opened = False
        self._files.close()

    def _write_extent(
        self, records: Sequence[RecordIo], places: npt.NDArray[np.void]
    ) -> FailureReason | None:
        """Write an extent by as few calls as its codec allows; the header page comes last."""
        segment, header_page = int(places["segment"][0]), int(places["header_page"][0])
        segment_bytes = int(places["segment_pages"][0]) * PAGE_BYTES
        stride_pages = int(places["stride_pages"][0])
        offset = header_page * PAGE_BYTES
        self._room.rows[len(records) : EXTENT_RECORDS_MAX] = 0
        is_whole = True
        try:
            held = self._files.acquire_for_write(segment, segment_bytes, offset=offset)
            try:
                for start, stop in self._codec.spans([len(r.slot) for r in records])[::-1]:
                    buffers = self._encode(records[start:stop], places[start:stop], start)
                    if start:
                        offset = (header_page + 1 + start * stride_pages) * PAGE_BYTES
                    else:
                        buffers = [self._room.page(0), *buffers]
                        offset = header_page * PAGE_BYTES
                    written = self._files.write(held, buffers, offset)
                    is_whole = is_whole and written == sum(map(len, buffers))
            finally:
                self._files.release(held)
        except OSError as error:
            self._failures.report("write", name_of(error), record_count=len(records))
            return reason_of(error)
        if not is_whole:
            self._failures.report("write", "short write", record_count=len(records))
            return FailureReason.IO_ERROR
        return None

    def _encode(
        self, records: Sequence[RecordIo], places: npt.NDArray[np.void], start: int
    ) -> list[memoryview]:
        """Return what is stored of records, which lie from `start` on in their extent.

        Their headers come to the header page.
        """
        encoded = self._codec.encode(
            [record.key for record in records],
            [record.slot for record in records],
            places["payload_bytes"],
            rank=self._rank,
        )
        self._room.rows[start : start + len(records)] = encoded.headers
        return list(encoded.slots)

    def _list_leftovers(self, reasons: list[FailureReason | None]) -> Sequence[Path]:
        try:
            return self._leftovers()
        except OSError as error:
            self._failures.report("release", name_of(error), record_count=0)
            reasons.append(reason_of(error))
            return ()

    def _release(
        self, files: SegmentFiles, runs: Sequence[PageRun], empty_segments: Sequence[int]
    ) -> list[FailureReason | None]:
        calls = [
            partial(files.punch, run.segment, run.first_page * PAGE_BYTES, size_bytes)
            for run in runs
            if (size_bytes := run.page_count * PAGE_BYTES) > 0
        ]
        calls += [partial(files.remove, segment) for segment in empty_segments]
        return [self._try("release", call) for call in calls]

    def _try(self, action: str, call: Callable[[], None]) -> FailureReason | None:
        try:
            call()
        except OSError as error:
            self._failures.report(action, name_of(error), record_count=0)
            return reason_of(error)
        return None


def _fits(records: Sequence[RecordIo], places: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Return which places are possible and as long as their slots."""
    slot_bytes = np.array([len(record.slot) for record in records], np.int64)
    stride_bytes = places["stride_pages"].astype(np.int64) * PAGE_BYTES
    fits: npt.NDArray[np.bool_] = valid_places(places) & (slot_bytes == stride_bytes)
    return fits
