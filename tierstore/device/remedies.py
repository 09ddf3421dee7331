"""What helps against an error of the operating system: one table, for all messages."""

import errno
import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["FULL", "explain", "remedy_in", "remedy_of"]

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a device, or of a user's share of it, without room."""

_PERMISSION = "make the path writable for the user of this process"
_DEVICE = "check the health of the device, and whether it is mounted"
_UNKNOWN = "make the path writable, and check the health of the device"
_FILE_SYSTEM = "put the tier on a local file system such as ext4 or xfs"

_REMEDIES: Mapping[int, str] = {
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EROFS: "mount the file system for writing, or choose another path",
    errno.ENOSPC: "free space on the device",
    errno.EDQUOT: "raise the user's quota on the device, or free space of his",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f, RLIMIT_FSIZE), or put the tier "
    "on a file system for larger files",
    errno.EISDIR: "move the directory away that has the name of a file of the tier",
    errno.ENOTDIR: "move the file away that has the name of a directory of the path, or choose "
    "another path",
    errno.EEXIST: "move away what has the name of a file or directory of the tier",
    errno.ENOTEMPTY: "move the directory away that has the name of a file of the tier",
    errno.ENOENT: "make the directory, or mount what belongs there",
    errno.ELOOP: "remove the symbolic link: none is followed below a tier's path, and none may "
    "lead in a circle",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EMFILE: "raise the limit of open files of the process (ulimit -n, RLIMIT_NOFILE)",
    errno.ENFILE: "raise the limit of open files of the machine (fs.file-max)",
    errno.ENOMEM: "raise the limit on addresses (ulimit -v), or give the machine more memory",
    errno.ENOLCK: _FILE_SYSTEM,
    errno.EOPNOTSUPP: _FILE_SYSTEM,
    errno.ENOSYS: _FILE_SYSTEM,
    errno.EINVAL: _FILE_SYSTEM,
    errno.ETXTBSY: "end the program that runs a file of the tier",
    errno.EBUSY: "end the program that keeps the path busy",
    errno.EIO: _DEVICE,
    errno.ENXIO: _DEVICE,
    errno.ENODEV: _DEVICE,
    errno.ESTALE: _DEVICE,
    errno.ETIMEDOUT: _DEVICE,
    errno.ENOTCONN: _DEVICE,
}

_BY_TEXT = {os.strerror(code): remedy for code, remedy in _REMEDIES.items()}


def remedy_of(error: OSError) -> str:
    """Return what a user can do against an error of the operating system."""
    return _REMEDIES.get(error.errno or 0, _UNKNOWN)


def remedy_in(text: str) -> str | None:
    """Return the remedy for the error that a library names in words; None: it names none."""
    return next((remedy for words, remedy in _BY_TEXT.items() if words in text), None)


def explain(path: Path | str, error: OSError) -> str:
    """Return the text of an error of ours: where, what, and what to do."""
    return f"{path}: {error.strerror or error}; {remedy_of(error)}"
