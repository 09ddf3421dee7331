"""Reads records from segment files and verifies them: adjacent ones by one vectored call."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tierstore.backend.failure import FailureLog, name_of, unread_reason_of
from tierstore.backend.protocol import RecordIo
from tierstore.backend.segments.extent import ReadPart, ReadRun, plan_reads
from tierstore.backend.segments.files import SegmentFiles
from tierstore.backend.segments.header_pages import ROOM_PAGES, HeaderCache, HeaderRoom
from tierstore.backend.segments.open_segments import Segment
from tierstore.codec.plain import ReadBatch, RecordCodec
from tierstore.codec.record import EXTENT_RECORDS_MAX, HEADER_BYTES, Mismatch
from tierstore.layout import PAGE_BYTES
from tierstore.transfer import FailureReason

__all__ = ["RecordReader"]

_FAILED_REREADS_MAX = 2
"""Records that are read again, one by one, after the device failed; the others are given up."""


class RecordReader:
    """Reads into slots: runs of records first, then those that did not verify, one by one.

    Thread-safe.
    """

    def __init__(
        self,
        files: SegmentFiles,
        room: HeaderRoom,
        headers: HeaderCache,
        codec: RecordCodec,
        failures: FailureLog,
        *,
        rank: int,
    ) -> None:
        """Read `files` of a rank; `room` is where header pages arrive, `headers` keeps some."""
        self._files = files
        self._room = room
        self._codec = codec
        self._failures = failures
        self._rank = rank
        self._headers = headers

    def read(
        self,
        records: Sequence[RecordIo],
        places: npt.NDArray[np.void],
        chosen: npt.NDArray[np.int64],
    ) -> dict[int, FailureReason]:
        """Read and verify the records with the indices `chosen`; return the failed ones.

        Their places are valid, and as long as their slots.
        """
        suspects: list[int] = []
        if len(chosen):
            for part in plan_reads(places, chosen, ROOM_PAGES):
                suspects += self._read_part(records, part)
        return self.read_again(records, places, suspects)

    def read_again(
        self, records: Sequence[RecordIo], places: npt.NDArray[np.void], suspects: list[int]
    ) -> dict[int, FailureReason]:
        """Read records one by one, header pages included; return those that fail again.

        A stale header page, a segment unlinked meanwhile, one bad sector among good ones and a
        read that overtook an eviction all end up here.
        """
        failed: dict[int, FailureReason] = {}
        causes: Counter[str] = Counter()
        rereads_left = _FAILED_REREADS_MAX
        mismatch: Mismatch | None = None
        for index in suspects:
            if rereads_left > 0:
                mismatch = self._read_alone(records[index], places[index])
            if mismatch is not None:
                failed[index] = mismatch.reason
                causes[mismatch.cause] += 1
                rereads_left -= mismatch.reason is FailureReason.IO_ERROR
        for cause, count in causes.items():
            self._failures.report("read", cause, record_count=count)
        return failed

    def _read_part(self, records: Sequence[RecordIo], part: ReadPart) -> list[int]:
        """Read the runs of a part; return the indices of records that did not verify."""
        chosen = [records[index] for index in part.indices]
        payload_bytes = part.places["payload_bytes"]
        batch = ReadBatch(
            keys=[record.key for record in chosen],
            payload_bytes=payload_bytes,
            payloads=[
                record.slot[:size]
                for record, size in zip(chosen, payload_bytes.tolist(), strict=True)
            ],
            rows=self._room.rows,
            numbers=part.extents * EXTENT_RECORDS_MAX + part.places["index"].astype(np.int64),
        )
        check = self._codec.check(batch, rank=self._rank)
        for run in part.runs:
            # The run is verified at once, while its slots are in the processor's cache.
            check.examine(run.start, self._read_run(run, part, chosen))
        verified = check.verified()
        self._keep_headers(part, verified)
        if verified.all():
            return []
        return [part.indices[position] for position in np.flatnonzero(~verified).tolist()]

    def _read_run(self, run: ReadRun, part: ReadPart, chosen: list[RecordIo]) -> int:
        """Read one run into its slots; return the position behind the last record that arrived."""
        buffers: list[memoryview] = []
        extents = part.extents[run.start : run.stop].tolist()
        heads = (part.places["index"][run.start : run.stop] == 0).tolist()
        for record, extent, head in zip(chosen[run.start : run.stop], extents, heads, strict=True):
            if head:
                buffers.append(self._room.page(extent))
            buffers.append(record.slot)
        try:
            held = self._files.acquire(run.segment)
            try:
                if run.fetches_header:
                    self._fetch_header(held, part, run.start)
                done = self._files.read(held, buffers, run.first_page * PAGE_BYTES)
            finally:
                self._files.release(held)
        except OSError:
            # Each record is tried again alone, which finds out what is wrong with which.
            return run.start
        end_pages = part.end_pages[run.start : run.stop]
        arrived = end_pages <= run.first_page + done // PAGE_BYTES
        return run.start + int(arrived.sum())

    def _fetch_header(self, held: Segment, part: ReadPart, position: int) -> None:
        """Bring the header page of a run that starts inside its extent."""
        place = part.places[position]
        segment, header_page = int(place["segment"]), int(place["header_page"])
        page = self._room.page(int(part.extents[position]))
        known = self._headers.get(segment, header_page)
        if known is None:
            self._files.read(held, [page], header_page * PAGE_BYTES)
        else:
            page[:] = known

    def _keep_headers(self, part: ReadPart, verified: npt.NDArray[np.bool_]) -> None:
        """Hold the header pages of which a record was verified, but others may be read later."""
        for run in part.runs:
            if verified[run.start : run.stop].all():
                last = part.places[run.stop - 1]
                segment, header_page = int(last["segment"]), int(last["header_page"])
                page = self._room.page(int(part.extents[run.stop - 1]))
                self._headers.put(segment, header_page, bytes(page))

    def _read_alone(self, record: RecordIo, place: np.void) -> Mismatch | None:
        segment, header_page = int(place["segment"]), int(place["header_page"])
        index, size = int(place["index"]), int(place["payload_bytes"])
        payload_page = header_page + 1 + index * int(place["stride_pages"])
        page = self._room.page(0)
        self._headers.drop(segment, header_page)
        self._files.forget_if_unlinked(segment)
        try:
            held = self._files.acquire(segment)
            try:
                done = self._files.read_unmapped(held, [page], header_page * PAGE_BYTES)
                done += self._files.read_unmapped(held, [record.slot], payload_page * PAGE_BYTES)
                end = payload_page * PAGE_BYTES + len(record.slot)
                is_there = self._files.reaches(held, end)
            finally:
                self._files.release(held)
        except FileNotFoundError:
            return Mismatch(FailureReason.ABSENT, "no segment")
        except OSError as error:
            return Mismatch(unread_reason_of(error), name_of(error))
        if done < PAGE_BYTES + len(record.slot):
            if is_there:  # what stopped the read may pass; the record may be sound
                return Mismatch(FailureReason.IO_ERROR, "short read")
            return Mismatch(FailureReason.ABSENT, "segment ends before the record")
        header = bytes(page[index * HEADER_BYTES : (index + 1) * HEADER_BYTES])
        return self._codec.explain(header, record.slot[:size], record.key, rank=self._rank)
