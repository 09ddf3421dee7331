"""The files in which segments were found, and which of them were removed since."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple, Self

from tierstore.backend.names import segment_name
from tierstore.device.directory import Directory

__all__ = ["SeenFiles"]

_SEEN_MAX = 1 << 16
"""Segments whose files are remembered; other processes may have removed most of them."""
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EPERM, errno.ESTALE}
"""Errors that say: the name of a directory or segment does not lead to a file of ours."""


class _FileId(NamedTuple):
    """Which file it is, and how long."""

    device: int
    inode: int
    size_bytes: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        return cls(status.st_dev, status.st_ino, status.st_size)

    def holds(self, before: Self) -> bool:
        """Return whether this is the same file, and no shorter."""
        return self[:2] == before[:2] and self.size_bytes >= before.size_bytes


class SeenFiles:
    """The file that each segment had when it was last opened, and its size. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[int, _FileId] = {}
        self._lost: set[int] = set()

    def note(self, segment: int, fd: int) -> None:
        """Remember the file of a segment; one that differs from the file before is a loss."""
        with self._lock:  # a size from before another thread made it longer would be a loss
            file_id = _FileId.of(os.fstat(fd))
            before = self._seen.pop(segment, file_id)
            if not file_id.holds(before):
                self._lost.add(segment)
            self._remember(segment, file_id)

    def drop(self, segment: int) -> None:
        """Forget the file of a segment whose creation failed."""
        with self._lock:
            self._seen.pop(segment, None)

    def forget(self, segment: int) -> None:
        """Forget the file of a segment that was removed by this process."""
        with self._lock:
            self._seen.pop(segment, None)
            self._lost.discard(segment)

    def take_lost(
        self,
        opened: Callable[[], AbstractContextManager[Directory]],
        relied_on: AbstractSet[int],
    ) -> set[int]:
        """Return the segments whose files are gone or were cut off; each once.

        Of those that are `relied_on` and were not seen yet, the ones without a file; the others are
        remembered. `opened` opens the directory.
        """
        with self._lock:
            lost, self._lost = self._lost, set()
            known: dict[int, _FileId | None] = dict.fromkeys(relied_on) | self._seen
        for segment, before in self._find_lost(opened, known):
            lost.add(segment)
            with self._lock:
                self._lost.discard(segment)
                if self._seen.get(segment) == before:  # else another thread has made a new one
                    self._seen.pop(segment, None)
        return lost

    def _find_lost(
        self,
        opened: Callable[[], AbstractContextManager[Directory]],
        known: dict[int, _FileId | None],
    ) -> Iterator[tuple[int, _FileId | None]]:
        try:
            with opened() as directory:
                for segment, before in known.items():
                    with suppress(OSError):  # the device fails, which tells nothing
                        now = _find_file(directory, segment)
                        if now is None or not now.holds(before or now):
                            yield segment, before
                        elif before is None:
                            with self._lock:
                                self._remember(segment, self._seen.get(segment, now))
        except OSError as error:
            if error.errno in _GONE:
                yield from known.items()

    def _remember(self, segment: int, file_id: _FileId) -> None:
        self._seen[segment] = file_id
        if len(self._seen) > _SEEN_MAX:
            del self._seen[next(iter(self._seen))]


def _find_file(directory: Directory, segment: int) -> _FileId | None:
    try:
        return _FileId.of(directory.status(segment_name(segment)))
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
