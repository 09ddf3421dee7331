"""A backend that is opened, and opened again, by its calls: a device may come back.

A backend whose directory was removed, moved or unmounted is opened again. Only writes make the
directory, and not if the tier's path is gone: the control plane makes that. To give a backend up
after a failure lost: one failing call put a tier out of use until the restart.
"""

import errno
import logging
import threading
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from tierstore.backend.failure import checked_failures
from tierstore.backend.protocol import Backend, RecordIo
from tierstore.backend.segments.backend import FileBackend
from tierstore.backend.segments.native_io import Written
from tierstore.bounded_log import Causes, bounded
from tierstore.errors import BackendError, ClosedError, TierStoreError
from tierstore.native.known_file import KnownFile
from tierstore.transfer import FailureReason, PageRun

__all__ = ["ReopeningBackend"]

_logger = bounded(logging.getLogger(__name__))

_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}
_FileId = tuple[int, int] | None
_UNKNOWN = (0, 0)
"""The device did not tell."""


class ReopeningBackend:
    """Opens a backend by its calls, until one succeeds. See `Backend`."""

    def __init__(
        self,
        name: str,
        open_backend: Callable[[], Backend],
        directory: Path | None = None,
        *,
        has_database: bool = False,
    ) -> None:
        """`open_backend` returns an open backend or raises `BackendError`; `name` is the tier's.

        `directory` is where the backend's files lie, if anywhere; `has_database`: in a database.
        """
        self._name = name
        self._open_backend = open_backend
        self._lock = threading.Lock()
        self._backend: Backend | None = None
        names = [directory] if directory is not None else []
        self._paths = (
            [*names, *(path / "payload" / "data.mdb" for path in names)] if has_database else names
        )
        self._directory = directory
        self._has_database = has_database
        self._file_ids: list[_FileId] = [_UNKNOWN] * len(self._paths)
        """Of the open backend."""
        self._known_file: KnownFile | None = None
        """The directory of the open backend, if the device told which one it is."""
        self._closed = False
        self._is_logged = False
        self._causes = Causes()
        self._is_lost = False
        """Its files are gone, and it has not been opened since."""
        self._is_tried = False
        self._lost_segments: set[int] = set()
        """Of backends whose files are gone; kept until they are asked for."""

    def open(self) -> None:
        """Try to open the backend; idempotent. A device that refuses is tried again by its calls.

        Raises:
            ConfigError, MissingExtraError: the configuration cannot work, here and now.
        """
        self._opened()

    def write(self, records: Sequence[RecordIo]) -> dict[int, FailureReason]:
        """Write, once the backend is open."""
        backend = self._opened()
        if backend is None:
            return dict.fromkeys(range(len(records)), FailureReason.IO_ERROR)
        count = len(records)
        failed = backend.write(records)
        return checked_failures(failed, count, f"write tier={self._name}", self._causes)

    def write_while(self, records: Sequence[RecordIo], kept: KnownFile) -> Written | None:
        """Write as long as a file stays in its place, by one call that looks at all paths itself.

        None: nothing was written, since a file is not in its place, or the backend cannot do that;
        `write` can.
        """
        backend, directory = self._backend, self._known_file
        if directory is None or not isinstance(backend, FileBackend):
            return None
        return backend.write_while(records, (kept, directory), kept_count=1)

    def read(self, records: Sequence[RecordIo]) -> dict[int, FailureReason]:
        """Read, once the backend is open."""
        known, directory = self._backend, self._known_file
        if directory is not None and isinstance(known, FileBackend):
            done = known.read_while(records, (directory,))
            if done is not None:
                return done
        backend = self._opened(makes_directory=False)
        if backend is None and self._is_lost:
            return dict.fromkeys(range(len(records)), FailureReason.ABSENT)
        if backend is None:
            # Not an I/O error, which would count against the records: they were not tried.
            return dict.fromkeys(range(len(records)), FailureReason.STALLED)
        count = len(records)  # which another package's backend may change
        failed = backend.read(records)
        return checked_failures(failed, count, f"read tier={self._name}", self._causes)

    def release(
        self, runs: Sequence[PageRun], empty_segments: Sequence[int]
    ) -> FailureReason | None:
        """Release, once the backend is open."""
        backend = self._opened(makes_directory=False)
        if backend is None:
            return None if self._is_lost else FailureReason.IO_ERROR
        return backend.release(runs, empty_segments)

    def sync(self) -> None:
        """Flush what was written.

        Raises:
            BackendError: the device refused.
        """
        if self._backend is not None:  # otherwise nothing was written
            try:
                self._backend.sync()
            except ClosedError as error:
                raise BackendError(f"tier {self._name}: its payload was lost just now") from error

    def lost_segments(self, relied_on: AbstractSet[int] = frozenset()) -> AbstractSet[int]:
        """Return what was lost with this backend's files, and with those of earlier ones."""
        backend = self._backend
        # Not under the lock, which all others would wait for: it may look at many files.
        if backend is not None:
            relied_on = backend.lost_segments(relied_on)
        elif relied_on and not self._is_lost:
            raise BackendError(f"tier {self._name}: its payload is not open")
        with self._lock:
            lost, self._lost_segments = self._lost_segments, set()
        return lost | relied_on

    def close(self) -> None:
        """Close the backend, if it was ever opened; idempotent."""
        with self._lock:
            self._closed = True
            if self._backend is not None:
                self._backend.close()

    def _opened(self, *, makes_directory: bool = True) -> Backend | None:
        backend = self._backend
        # Not under the lock, as in `OwnerLocks.hold`.
        found = [] if backend is None else self._find_files()
        # Held over the I/O of an opening: the other threads would wait for the device too.
        with self._lock:
            if backend is not None and self._backend is backend and self._are_gone(found):
                self._lost_segments |= backend.lost_segments()
                backend.close()  # calls that are under way in it end undisturbed
                self._backend = self._known_file = None
                self._is_lost = True
            may_open = not self._is_lost or self._has_place(makes_directory=makes_directory)
            if self._backend is None and not self._closed and may_open:
                try:
                    opened = self._open_backend()
                except TierStoreError as error:
                    # Later, a key file may be gone, for example: no reason to end a thread.
                    if not self._is_tried and not isinstance(error, BackendError):
                        raise
                    if not self._is_logged:
                        self._is_logged = True
                        _logger.error(
                            "tier is out of use until it opens: tier=%s cause=%s", self._name, error
                        )
                else:
                    self._is_lost = False
                    self._file_ids = [_UNKNOWN] * len(self._paths)
                    self._file_ids = self._find_files()
                    self._backend = opened
                self._is_tried = True
            if self._known_file is None and self._backend is not None:
                self._known_file = self._find_directory()
            return self._backend

    def _find_directory(self) -> KnownFile | None:
        """Return the directory as a file that a call can look for."""
        file_id = self._file_ids[0] if self._directory is not None else None
        if self._directory is None or file_id is None or file_id == _UNKNOWN:
            return None
        return KnownFile.of(self._directory, *file_id)

    def _has_place(self, *, makes_directory: bool) -> bool:
        if self._directory is None:
            return True
        return (self._directory.parent if makes_directory else self._directory).is_dir()

    def _are_gone(self, found: list[_FileId]) -> bool:
        """Return whether the files of the backend are gone or were replaced: by what was found."""
        known, self._file_ids = self._file_ids, found
        # A database may have gone before the first look, just after the backend was opened.
        is_without = self._has_database and None in self._file_ids
        return is_without or any(
            before not in (now, _UNKNOWN) for before, now in zip(known, self._file_ids, strict=True)
        )

    def _find_files(self) -> list[_FileId]:
        """Return the files that the paths of the directory and its database name now."""
        return list(map(_file_id, self._paths, self._file_ids))


def _file_id(path: Path, known: _FileId) -> _FileId:
    try:
        status = path.stat()
    except OSError as error:
        return None if error.errno in _GONE else known  # a device that fails tells nothing
    return status.st_dev, status.st_ino
