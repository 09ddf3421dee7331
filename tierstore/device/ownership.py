"""Whose a file or directory is, and who else may open it."""

import errno
import os
import stat
from pathlib import Path

from tierstore.errors import BackendForeignError

__all__ = ["DIRECTORY_MODE", "FILE_MODE", "foreign_user", "is_own_file", "kind_of", "set_mode"]

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600


def foreign_user(path: Path, status: os.stat_result) -> str:
    """Return the refusal of what belongs to another user."""
    return (
        f"{path}: belongs to the user with id {status.st_uid}, and this process runs as "
        f"{os.geteuid()}; choose a subdirectory of your own as the tier's path, or give it to the "
        "user of this process (chown -R)"
    )


def is_own_file(status: os.stat_result) -> bool:
    """Return whether it is a regular file of this user with one name.

    With a second name it may be a file of another program, which would be written and cut off.
    """
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_uid == os.geteuid()


def kind_of(status: os.stat_result) -> str:
    """Return what something is, in words for a message."""
    if stat.S_ISREG(status.st_mode):
        return f"a file with {status.st_nlink} names"
    kinds = {
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFDIR: "an empty directory",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(status.st_mode), "a device")


def set_mode(descriptor: int, path: Path, mode: int) -> None:
    """Set a mode by a descriptor, which may be of O_PATH; `path` is for messages.

    Raises:
        BackendForeignError: the file system keeps no modes.
        OSError: the mode cannot be set.
    """
    try:
        os.fchmod(descriptor, mode)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        Path(f"/proc/self/fd/{descriptor}").chmod(mode)
    if stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o077:
        raise BackendForeignError(
            f"{path}: the file system does not keep other users out; mount it with a umask of 077, "
            "or put the tier on a file system such as ext4 or xfs"
        )
