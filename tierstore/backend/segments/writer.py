"""Writes records to segment files by the interpreter: each extent by one vectored call."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tierstore.backend.failure import FailureLog, name_of, reason_of
from tierstore.backend.protocol import RecordIo
from tierstore.backend.segments.extent import end_page, split_extents
from tierstore.backend.segments.files import SegmentFiles
from tierstore.backend.segments.header_pages import HeaderRoom
from tierstore.codec.plain import RecordCodec
from tierstore.codec.record import EXTENT_RECORDS_MAX
from tierstore.layout import PAGE_BYTES
from tierstore.transfer import FailureReason

__all__ = ["RecordWriter"]


class RecordWriter:
    """Writes extents from slots, by any codec and through any `SystemCalls`. Thread-safe."""

    def __init__(
        self,
        files: SegmentFiles,
        room: HeaderRoom,
        codec: RecordCodec,
        failures: FailureLog,
        *,
        rank: int,
    ) -> None:
        """Write `files` of a rank; `room` is where header pages are made."""
        self._files = files
        self._room = room
        self._codec = codec
        self._failures = failures
        self._rank = rank

    def write(
        self,
        records: Sequence[RecordIo],
        places: npt.NDArray[np.void],
        fits: npt.NDArray[np.bool_],
    ) -> dict[int, FailureReason]:
        """Write the extents of which all records fit; return the failed records."""
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
        return failed

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
