"""Moves records between slots and segment files by one call per I/O task, without the interpreter.

It decides nothing that the interpreted path (`RecordWriter`, `RecordReader`) would not decide: what
it cannot verify is read again there, which explains it.
"""

import os
from dataclasses import dataclass
from itertools import groupby

from tierstore.backend.failure import FailureLog, name_of, reason_of
from tierstore.backend.record_batch import RecordBatch
from tierstore.backend.segments.files import TOO_MANY_OPEN, SegmentFiles
from tierstore.backend.segments.header_pages import ROOM_PAGES, HeaderCache, HeaderRoom
from tierstore.backend.segments.open_segments import Segment
from tierstore.codec.record import parse_places
from tierstore.layout import PAGE_BYTES
from tierstore.native.calls import DONE, IMPOSSIBLE, SHORT, UNTRIED, ExtentCalls, IoTask, Run
from tierstore.transfer import FailureReason

__all__ = ["NativeIo", "Unread"]

_Held = dict[tuple[int, int], Segment]
_EVERY_SIZE = -1


@dataclass(frozen=True, slots=True)
class Unread:
    """What is left of a read: records by their index."""

    impossible: list[int]
    """Their places are those of no record."""
    suspects: list[int]
    """They did not arrive, or did not verify."""


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
        failed: dict[int, FailureReason] = {}
        for number, run in enumerate(runs):
            if run.status != DONE:
                reason = self._report(run, refused.get(number))
                failed.update(dict.fromkeys(range(run.first, run.first + run.count), reason))
        return failed

    def read(self, batch: RecordBatch) -> Unread:
        """Read records into their slots and verify them.

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
            is_whole &= self._read_pass(task, chosen, first)
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

    def _read_pass(self, task: IoTask, runs: list[Run], first: int) -> bool:
        """Read runs whose header pages have room; return whether all of them verified."""
        held: _Held = {}
        from_cache = set()
        try:
            for number, run in enumerate(runs):
                self._open_for_read(run, held)
                if run.header_offset >= 0:
                    known = self._headers.get(run.segment, run.first_header_page)
                    if known is not None:
                        self._room.page(run.first_extent % ROOM_PAGES)[:] = known
                        run.header_offset = -1
                        if run.first_extent == run.last_extent:
                            from_cache.add(number)
            is_whole = task.read(first, first + len(runs))
        finally:
            self._release(held)
        for number, run in enumerate(runs):
            if number not in from_cache and run.status == DONE:
                page = bytes(self._room.page(run.last_extent % ROOM_PAGES))
                self._headers.put(run.segment, run.last_header_page, page)
        return is_whole

    def _open_for_read(self, run: Run, held: _Held) -> None:
        place = run.segment, _EVERY_SIZE
        try:
            if place not in held:
                held[place] = self._files.acquire(run.segment)
        except OSError:
            return  # each record is tried again alone, which finds out what is wrong
        run.fd = held[place].fd

    def _release(self, held: _Held) -> None:
        for segment in held.values():
            self._files.release(segment)
        held.clear()

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
