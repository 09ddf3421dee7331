"""The directory in which the segment files of one rank lie: `<directory>/<segment:08x>.seg`."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tierstore.backend.names import segment_name
from tierstore.device.directory import Directory
from tierstore.device.marker import open_below
from tierstore.device.system import SystemCalls
from tierstore.errors import BackendError

__all__ = ["SegmentDirectory"]


class SegmentDirectory:
    """A directory that is opened by its path for each use: it may be replaced at any time."""

    def __init__(self, path: Path, *, system: SystemCalls, tier: Path | None) -> None:
        """Describe the directory; no link is followed below `tier`, the path of the tier."""
        self._path = path
        self._system = system
        self._tier = tier

    @contextmanager
    def opened(self, *, create: bool = False) -> Iterator[Directory]:
        """Open the directory for as long as the block lasts.

        Raises:
            OSError: it cannot be opened, or what is asked of it fails; EISDIR for a directory with
                content in the place of a segment, EPERM for what else belongs to another user.
        """
        try:
            with self._open(create=create) as directory:
                yield directory
        except BackendError as error:
            code = errno.EISDIR if isinstance(error.__cause__, OSError) else errno.EPERM
            raise OSError(code, str(error)) from error

    def open_file(self, segment: int, flags: int) -> int:
        """Open a segment's file; with O_CREAT, the directory is made too.

        Raises:
            OSError: as `opened`, or the file cannot be opened.
        """
        with self.opened(create=bool(flags & os.O_CREAT)) as directory:
            return directory.open_file(segment_name(segment), flags)

    def unlink(self, segment: int) -> None:
        """Remove the name of a segment's file.

        Raises:
            OSError: as `opened`, or it is not there, or cannot be removed.
        """
        with self.opened() as directory:
            directory.unlink(segment_name(segment))

    def path_of(self, segment: int) -> Path:
        """Return the path of a segment's file."""
        return self._path / segment_name(segment)

    def has_name(self, segment: int) -> bool:
        """Return whether anything has the name of a segment's file."""
        return os.path.lexists(self.path_of(segment))

    def find(self, segment: int) -> os.stat_result | None:
        """Return the status of what has the name of a segment's file; None: nothing has it.

        Raises:
            OSError: the directory cannot be read.
        """
        try:
            return self.path_of(segment).lstat()
        except FileNotFoundError:
            return None

    def _open(self, *, create: bool) -> Directory:
        if self._tier is not None or not create:
            return open_below(self._tier, self._path, create=create, system=self._system)
        # Not its parents: a path that vanished is used again once it is made, but not by a write.
        with Directory.open(self._path.parent, system=self._system) as parent:
            return parent.subdirectory(self._path.name, create=True)
