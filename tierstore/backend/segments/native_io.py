"""Moves records between slots and segment files by one call per I/O task, without the interpreter.

It decides nothing that the interpreted path (`RecordWriter`, `RecordReader`) would not decide: what
it cannot verify is read again there, which explains it.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from tierstore.backend.failure import FailureLog, name_of, reason_of
from tierstore.backend.record_batch import RecordBatch
from tierstore.backend.segments.files import TOO_MANY_OPEN, SegmentFiles
from tierstore.backend.segments.header_pages import ROOM_PAGES, HeaderCache, HeaderRoom
from tierstore.backend.segments.open_segments import Segment
from tierstore.codec.record import parse_places
from tierstore.layout import PAGE_BYTES
from tierstore.native.calls import (
    DONE,
    IMPOSSIBLE,
    SHORT,
    UNTRIED,
    ExtentCalls,
    IoTask,
    Run,
    WriteEnd,
)
from tierstore.native.known_file import KnownFile
from tierstore.transfer import FailureReason

__all__ = ["NativeIo", "Unread", "Written"]

_Held = dict[tuple[int, int], Segment]
_EVERY_SIZE = -1


@dataclass(frozen=True, slots=True)
class Unread:
    """What is left of a read: records by their index."""

    impossible: list[int]
    """Their places are those of no record."""
    suspects: list[int]
    """They did not arrive, or did not verify."""


@dataclass(frozen=True, slots=True)
class Written:
    """The end of a write during which files had to be in their places."""

    failed: dict[int, FailureReason]
    """Records by their index."""
    is_kept: bool
    """Whether the files that had to stay in their places did; False also if a device does not
    tell."""


class NativeIo:
    """Whole I/O tasks of one rank's segment files. Thread-safe."""

    def __init__(
        self,
        calls: ExtentCalls,
        files: SegmentFiles,
        room: HeaderRoom,
        headers: HeaderCache,
        failures: FailureLog,
        *,
        rank: int,
    ) -> None:
        """Move by the functions of a loaded library; header pages arrive in `room`."""
        self._calls = calls
        self._files = files
        self._room = room
        self._headers = headers
        self._failures = failures
        self._rank = rank

    def write(self, batch: RecordBatch) -> dict[int, FailureReason]:
        """Write extents; return the failed records."""
        task = self._task(batch)
        runs = task.plan_writes()
        refused: dict[int, OSError] = {}
        held: _Held = {}
        try:
            for number, run in enumerate(runs):
                if run.status == UNTRIED:
                    try:
                        self._open_for_write(task, run, held, number)
                    except OSError as error:
                        refused[number] = error
            task.write(len(runs))
        finally:
            self._release(held)
        return self._failed(runs, refused)

    def write_while(
        self, batch: RecordBatch, known: Sequence[KnownFile], kept_count: int
    ) -> Written | None:
        """Write extents by one call, which looks first whether files are in their places.

        These are `known`, of which the first `kept_count` must stay there, and the segments. None:
        nothing was written, since one is not there, or a segment is not open; `write` tells why.
        """
        task = self._task(batch)
        runs = task.plan_writes()
        held: _Held = {}
        files = list(known)
        try:
            for run in runs:
                if run.status == UNTRIED and not self._find_for_write(run, held, files):
                    return None
            end = task.write(len(runs), files, kept_count=kept_count)
        finally:
            self._release(held)
        if end is WriteEnd.NOT_BEGUN:
            return None
        return Written(self._failed(runs, {}), end is WriteEnd.WRITTEN)

    def read(self, batch: RecordBatch, known: Sequence[KnownFile] = ()) -> Unread | None:
        """Read records into their slots and verify them.

        If there are `known` files, no segment is opened for it, and the calls look first whether
        these are in their places. None: one is not, or a segment is not open.

        Raises:
            BufferError: a slot is not writable.
        """
        batch.require_writable()
        task = self._task(batch)
        first = 0
        is_whole = True
        runs = task.plan_reads()
        for _, members in groupby(runs, lambda run: run.first_extent // ROOM_PAGES):
            chosen = list(members)
            is_pass_whole = self._read_pass(task, chosen, first, known)
            if is_pass_whole is None:
                return None
            is_whole &= is_pass_whole
            first += len(chosen)
        planned = sum(run.count for run in runs)
        if is_whole and planned == len(batch):
            return Unread([], [])
        statuses = list(task.statuses)
        return Unread(
            [index for index, status in enumerate(statuses) if status == IMPOSSIBLE],
            # In the order of their places, as they are read again.
            [index for index in task.order[:planned] if statuses[index] != DONE],
        )

    def _task(self, batch: RecordBatch) -> IoTask:
        return IoTask(
            self._calls,
            batch.keys,
            parse_places(batch.places),
            batch.addresses,
            batch.slot_bytes,
            rank=self._rank,
            room=self._room.rows,
            room_pages=ROOM_PAGES,
        )

    def _find_for_write(self, run: Run, held: _Held, files: list[KnownFile]) -> bool:
        """Give a run the open descriptor of its segment, if there is one, and note its file."""
        place = run.segment, run.segment_pages
        if place not in held:
            found = self._files.acquire_known(run.segment, run.segment_pages * PAGE_BYTES)
            if found is None:
                return False
            held[place], file = found
            files.append(file)
        run.fd = held[place].fd
        return True

    def _open_for_write(self, task: IoTask, run: Run, held: _Held, number: int) -> None:
        """Give a run the descriptor of its segment, made if need be."""
        place = run.segment, run.segment_pages
        if place not in held:
            try:
                held[place] = self._acquire_for_write(run)
            except OSError as error:
                if error.errno not in TOO_MANY_OPEN or not held:
                    raise
                # The descriptors of this task are in the way: what has one is written first.
                task.write(number)
                self._release(held)
                held[place] = self._acquire_for_write(run)
        run.fd = held[place].fd

    def _acquire_for_write(self, run: Run) -> Segment:
        segment_bytes = run.segment_pages * PAGE_BYTES
        return self._files.acquire_for_write(run.segment, segment_bytes, offset=run.offset)

    def _read_pass(
        self, task: IoTask, runs: list[Run], first: int, known: Sequence[KnownFile]
    ) -> bool | None:
        """Read runs whose header pages have room; return whether all of them verified.

        None: as `read`.
        """
        held: _Held = {}
        from_cache = set()
        try:
            for number, run in enumerate(runs):
                if not self._open_for_read(run, held, is_open=bool(known)):
                    return None
                if run.header_offset >= 0:
                    cached = self._headers.get(run.segment, run.first_header_page)
                    if cached is not None:
                        self._room.page(run.first_extent % ROOM_PAGES)[:] = cached
                        run.header_offset = -1
                        if run.first_extent == run.last_extent:
                            from_cache.add(number)
            is_whole = task.read(first, first + len(runs), known)
        finally:
            self._release(held)
        for number, run in enumerate(runs):
            if number not in from_cache and run.status == DONE:
                page = bytes(self._room.page(run.last_extent % ROOM_PAGES))
                self._headers.put(run.segment, run.last_header_page, page)
        return is_whole

    def _open_for_read(self, run: Run, held: _Held, *, is_open: bool) -> bool:
        """Give a run the descriptor of its segment; False: it had to be open and is not."""
        place = run.segment, _EVERY_SIZE
        segment = held.get(place)
        if segment is None and is_open:
            segment = self._files.acquire_open(run.segment)
            if segment is None:
                return False
        elif segment is None:
            try:
                segment = self._files.acquire(run.segment)
            except OSError:
                return True  # each record is tried again alone, which finds out what is wrong
        held[place] = segment
        run.fd = segment.fd
        return True

    def _release(self, held: _Held) -> None:
        for segment in held.values():
            self._files.release(segment)
        held.clear()

    def _failed(self, runs: list[Run], refused: dict[int, OSError]) -> dict[int, FailureReason]:
        """Return the records that were not written; `refused` are the runs without a segment."""
        failed: dict[int, FailureReason] = {}
        for number, run in enumerate(runs):
            if run.status != DONE:
                reason = self._report(run, refused.get(number))
                failed.update(dict.fromkeys(range(run.first, run.first + run.count), reason))
        return failed

    def _report(self, run: Run, error: OSError | None) -> FailureReason:
        """Log why an extent was not written; return the reason."""
        if run.status == IMPOSSIBLE:
            return FailureReason.LAYOUT
        if run.status == SHORT:
            self._failures.report("write", "short write", record_count=run.count)
            return FailureReason.IO_ERROR
        if error is None:
            error = OSError(run.status, os.strerror(run.status))
        self._failures.report("write", name_of(error), record_count=run.count)
        return reason_of(error)
