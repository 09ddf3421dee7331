"""The owners of a path: one file each, `owners/<id>.lock`, locked as long as a process acts for it.

An owner is a process with a control plane, together with the data planes of its ranks, which may
outlive it. Each holds a shared lock. Whoever gets the exclusive lock knows that the owner is dead:
the kernel drops a lock when its process dies, however it dies. An id is never used twice, and an
owner has rows in the catalog only while its file is locked or after its death.
"""

import errno
import fcntl
import os
import re
import threading
import time
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Self

from tierstore.device.directory import Directory
from tierstore.device.marker import open_below
from tierstore.device.remedies import explain
from tierstore.errors import BackendError, CatalogError
from tierstore.native.known_file import KnownFile

__all__ = ["OwnerLock", "OwnerLocks", "is_owner_dead", "remove_dead"]

_JOIN_ATTEMPTS = 50
_JOIN_PAUSE_SECONDS = 0.01
"""A process that checks whether an owner is dead has its lock for a moment."""

_NAME = re.compile(r"(0|[1-9][0-9]{0,9})\.lock", re.ASCII)
"""Of an owner's file; ids have 32 bits."""
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}

_held: "weakref.WeakSet[OwnerLock]" = weakref.WeakSet()


class OwnerLock:
    """One of the locks of a live owner.

    It is not passed on by a fork: the kernel would keep it as long as the child has a copy of the
    descriptor, and the child's `close` would make a living parent look dead.
    """

    def __init__(self, path: Path, owner: int, descriptor: int, status: os.stat_result) -> None:
        """Take over a descriptor that holds the lock, of a file; use `create` or `join`."""
        self.owner = owner
        self._path = path
        self._descriptor = descriptor
        self._status = status
        """Whose device and inode are the file's as long as it is open."""
        self.known_file = KnownFile.of(path, status.st_dev, status.st_ino)
        """What `is_in_place` compares, for a call that looks at the path itself."""
        _held.add(self)
        _watch_forks()

    @classmethod
    def create(cls, directory: Path, owner: int) -> Self:
        """Create and lock the file, inside a write transaction, so that it is not judged too early.

        Raises:
            BackendForeignError: its name belongs to something else.
            CatalogError: the directory cannot be written, or the file is locked.
        """
        path = directory / _name_of(owner)
        try:
            with _open(directory, create=True) as owners:
                descriptor = owners.open_file(path.name, os.O_CREAT | os.O_RDWR)
        except OSError as error:
            raise CatalogError(explain(path, error)) from error
        try:
            # Exclusive first: ranks of an owner with this id in a removed catalog would write what
            # is not accounted for.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            status = os.fstat(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise CatalogError(
                f"{path}: {error}; put the tier on a file system that can lock files, and stop the "
                "process that has locked this one"
            ) from error
        return cls(path, owner, descriptor, status)

    @classmethod
    def join(cls, directory: Path, owner: int) -> Self | None:
        """Lock the file of a live owner, too; None: it is dead, or cannot be joined."""
        path = directory / _name_of(owner)
        try:
            with _open(directory) as owners:
                descriptor = owners.open_file(path.name, os.O_RDWR)
        except (OSError, BackendError):
            return None
        for _ in range(_JOIN_ATTEMPTS):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                time.sleep(_JOIN_PAUSE_SECONDS)
                continue
            status = os.fstat(descriptor)
            if status.st_nlink == 0:  # removed between the two calls
                break
            return cls(path, owner, descriptor, status)
        os.close(descriptor)
        return None

    def is_in_place(self) -> bool:
        """Return whether the locked file is still where others look for it.

        True also where the device fails, since nothing is known then.
        """
        try:
            return os.path.samestat(self._status, self._path.stat())
        except OSError as error:
            return error.errno not in _GONE

    def remove(self) -> None:
        """Remove the file: no data plane writes for this owner from now on."""
        with suppress(OSError):
            if self.is_in_place():
                self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Give up the lock, and remove the file if no other process holds it; idempotent."""
        if self._descriptor >= 0:
            # If a rank holds it, it may write on: the next opener removes the file.
            with suppress(OSError, BackendError):
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with _open(self._path.parent) as owners:
                    _remove(owners, self._path.name, self._descriptor)
            self.leave_to_parent()

    def leave_to_parent(self) -> None:
        """Close this process's descriptor and nothing else."""
        os.close(self._descriptor)
        self._descriptor = -1
        _held.discard(self)


class OwnerLocks:
    """The locks that a data plane holds, one for each owner whose commands it carries out."""

    def __init__(self, tier_path: Path) -> None:
        """Ask the device nothing yet."""
        self._tier_path = tier_path
        self._lock = threading.Lock()
        self._locks: dict[int, OwnerLock] = {}
        self._is_shared = False

    def look(self) -> None:
        """See whether there is a catalog, when the tier is opened; waits for the device."""
        with self._lock:
            self._is_shared = self._is_shared or self._has_catalog()

    def hold(self, owner: int) -> bool:
        """Return whether the owner lives, and keep it alive until `close`; thread-safe.

        False: its places may have been taken over, or the path was removed and may be another
        tier's now, so nothing may be written there. A path below which no catalog was ever seen is
        on another machine than its catalog: there are no other owners here.
        """
        held = self._locks.get(owner)
        if held is not None:
            # Not under the lock: beside a busy thread, the answer of each call to the device waits
            # for the interpreter, and all other threads of the tier would wait for that.
            if held.is_in_place():
                return True
            with self._lock:
                if self._locks.get(owner) is held:
                    del self._locks[owner]
                    held.close()
            return False
        with self._lock:
            if owner in self._locks:
                return True  # another thread has just joined
            self._is_shared = self._is_shared or self._has_catalog()
            if not self._is_shared:
                return True
            lock = OwnerLock.join(self._tier_path / "owners", owner)
            if lock is not None:
                self._locks[owner] = lock
            return lock is not None

    def known_file(self, owner: int) -> KnownFile | None:
        """Return the file of an owner that is held, for a call that looks whether it is in place.

        None: `hold` has to be asked. As long as the answer is the same object, the file was held.
        """
        held = self._locks.get(owner)
        return None if held is None else held.known_file

    def _has_catalog(self) -> bool:
        return os.path.lexists(self._tier_path / "catalog")

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
    """Return whether no process acts for an owner; its file is removed then, so that none will."""
    try:
        with _open(directory) as owners:
            return _is_dead(owners, _name_of(owner))
    except FileNotFoundError:
        return True
    except (OSError, BackendError):
        return False  # unknown: leave its rows alone


def remove_dead(directory: Path) -> None:
    """Remove the files of dead owners, inside a write transaction."""
    with suppress(OSError, BackendError), _open(directory) as owners:
        for name in [entry.name for entry in owners.entries()]:
            if _NAME.fullmatch(name):
                _is_dead(owners, name)


def _open(directory: Path, *, create: bool = False) -> Directory:
    return open_below(directory.parent, directory, create=create)


def _is_dead(owners: Directory, name: str) -> bool:
    try:
        descriptor = owners.open_file(name, os.O_RDWR)
    except FileNotFoundError:
        return True  # or something else was there, which no process can have locked
    except (OSError, BackendError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # While it is locked: a process that waits to join must find it gone.
        _remove(owners, name, descriptor)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


def _remove(owners: Directory, name: str, descriptor: int) -> None:
    """Remove a file, unless its name belongs to another one by now."""
    with suppress(FileNotFoundError):
        if os.path.samestat(owners.status(name), os.fstat(descriptor)):
            owners.unlink(name)


def _name_of(owner: int) -> str:
    return f"{owner}.lock"
