"""Who shares a path: one locked file per live process, `owners/<id>.lock`.

The kernel drops the lock when its process dies, however it dies. An id is never used twice, and an
owner has rows in the catalog only while its file is locked or after its death.
"""

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

from tierstore.errors import CatalogError

__all__ = ["OwnerLock", "forget_owner_files", "is_owner_dead"]


class OwnerLock:
    """The lock of one live owner; taken inside a write transaction, lest it be judged too early."""

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
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CatalogError(f"{self._path}: {error}; make the tier's path writable") from error

    def close(self) -> None:
        """Remove the file and its lock; idempotent."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


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
