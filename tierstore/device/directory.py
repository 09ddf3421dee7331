"""A directory that is held by a descriptor: what lies in it is input, and reached by name alone.

No link is followed below it. A file of ours is regular, belongs to this user, has one name, and no
other user may open it. Anything else with such a name is removed if no content is lost: the name of
a link, a pipe, a socket or a device, one of several names of a file, an empty directory. What has
content, or belongs to another user, is refused by name. To refuse all of it lost: one planted link
would keep an engine from its cache.
"""

import errno
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

from tierstore.bounded_log import bounded
from tierstore.device.ownership import (
    DIRECTORY_MODE,
    FILE_MODE,
    foreign_user,
    is_own_file,
    kind_of,
    set_mode,
)
from tierstore.device.system import SYSTEM, SystemCalls, read_up_to_end
from tierstore.errors import BackendError, BackendForeignError

__all__ = ["Directory"]

_logger = bounded(logging.getLogger(__name__))

_ATTEMPTS = 100
"""Openings at most, while other processes make, replace and remove the same name."""

_INTRUDED = {errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV}
"""Errors of an opening when something else took the name just before it."""


class Directory:
    """An open directory; a context manager."""

    def __init__(self, path: Path, descriptor: int, *, system: SystemCalls = SYSTEM) -> None:
        """Take over a descriptor; use `open` or `subdirectory`. `path` is for messages."""
        self.path = path
        self.descriptor = descriptor
        self._system = system

    @classmethod
    def open(cls, path: Path, *, create: bool = False, system: SystemCalls = SYSTEM) -> Self:
        """Open a directory by a path that a user chose, through whatever links lead to it.

        With `create` it is made if it is not there, with its parents.

        Raises:
            OSError: it cannot be opened, or is no directory.
        """
        flags = os.O_RDONLY | os.O_DIRECTORY
        try:
            return cls(path, system.open(path, flags), system=system)
        except FileNotFoundError:
            if not create:
                raise
        _make_with_parents(path, system)
        return cls(path, system.open(path, flags), system=system)

    def subdirectory(self, name: str, *, create: bool = False) -> "Directory":
        """Open a directory of ours, and close it to others.

        With `create` it is made if it is absent; what is no directory is removed.

        Raises:
            BackendForeignError: it belongs to another user.
            OSError: it is not there or is no directory, or cannot be made or opened.
        """
        for _ in range(_ATTEMPTS):
            try:
                status = self.status(name)
            except FileNotFoundError:
                if not create:
                    raise
                self._make(name)
                continue
            if not stat.S_ISDIR(status.st_mode):
                if not create:
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name)
                self._remove_intruder(name, status)
                continue
            self._require_own(name, status)
            descriptor = self._open_repaired(name, os.O_RDONLY | os.O_DIRECTORY)
            if descriptor is not None:
                opened = Directory(self.path / name, descriptor, system=self._system)
                try:
                    opened.tighten()
                except BaseException:
                    opened.close()
                    raise
                return opened
        raise self._unsteady(name)

    def open_file(self, name: str, flags: int) -> int:
        """Open a file of ours, readable for this user only; anything else with its name is removed.

        Raises:
            BackendForeignError: a directory with content has its name, or it belongs to another
                user.
            OSError: it is not there, or cannot be made or opened.
        """
        for _ in range(_ATTEMPTS):
            self.clear(name)
            descriptor = self._open_repaired(name, flags | os.O_NONBLOCK)
            if descriptor is None:
                continue
            try:
                status = os.fstat(descriptor)
                if is_own_file(status):
                    if stat.S_IMODE(status.st_mode) != FILE_MODE:
                        set_mode(descriptor, self.path / name, FILE_MODE)
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        raise self._unsteady(name)

    def clear(self, name: str) -> None:
        """Remove what has the name of a file of ours but is not one.

        Raises:
            BackendForeignError: a directory with content, or it belongs to another user.
            OSError: it cannot be removed.
        """
        try:
            status = self.status(name)
        except FileNotFoundError:
            return
        if stat.S_ISREG(status.st_mode):
            self._require_own(name, status)
        if not is_own_file(status):
            self._remove_intruder(name, status)

    def clear_for_directory(self, name: str) -> None:
        """Remove what has the name of a directory of ours but is not one.

        Raises:
            OSError: it cannot be removed.
        """
        with suppress(FileNotFoundError):
            status = self.status(name)
            if not stat.S_ISDIR(status.st_mode):
                self._remove_intruder(name, status)

    def read(self, name: str, size_max: int) -> bytes | None:
        """Return the beginning of a small file of ours; None: it is absent.

        Raises:
            BackendForeignError, OSError: as `open_file`.
        """
        try:
            descriptor = self.open_file(name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            content = bytearray(size_max)
            size = read_up_to_end(self._system.preadv, descriptor, memoryview(content), 0)
            return bytes(content[:size])
        finally:
            os.close(descriptor)

    def write(self, name: str, content: bytes) -> None:
        """Replace the content of a small file of ours, made if it is not there.

        Not atomic: a process that is killed meanwhile leaves a part of it.

        Raises:
            BackendForeignError, OSError: as `open_file`.
        """
        descriptor = self.open_file(name, os.O_RDWR | os.O_CREAT)
        try:
            self._system.truncate(descriptor, 0)
            written = self._system.pwritev(descriptor, [memoryview(content)], 0)
            if written < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        finally:
            os.close(descriptor)

    def entries(self) -> Iterator[os.DirEntry[str]]:
        """List what lies here, each with a look at itself and not at what a link leads to.

        Raises:
            OSError: it cannot be read.
        """
        # A listing has a position, which descriptors that were copied from one another share.
        descriptor = self._system.open(".", os.O_RDONLY | os.O_DIRECTORY, self.descriptor)
        try:
            with os.scandir(descriptor) as listed:
                yield from listed
        finally:
            os.close(descriptor)

    def status(self, name: str) -> os.stat_result:
        """Look at what has a name here, a link itself included.

        Raises:
            OSError: there is nothing.
        """
        return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)

    def has_file(self, name: str) -> bool:
        """Return whether a regular file with one name lies here."""
        try:
            status = self.status(name)
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_nlink == 1

    def unlink(self, name: str) -> None:
        """Remove the name of whatever is no directory.

        Raises:
            OSError: it is not there, or cannot be removed.
        """
        self._system.unlink(name, self.descriptor)

    def tighten(self) -> None:
        """Close the directory to all but its user.

        Raises:
            BackendForeignError: the file system keeps no modes.
            OSError: it cannot be done.
        """
        if stat.S_IMODE(os.fstat(self.descriptor).st_mode) & 0o777 != DIRECTORY_MODE:
            set_mode(self.descriptor, self.path, DIRECTORY_MODE)

    def tighten_file(self, name: str) -> None:
        """Close a regular file of ours to all but its user; anything else is left alone.

        Raises:
            BackendForeignError: the file system keeps no modes.
            OSError: it cannot be done.
        """
        # Not to be read nor written, so this touches no lock and needs no permission.
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.descriptor)
        try:
            if is_own_file(os.fstat(descriptor)):
                set_mode(descriptor, self.path / name, FILE_MODE)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self, name: str) -> None:
        try:
            self._system.make_directory(name, self.descriptor)
        except FileExistsError:
            return

    def _open_repaired(self, name: str, flags: int) -> int | None:
        """Open what is ours, whatever its mode; None: something else came between."""
        flags |= os.O_NOFOLLOW
        try:
            return self._system.open(name, flags, self.descriptor)
        except PermissionError:
            # A mask of the process that made it may have left its own user without a right.
            if not self._repair_mode(name):
                raise
            return self._system.open(name, flags, self.descriptor)
        except NotADirectoryError:
            return None
        except OSError as error:
            if error.errno not in _INTRUDED:
                raise
            return None

    def _repair_mode(self, name: str) -> bool:
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.descriptor)
        try:
            status = os.fstat(descriptor)
            is_directory = stat.S_ISDIR(status.st_mode)
            mode = DIRECTORY_MODE if is_directory else FILE_MODE
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o777 == mode:
                return False
            if not is_directory and not is_own_file(status):
                return False
            set_mode(descriptor, self.path / name, mode)
            return True
        finally:
            os.close(descriptor)

    def _require_own(self, name: str, status: os.stat_result) -> None:
        if status.st_uid != os.geteuid():
            raise BackendForeignError(foreign_user(self.path / name, status))

    def _remove_intruder(self, name: str, status: os.stat_result) -> None:
        kind = kind_of(status)
        try:
            if stat.S_ISDIR(status.st_mode):
                os.rmdir(name, dir_fd=self.descriptor)
            else:
                self._system.unlink(name, self.descriptor)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise
            raise BackendForeignError(
                f"{self.path / name}: is a directory with content where a file of the tier "
                "belongs; move it away"
            ) from error
        _logger.warning(
            "removed what had the name of a file of ours: path=%.200r was=%s",
            str(self.path / name),
            kind,
        )

    def _unsteady(self, name: str) -> BackendError:
        return BackendError(
            f"{self.path / name}: is replaced again and again while it is opened; end the program "
            "that does so"
        )


def _make_with_parents(path: Path, system: SystemCalls) -> None:
    try:
        system.make_directory(path)
    except FileNotFoundError:
        if path.parent == path:
            raise
        _make_with_parents(path.parent, system)
        try:
            system.make_directory(path)
        except FileExistsError:
            return
    except FileExistsError:
        return
