"""Who shares a path: one file per owner, `owners/<id>.lock`, locked as long as anyone acts for him.

An owner is a process with a control plane, together with the data planes of its ranks, which may
outlive it. Each holds a shared lock; who can have the exclusive one finds nobody left. The kernel
drops a lock when its process dies, however it dies. An id is never used twice, and an owner has
rows in the catalog only while his file is locked or after his death.
"""

import errno
import fcntl
import os
import threading
import time
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Self

from tierstore.errors import CatalogError

__all__ = ["OwnerLock", "OwnerLocks", "bury_dead", "is_owner_dead"]

_JOIN_ATTEMPTS = 50
_JOIN_PAUSE_SECONDS = 0.01
"""Somebody who looks whether an owner is dead has his lock for a moment."""

_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}

_held: "weakref.WeakSet[OwnerLock]" = weakref.WeakSet()


class OwnerLock:
    """One of the locks of a live owner.

    It is not passed on by a fork: the kernel would keep it as long as the child has a copy of the
    descriptor, and the child's `close` would make a living parent look dead.
    """

    def __init__(self, path: Path, owner: int, descriptor: int) -> None:
        """Take over a descriptor that holds the lock; use `create` or `join`."""
        self.owner = owner
        self._path = path
        self._descriptor = descriptor
        _held.add(self)
        _watch_forks()

    @classmethod
    def create(cls, directory: Path, owner: int) -> Self:
        """Create and lock the file, inside a write transaction, lest it be judged too early.

        Raises:
            CatalogError: the directory cannot be written, or the file is locked.
        """
        path = _lock_path(directory, owner)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise CatalogError(f"{path}: {error}; make the tier's path writable") from error
        try:
            # Nobody else may have it now: ranks of an owner with this id, of a catalog that is no
            # more, would write what is not accounted for.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        except OSError as error:
            os.close(descriptor)
            raise CatalogError(
                f"{path}: {error}; put the tier on a file system that can lock files, and stop the "
                "process that has locked this one"
            ) from error
        return cls(path, owner, descriptor)

    @classmethod
    def join(cls, directory: Path, owner: int) -> Self | None:
        """Lock the file of a live owner, too; None: he is dead, or cannot be joined."""
        path = _lock_path(directory, owner)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        for _ in range(_JOIN_ATTEMPTS):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                time.sleep(_JOIN_PAUSE_SECONDS)
                continue
            if os.fstat(descriptor).st_nlink == 0:  # buried between the two calls
                break
            return cls(path, owner, descriptor)
        os.close(descriptor)
        return None

    def is_in_place(self) -> bool:
        """Return whether the locked file is still where others look for it.

        True also where nobody can tell, for the device fails.
        """
        try:
            ours, theirs = os.fstat(self._descriptor), self._path.stat()
        except OSError as error:
            return error.errno not in _GONE
        return os.path.samestat(ours, theirs)

    def remove(self) -> None:
        """Remove the file: no data plane writes for this owner from now on."""
        with suppress(OSError):
            if self.is_in_place():
                self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Give up the lock, and remove the file if nobody else holds it; idempotent."""
        if self._descriptor >= 0:
            # Left to the next opener otherwise: a rank may write on.
            with suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self.is_in_place():
                    self._path.unlink(missing_ok=True)
            self.leave_to_parent()

    def leave_to_parent(self) -> None:
        """Close this process's descriptor and nothing else."""
        os.close(self._descriptor)
        self._descriptor = -1
        _held.discard(self)


class OwnerLocks:
    """The locks that a data plane holds, one for each owner whose commands it carries out."""

    def __init__(self, tier_path: Path) -> None:
        self._tier_path = tier_path
        self._lock = threading.Lock()
        self._locks: dict[int, OwnerLock] = {}
        self._is_shared = self._has_catalog()

    def hold(self, owner: int) -> bool:
        """Return whether the owner lives, and let him live until `close`; thread-safe.

        False: somebody may have taken over his places, so nothing may be written there; or the path
        was removed, and what comes there is somebody else's. Where no catalog was ever seen below
        the path it is of another machine, and nobody shares it here.
        """
        with self._lock:
            held = self._locks.get(owner)
            if held is not None:
                if held.is_in_place():
                    return True
                del self._locks[owner]
                held.close()
                return False
            self._is_shared = self._is_shared or self._has_catalog()
            if not self._is_shared:
                return True
            lock = OwnerLock.join(self._tier_path / "owners", owner)
            if lock is not None:
                self._locks[owner] = lock
            return lock is not None

    def _has_catalog(self) -> bool:
        return (self._tier_path / "catalog").exists()

    def close(self) -> None:
        """Give up all locks; idempotent."""
        with self._lock:
            for lock in self._locks.values():
                lock.close()
            self._locks.clear()


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_leave_all_to_parent)


def _leave_all_to_parent() -> None:
    for lock in list(_held):
        lock.leave_to_parent()


def is_owner_dead(directory: Path, owner: int) -> bool:
    """Return whether nobody acts for an owner; his file is removed then, so nobody ever will."""
    path = _lock_path(directory, owner)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False  # unknown: leave his rows alone
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # While it is locked: who waits to join must find it gone.
        path.unlink(missing_ok=True)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


def bury_dead(directory: Path) -> None:
    """Remove the files of dead owners, inside a write transaction."""
    for path in directory.glob("*.lock"):
        if path.stem.isdecimal():
            is_owner_dead(directory, int(path.stem))


def _lock_path(directory: Path, owner: int) -> Path:
    return directory / f"{owner}.lock"
