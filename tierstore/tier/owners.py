"""Who shares a path: one locked file per live process, `owners/<id>.lock`.

The kernel drops the lock when its process dies, however it dies. An id is never used twice, and an
owner has rows in the catalog only while its file is locked or after its death.
"""

import fcntl
import os
import weakref
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

from tierstore.errors import CatalogError

__all__ = ["OwnerLock", "forget_owner_files", "is_owner_dead"]


_held: "weakref.WeakSet[OwnerLock]" = weakref.WeakSet()


class OwnerLock:
    """The lock of one live owner; taken inside a write transaction, lest it be judged too early.

    It is not passed on by a fork: the kernel would keep it as long as the child has a copy of the
    descriptor, and the child's `close` would make a living parent look dead.
    """

    def __init__(self, directory: Path, owner: int) -> None:
        """Create and lock the file.

        Raises:
            CatalogError: the directory cannot be written.
        """
        self.owner = owner
        self._path = _lock_path(directory, owner)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise CatalogError(f"{self._path}: {error}; make the tier's path writable") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            raise CatalogError(
                f"{self._path}: {error}; put the tier on a file system that can lock files, and "
                "stop the process that has locked this one"
            ) from error
        _held.add(self)
        _watch_forks()

    def close(self) -> None:
        """Remove the file and its lock; idempotent."""
        if self._descriptor >= 0:
            with suppress(OSError):  # left to the next opener
                self._path.unlink(missing_ok=True)
            self.leave_to_parent()

    def leave_to_parent(self) -> None:
        """Close this process's descriptor and nothing else."""
        os.close(self._descriptor)
        self._descriptor = -1
        _held.discard(self)


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_leave_all_to_parent)


def _leave_all_to_parent() -> None:
    for lock in list(_held):
        lock.leave_to_parent()


def is_owner_dead(directory: Path, owner: int) -> bool:
    """Say whether nobody holds the lock of an owner."""
    try:
        descriptor = os.open(_lock_path(directory, owner), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False  # unknown: leave its rows alone
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


def forget_owner_files(directory: Path, live: Iterable[int]) -> None:
    """Remove the files of dead owners, inside a write transaction."""
    spared = {_lock_path(directory, owner).name for owner in live}
    for path in directory.glob("*.lock"):
        if path.name not in spared and path.stem.isdigit():
            owner = int(path.stem)
            if is_owner_dead(directory, owner):
                path.unlink(missing_ok=True)


def _lock_path(directory: Path, owner: int) -> Path:
    return directory / f"{owner}.lock"
