"""The system calls of the file backend, in one place, so that a test can make any of them fail."""

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

__all__ = ["IOVEC_COUNT_MAX", "SystemCalls", "buffer_address"]

IOVEC_COUNT_MAX = os.sysconf("SC_IOV_MAX")

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


class SystemCalls:
    """What the kernel is asked for; every method raises OSError and nothing else."""

    def open(self, path: Path, flags: int) -> int:
        """Open a file; new ones are readable and writable for their owner only."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read into buffers; may read less than asked."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write buffers; may write less than asked."""
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, size_bytes: int) -> None:
        """Reserve blocks for a range of a file and extend the file over it."""
        os.posix_fallocate(fd, offset, size_bytes)

    def punch_hole(self, fd: int, offset: int, size_bytes: int) -> None:
        """Give the blocks of a range back; it reads as zeros from now on."""
        mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
        while _libc.fallocate(fd, mode, offset, size_bytes) != 0:
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))

    def flush(self, fd: int) -> None:
        """Flush a file's bytes to the device."""
        os.fdatasync(fd)

    def unlink(self, path: Path) -> None:
        """Remove a file's name."""
        path.unlink()

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
