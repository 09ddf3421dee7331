"""What a file system can do, tried on the path itself when a backend is opened."""

import errno
import fcntl
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from tierstore.device.block_units import FULL, UNSUPPORTED, unnamed_file
from tierstore.device.remedies import explain
from tierstore.device.system import SystemCalls, buffer_address
from tierstore.errors import BackendError, BackendFullError
from tierstore.layout import PAGE_BYTES

__all__ = ["FileSystemAbilities", "probe"]


@dataclass(frozen=True, slots=True)
class FileSystemAbilities:
    """Which ways of reading a path allows."""

    direct: bool
    """O_DIRECT with page alignment."""
    mapped: bool
    """Copies out of a mapped file by the kernel (`SystemCalls.copy_mapped`), which leave holes."""


def probe(directory: Path, system: SystemCalls) -> FileSystemAbilities:
    """Try direct and mapped reads on a file without a name.

    Raises:
        BackendError: the directory is not writable.
    """
    try:
        fd = unnamed_file(directory, system)
        try:
            page = memoryview(mmap.mmap(-1, PAGE_BYTES))
            # A hole takes no blocks: a full device can still be opened and read.
            system.truncate(fd, 2 * PAGE_BYTES)
            return FileSystemAbilities(
                direct=_can_read_directly(fd, page, system),
                mapped=_can_copy_mapped(fd, page, system),
            )
        finally:
            os.close(fd)
    except OSError as error:
        kind = BackendFullError if error.errno in FULL else BackendError
        raise kind(explain(directory, error)) from error


def _can_read_directly(fd: int, page: memoryview, system: SystemCalls) -> bool:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        return system.preadv(fd, [page], PAGE_BYTES) == PAGE_BYTES
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def _can_copy_mapped(fd: int, page: memoryview, system: SystemCalls) -> bool:
    try:
        taken_blocks = os.fstat(fd).st_blocks
        mapping = mmap.mmap(fd, PAGE_BYTES, prot=mmap.PROT_READ)
        if system.copy_mapped(buffer_address(mapping), [page], 0) < PAGE_BYTES:
            return False
        # tmpfs fills a hole that is read in a mapping: a late read would bring back, uncounted,
        # the blocks that an eviction gave back.
        return os.fstat(fd).st_blocks <= taken_blocks
    except OSError as error:
        # EFAULT: the page cannot be had, for example because the device is full.
        if error.errno not in (*UNSUPPORTED, errno.EFAULT):
            raise
        return False
