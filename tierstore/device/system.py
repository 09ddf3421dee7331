"""The system calls to a tier's device, in one place, so that tests can make any of them fail.

LMDB makes its system calls itself; it is stopped at named points.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path

import numpy as np

__all__ = [
    "IOVEC_COUNT_MAX",
    "SYSTEM",
    "DatabasePoint",
    "SystemCalls",
    "buffer_address",
    "read_up_to_end",
]

IOVEC_COUNT_MAX = os.sysconf("SC_IOV_MAX")

_DIRECTORY_MODE = 0o700

_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)


def buffer_address(buffer: memoryview | mmap.mmap) -> int:
    """Return the address of a buffer; valid as long as its owner lives."""
    return np.frombuffer(buffer, np.uint8).ctypes.data


def read_up_to_end(
    call: Callable[[int, Sequence[memoryview], int], int], fd: int, buffer: memoryview, offset: int
) -> int:
    """Fill a buffer by a `preadv`, asked again for what it leaves; return the bytes read.

    Fewer than asked only at the end of the file. A kernel may stop anywhere, and a sound file must
    not be taken for a truncated one. Not for O_DIRECT.

    Raises:
        OSError: the device failed, or stops before the end again and again.
    """
    done = 0
    is_stuck = False
    while done < len(buffer):
        moved = call(fd, [buffer[done:]], offset + done)
        done += moved
        if moved > 0:
            is_stuck = False
        elif os.fstat(fd).st_size <= offset + done:
            break
        elif is_stuck:
            raise OSError(errno.EIO, "reads stop before the end of the file")
        else:
            is_stuck = True  # another process may have written meanwhile
    return done


class DatabasePoint(Enum):
    """A point in the use of a database at which it may fail, hang, or the process end."""

    OPEN = "open"
    """Before the library opens it."""
    READ = "read"
    """Before a read transaction begins."""
    WRITE = "write"
    """Before a write transaction begins."""
    COMMIT = "commit"
    """All is changed, and nothing is to be seen of it yet."""
    COMMITTED = "committed"
    """Others see it; the device has not been asked to keep it."""
    SYNC = "sync"
    """Before what was committed is flushed to the device."""


class SystemCalls:
    """What the kernel is asked for; every method raises OSError and nothing else."""

    def open(self, path: Path | str, flags: int, directory: int | None = None) -> int:
        """Open a file, relative to the descriptor of a directory if there is one.

        New ones are readable and writable for their owner only.
        """
        return os.open(path, flags | os.O_CLOEXEC, 0o600, dir_fd=directory)

    def make_directory(self, path: Path | str, directory: int | None = None) -> None:
        """Make a directory for its owner only, whatever the mask of the process.

        Relative to the descriptor of a directory if there is one.
        """
        os.mkdir(path, _DIRECTORY_MODE, dir_fd=directory)
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, dir_fd=directory)
        try:
            status = os.fstat(descriptor)
            if status.st_uid == os.geteuid() and status.st_mode & 0o777 != _DIRECTORY_MODE:
                Path(f"/proc/self/fd/{descriptor}").chmod(_DIRECTORY_MODE)
        finally:
            os.close(descriptor)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read into buffers; may read less than asked."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write buffers; may write less than asked."""
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, size_bytes: int) -> None:
        """Reserve blocks for a range of a file and extend the file over it.

        Where the file system cannot do that, nothing is written instead, as the C library would.
        """
        _fallocate(fd, 0, offset, size_bytes)

    def punch_hole(self, fd: int, offset: int, size_bytes: int) -> None:
        """Give the blocks of a range back; it reads as zeros from now on."""
        _fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset, size_bytes)

    def flush(self, fd: int) -> None:
        """Flush a file's bytes to the device."""
        os.fdatasync(fd)

    def unlink(self, path: Path | str, directory: int | None = None) -> None:
        """Remove a file's name, relative to the descriptor of a directory if there is one."""
        os.unlink(path, dir_fd=directory)

    def truncate(self, fd: int, size_bytes: int) -> None:
        """Give a file a size."""
        os.ftruncate(fd, size_bytes)

    def at_database(self, directory: Path) -> "SystemCalls":
        """Return what the database below `directory` passes its points through: this one."""
        del directory
        return self

    def reach(self, point: DatabasePoint) -> None:
        """Pass a point of a database; this one does nothing."""

    def copy_mapped(self, address: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Copy from a mapping at `address` into buffers; may copy less than asked.

        The kernel copies on our behalf: where a truncated file or a failing device would end the
        process by SIGBUS, this call stops early or raises EFAULT.
        """
        sizes = [len(buffer) for buffer in buffers]
        local = np.array([list(map(buffer_address, buffers)), sizes], np.uint64).T.copy()
        remote = np.array([address + offset, sum(sizes)], np.uint64)
        copied = _libc.process_vm_readv(
            os.getpid(), local.ctypes.data, len(sizes), remote.ctypes.data, 1, 0
        )
        if copied < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return int(copied)


def _fallocate(fd: int, mode: int, offset: int, size_bytes: int) -> None:
    while _libc.fallocate(fd, mode, offset, size_bytes) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


SYSTEM = SystemCalls()
"""The kernel as it is."""
