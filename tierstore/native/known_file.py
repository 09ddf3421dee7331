"""A file that a path led to, and must still lead to when bytes are moved."""

import ctypes
import os
from typing import TYPE_CHECKING, Self

__all__ = ["KnownFile"]

_OF_ANY_SIZE = -1


class KnownFile(ctypes.Structure):
    """What the native calls compare with what a path leads to: `known_t`. Not changed once made.

    To look in the call costs no turn of the interpreter. A device and an inode are one file's for
    sure as long as it is open.
    """

    _fields_ = (
        ("path", ctypes.c_char_p),
        ("device", ctypes.c_uint64),
        ("inode", ctypes.c_uint64),
        ("size_bytes", ctypes.c_int64),
    )
    if TYPE_CHECKING:
        path: bytes
        device: int
        inode: int
        size_bytes: int

    @classmethod
    def of(cls, path: str | os.PathLike[str], device: int, inode: int) -> Self:
        """Return a file or directory of any size; `path` may lead to it by links."""
        return cls(os.fsencode(path), device, inode, _OF_ANY_SIZE)

    @classmethod
    def of_segment(
        cls, path: str | os.PathLike[str], device: int, inode: int, size_bytes: int
    ) -> Self:
        """Return a file that must have one name and at least this size; `path` must be no link."""
        return cls(os.fsencode(path), device, inode, size_bytes)
