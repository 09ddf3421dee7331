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
from tierstore.backend.record_batch import RecordBatch
from tierstore.backend.segments.extent import valid_places
from tierstore.backend.segments.files import SegmentFiles
from tierstore.backend.segments.header_pages import HeaderCache, HeaderRoom
from tierstore.backend.segments.native_io import NativeIo, Unread, Written
from tierstore.backend.segments.probe import probe
from tierstore.backend.segments.reader import RecordReader
from tierstore.backend.segments.writer import RecordWriter
from tierstore.bounded_log import bounded
from tierstore.codec.plain import PlainCodec, RecordCodec
from tierstore.codec.record import parse_places
from tierstore.config.model import IoMode
from tierstore.device.marker import open_below
from tierstore.device.remedies import explain, remedy_of
from tierstore.device.system import SYSTEM, SystemCalls
from tierstore.errors import BackendError
from tierstore.key import KEY_BYTES_MAX
from tierstore.layout import PAGE_BYTES
from tierstore.native.known_file import KnownFile
from tierstore.native.library import Loaded, find_library
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
        library: Callable[[], Loaded] = find_library,
    ) -> None:
        """Describe the backend; `system` is replaced by tests that let system calls fail.

        `durable` flushes what `write` wrote before it returns. `tier` is the path of the tier,
        marked as one, below which no link is followed. `leftovers` names the directories of
        ranks of earlier runs, whose segments are released with ours. `codec` makes and verifies
        the records (None: with checksums). `library` finds what moves bytes without the
        interpreter, in the place of the file system's calls one by one.
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
        self._headers = HeaderCache()
        self._reader = RecordReader(
            self._files, self._room, self._headers, self._codec, self._failures, rank=rank
        )
        self._writer = RecordWriter(self._files, self._room, self._codec, self._failures, rank=rank)
        self._find_library = library
        self._native: NativeIo | None = None
        self._why_interpreted = "not open"
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
        why = self._why_interpreted = self._choose_path(mode)
        self._opened = True
        _logger.info(
            "file backend open: directory=%s mode=%s path=%s",
            self._directory,
            mode,
            f"interpreted ({why})" if why else "native",
        )

    @property
    def why_interpreted(self) -> str:
        """Why the interpreter moves the bytes, in words for a log; empty: it does not."""
        return self._why_interpreted

    @property
    def is_native(self) -> bool:
        """Whether bytes move without the interpreter; False before `open`."""
        return self._path() is not None

    def write(self, records: Sequence[RecordIo]) -> dict[int, FailureReason]:
        """Write extents, each by one vectored call. See `Backend.write`.

        A record whose place or slot does not fit, or that does not continue its extent from index
        0, fails with `LAYOUT`.
        """
        if not self._opened:
            return dict.fromkeys(range(len(records)), FailureReason.CLOSED)
        if not records:
            return {}
        batch = RecordBatch.of(records)
        places = parse_places(batch.places)
        native = self._path()
        if native is not None:
            failed = native.write(batch)
        else:
            failed = self._writer.write(batch, places, _fits(batch, places))
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
        batch = RecordBatch.of(records)
        places = parse_places(batch.places)
        native = self._path()
        if native is not None:
            unread = native.read(batch)
            if unread is not None:
                return self._explained(unread, batch, places)
        fits = _fits(batch, places)
        impossible = self._refuse(np.flatnonzero(~fits).tolist())
        return impossible | self._reader.read(batch, places, np.flatnonzero(fits))

    def write_while(
        self, records: Sequence[RecordIo], known: Sequence[KnownFile], *, kept_count: int
    ) -> Written | None:
        """Do as `write` while files are in their places, by one call without the interpreter.

        All `known` files must be in their places before, and the first `kept_count` after it, too.
        None: nothing was written, since one is not there, or this call cannot do it; `write` can.
        """
        native = None if self._durable or not self._opened else self._path()
        if native is None:
            return None
        return native.write_while(RecordBatch.of(records), known, kept_count)

    def read_while(
        self, records: Sequence[RecordIo], known: Sequence[KnownFile]
    ) -> dict[int, FailureReason] | None:
        """Do as `read` if files are in their places, by one call without the interpreter.

        None: nothing was read, since one is not there, or this call cannot do it; `read` can.
        """
        native = self._path() if self._opened else None
        if native is None:
            return None
        batch = RecordBatch.of(records)
        unread = native.read(batch, known)
        return (
            None if unread is None else self._explained(unread, batch, parse_places(batch.places))
        )

    def release(
        self, runs: Sequence[PageRun], empty_segments: Sequence[int]
    ) -> FailureReason | None:
        """Punch holes and unlink empty segments; what is absent is no failure.

        All of it is tried; the reason is that of the first failure.
        """
        if not self._opened:
            return FailureReason.CLOSED
        self._files.forget_unlinked()
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
        self._files.forget_unlinked()
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

    def _choose_path(self, mode: IoMode) -> str:
        """Choose what moves the bytes; return why it is the interpreter, empty: it is not."""
        self._native = None
        if mode == "mmap":
            return "io.mode is mmap"
        if type(self._codec) is not PlainCodec:
            return "records are keyed"
        if not self._files.calls_the_kernel:
            return "system calls are injected"
        loaded = self._find_library()
        if loaded.calls is not None:
            self._native = NativeIo(
                loaded.calls,
                self._files,
                self._room,
                self._headers,
                self._failures,
                rank=self._rank,
            )
        return loaded.why

    def _path(self) -> NativeIo | None:
        return self._native if self._files.calls_the_kernel else None

    def _explained(
        self, unread: Unread, batch: RecordBatch, places: npt.NDArray[np.void]
    ) -> dict[int, FailureReason]:
        """Read what the native path left once more, record by record; return the failed ones."""
        if not unread.suspects and not unread.impossible:
            return {}
        failed = self._reader.read_again(batch, places, unread.suspects)
        return self._refuse(unread.impossible) | failed

    def _refuse(self, impossible: list[int]) -> dict[int, FailureReason]:
        """Fail records whose places are those of no record; the catalog is not trusted."""
        if impossible:
            self._failures.report("read", "impossible place", record_count=len(impossible))
        return dict.fromkeys(impossible, FailureReason.CORRUPT)

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


def _fits(batch: RecordBatch, places: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Return which places are possible and as long as their slots, and have keys of the format."""
    stride_bytes = places["stride_pages"].astype(np.int64) * PAGE_BYTES
    fits: npt.NDArray[np.bool_] = valid_places(places) & (batch.slot_bytes == stride_bytes)
    if max(map(len, batch.keys)) > KEY_BYTES_MAX:
        fits &= np.fromiter(map(len, batch.keys), np.int64) <= KEY_BYTES_MAX
    return fits
