"""Pages that the library touches while it holds the interpreter, touched before without it.

The begin and the end of a read transaction write to the table of readers, in the mapped lock file,
and read the first pages of the data file; the library holds the interpreter meanwhile. On a device
that hangs, such a page may be waited for without end: the kernel may just write it back, or have
dropped it. So a reading thread touches these pages first through another mapping, by calls that
release the interpreter: only this thread waits then. What is left is the moment between the two.
"""

import ctypes
import errno
import mmap
import os
from contextlib import ExitStack

from tierstore.device.directory import Directory
from tierstore.lmdb_env.lock import LIBRARY_LOCK_NAME

__all__ = ["ReachedPages"]

_DATA_NAME = "data.mdb"
_DATA_BYTES = 2 * mmap.PAGESIZE
"""The two meta pages."""
_LOCK_BYTES_MAX = 2 * mmap.PAGESIZE
"""Slots for as many readers as we open an environment for."""


class ReachedPages:
    """Mappings of one environment's files; to be closed after the environment, not before.

    With its descriptors of the lock file, of which a mapping has one too, the locks go that this
    process has in it. So what a failed `map` leaves is closed by `close`, and by nothing else.
    """

    def __init__(self) -> None:
        """Map nothing yet."""
        self._files = ExitStack()
        self._written: list[int] = []
        self._read = 0

    def map(self, files: Directory) -> None:
        """Map the files of an environment that is open.

        Raises:
            OSError: they cannot be opened or mapped, or another process has just cut them short.
        """
        self._copy = ctypes.create_string_buffer(_DATA_BYTES)
        lock_file = files.open_file(LIBRARY_LOCK_NAME, os.O_RDWR)
        self._files.callback(os.close, lock_file)
        lock_map = _map(lock_file, 0, mmap.MAP_SHARED)
        self._files.callback(lock_map.close)
        data_map = _map_meta_pages(files)
        self._files.callback(data_map.close)
        # The last byte of a page is padding: slots of readers are 64 bytes, and the last 40 unused.
        last = mmap.PAGESIZE - 1
        offsets = range(last, min(len(lock_map), _LOCK_BYTES_MAX), mmap.PAGESIZE)
        self._written = [_address(lock_map) + offset for offset in offsets]
        self._read = _address(data_map)

    def reach(self) -> None:
        """Wait until all can be touched that a reading begins with."""
        ctypes.memmove(self._copy, self._read, _DATA_BYTES)
        self.reach_readers()

    def reach_readers(self) -> None:
        """Wait until all can be touched that a reading ends with."""
        for address in self._written:
            ctypes.memset(address, 0, 1)

    def close(self) -> None:
        """Give the mappings and the descriptor back; no page may be touched after that."""
        self._files.close()


def _map_meta_pages(files: Directory) -> mmap.mmap:
    """Map the beginning of the data file; only writable pages have an address for `ctypes`."""
    descriptor = files.open_file(_DATA_NAME, os.O_RDONLY)
    try:
        return _map(descriptor, _DATA_BYTES, mmap.MAP_PRIVATE)
    finally:
        os.close(descriptor)


def _map(descriptor: int, size_bytes: int, flags: int) -> mmap.mmap:
    """Map so many bytes of a file, or all (0)."""
    try:
        return mmap.mmap(descriptor, size_bytes, flags=flags)
    except ValueError as error:
        raise OSError(errno.EIO, f"was cut short while it was opened: {error}") from error


def _address(mapped: mmap.mmap) -> int:
    # The reference ends at once, or the mapping could not be closed.
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))
