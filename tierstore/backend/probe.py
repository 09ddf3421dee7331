"""What a file system can do, found out on the path itself when a backend is opened."""

import errno
import fcntl
import logging
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from tierstore.bounded_log import bounded
from tierstore.errors import BackendError, BackendFullError
from tierstore.layout import PAGE_BYTES
from tierstore.remedies import explain
from tierstore.system import SystemCalls, buffer_address

__all__ = ["FileSystemAbilities", "probe"]

_logger = bounded(logging.getLogger(__name__))

_UNSUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV, errno.EPERM}
_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True, slots=True)
class FileSystemAbilities:
    """Which ways of reading a path allows."""

    direct: bool
    """O_DIRECT with page alignment."""
    mapped: bool
    """Copies out of a mapped file by the kernel (`SystemCalls.copy_mapped`)."""


def probe(directory: Path, system: SystemCalls) -> FileSystemAbilities:
    """Try allocation, hole punching, direct and mapped reads on a file without a name.

    Raises:
        BackendError: the directory is not writable, or cannot give back parts of a file.
    """
    path = directory / f".probe-{os.urandom(8).hex()}"
    try:
        fd = system.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            system.unlink(path)
            return _probe_file(fd, directory, system)
        finally:
            os.close(fd)
    except OSError as error:
        kind = BackendFullError if error.errno in _FULL else BackendError
        raise kind(explain(directory, error)) from error


def _probe_file(fd: int, directory: Path, system: SystemCalls) -> FileSystemAbilities:
    page = memoryview(mmap.mmap(-1, PAGE_BYTES))
    # A hole takes no room: what was stored earlier can be read even from a full device.
    os.ftruncate(fd, 2 * PAGE_BYTES)
    abilities = FileSystemAbilities(
        direct=_can_read_directly(fd, page, system), mapped=_can_copy_mapped(fd, page, system)
    )
    try:
        system.allocate(fd, 0, 2 * PAGE_BYTES)
        system.pwritev(fd, [page], 0)
        system.punch_hole(fd, 0, PAGE_BYTES)
    except OSError as error:
        if error.errno in _FULL:
            _logger.warning("device is full, nothing can be written yet: %s", directory)
        elif error.errno in _UNSUPPORTED:
            raise BackendError(
                f"{directory}: the file system cannot punch holes into files ({error}); set "
                "`backend: lmdb` for this tier, or use another file system such as ext4 or xfs"
            ) from error
        else:
            raise
    return abilities


def _can_read_directly(fd: int, page: memoryview, system: SystemCalls) -> bool:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        return system.preadv(fd, [page], PAGE_BYTES) == PAGE_BYTES
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def _can_copy_mapped(fd: int, page: memoryview, system: SystemCalls) -> bool:
    try:
        mapping = mmap.mmap(fd, PAGE_BYTES, prot=mmap.PROT_READ)
        return system.copy_mapped(buffer_address(mapping), [page], 0) == PAGE_BYTES
    except OSError as error:
        # EFAULT: the page cannot be had, for example because the device is full.
        if error.errno not in (*_UNSUPPORTED, errno.EFAULT):
            raise
        return False
