"""Segment files: an extent is one vectored write, adjacent records are one vectored read.

Bytes go straight from and to the slots. Nothing is overwritten in place, so what another process
frees while we read it comes back as zeros or not at all, and never verifies.
"""

import logging
import mmap
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierstore.backend.failure import FailureLog, name_of, reason_of, unread_reason_of
from tierstore.backend.protocol import RecordIo
from tierstore.backend.segments.extent import (
    ReadPart,
    ReadRun,
    end_page,
    plan_reads,
    split_extents,
    valid_places,
)
from tierstore.backend.segments.files import Segment, SegmentFiles
from tierstore.backend.segments.header_cache import HeaderCache
from tierstore.backend.segments.probe import probe
from tierstore.bounded_log import bounded
from tierstore.codec.plain import PlainCodec, ReadBatch, RecordCodec
from tierstore.codec.record import EXTENT_RECORDS_MAX, HEADER_BYTES, Mismatch, parse_places
from tierstore.config.model import IoMode
from tierstore.device.marker import open_below
from tierstore.device.remedies import explain, remedy_of
from tierstore.device.system import SYSTEM, SystemCalls
from tierstore.errors import BackendError
from tierstore.layout import PAGE_BYTES
from tierstore.transfer import FailureReason, PageRun

__all__ = ["FileBackend"]

_logger = bounded(logging.getLogger(__name__))

_HEADER_PAGES_MAX = 32
"""Extents that one pass of a read touches: the thread's buffer for header pages is that large."""

_FAILED_REREADS_MAX = 2
"""Records read once more, one by one, after the device failed; then the rest is given up."""


class _HeaderPages(threading.local):
    """Page-aligned room for header pages, one per thread."""

    def __init__(self) -> None:
        self.buffer = memoryview(mmap.mmap(-1, _HEADER_PAGES_MAX * PAGE_BYTES))
        self.rows = np.frombuffer(self.buffer, np.uint8).reshape(-1, HEADER_BYTES)

    def page(self, number: int) -> memoryview:
        """Return one page of the room."""
        return self.buffer[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]


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
        ranks that are no more, whose segments are released with ours. `codec` makes and verifies
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
        self._headers = HeaderCache()
        self._scratch = _HeaderPages()
        self._failures = FailureLog(directory)
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
        suspects: list[int] = []
        if len(failed) < len(records):
            for part in plan_reads(places, np.flatnonzero(fits), _HEADER_PAGES_MAX):
                suspects += self._read_part(records, part)
        if suspects:
            failed.update(self._read_again(records, places, suspects))
        return failed

    def release(
        self, runs: Sequence[PageRun], empty_segments: Sequence[int]
    ) -> FailureReason | None:
        """Punch holes and unlink empty segments; what is not there is not missed.

        All of it is tried; the reason is that of the first failure.
        """
        if not self._opened:
            return FailureReason.CLOSED
        empty = set(empty_segments)
        self._headers.drop_segments(empty.union(run.segment for run in runs))
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
        self._scratch.rows[len(records) : EXTENT_RECORDS_MAX] = 0
        is_whole = True
        try:
            held = self._files.acquire_for_write(segment, segment_bytes, offset=offset)
            try:
                for start, stop in self._codec.spans([len(r.slot) for r in records])[::-1]:
                    buffers = self._encode(records[start:stop], places[start:stop], start)
                    if start:
                        offset = (header_page + 1 + start * stride_pages) * PAGE_BYTES
                    else:
                        buffers = [self._scratch.page(0), *buffers]
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
        self._scratch.rows[start : start + len(records)] = encoded.headers
        return list(encoded.slots)

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
            rows=self._scratch.rows,
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
                buffers.append(self._scratch.page(extent))
            buffers.append(record.slot)
        try:
            held = self._files.acquire(run.segment)
            try:
                if not run.starts_with_header:
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
        page = self._scratch.page(int(part.extents[position]))
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
                page = self._scratch.page(int(part.extents[run.stop - 1]))
                self._headers.put(segment, header_page, bytes(page))

    def _read_again(
        self, records: Sequence[RecordIo], places: npt.NDArray[np.void], suspects: list[int]
    ) -> dict[int, FailureReason]:
        """Read records one by one, header page anew; return those that fail for good.

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

    def _read_alone(self, record: RecordIo, place: np.void) -> Mismatch | None:
        segment, header_page = int(place["segment"]), int(place["header_page"])
        index, size = int(place["index"]), int(place["payload_bytes"])
        payload_page = header_page + 1 + index * int(place["stride_pages"])
        page = self._scratch.page(0)
        self._headers.drop(segment, header_page)
        self._files.forget_unlinked()
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
            if is_there:  # whatever stopped the read may pass, and the record is none the worse
                return Mismatch(FailureReason.IO_ERROR, "short read")
            return Mismatch(FailureReason.ABSENT, "segment ends before the record")
        header = bytes(page[index * HEADER_BYTES : (index + 1) * HEADER_BYTES])
        return self._codec.explain(header, record.slot[:size], record.key, rank=self._rank)

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
    """Say which places are possible and as long as their slots."""
    slot_bytes = np.array([len(record.slot) for record in records], np.int64)
    stride_bytes = places["stride_pages"].astype(np.int64) * PAGE_BYTES
    fits: npt.NDArray[np.bool_] = valid_places(places) & (slot_bytes == stride_bytes)
    return fits
