"""Which environments this process has open, by directory; and whose turn it is to open or close."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from tierstore.errors import BackendBusyError

__all__ = ["FileId", "Registry"]

FileId: TypeAlias = tuple[int, int]
"""Device and inode of a directory, whatever its path."""

EnvT = TypeVar("EnvT")

_WAIT_SECONDS_MIN = 0.1
"""Another thread that opens or closes is waited for at least so long."""


class Registry(Generic[EnvT]):
    """One entry and one lock per directory; an entry changes under the lock of its directory.

    A lock for all would let one device that hangs stop the users of every other one.
    """

    def __init__(self) -> None:
        self._entries: dict[FileId, EnvT] = {}
        self._locks: WeakValueDictionary[FileId, threading.Lock] = WeakValueDictionary()
        self._lock = threading.Lock()

    @contextmanager
    def held(self, key: FileId, path: Path, seconds_max: float) -> Iterator[threading.Lock]:
        """Hold the lock of a directory, which lives as long as it is referred to.

        Raises:
            BackendBusyError: another thread does not give it back.
        """
        _watch_forks(self)
        lock = self._lock_of(key)
        if not lock.acquire(timeout=max(seconds_max, _WAIT_SECONDS_MIN)):
            raise BackendBusyError(
                f"{path}: another thread of this process has been opening or closing it for "
                f"{seconds_max:g} s; its device hangs"
            )
        try:
            yield lock
        finally:
            lock.release()

    def find(self, key: FileId) -> EnvT | None:
        """Return the entry of a directory."""
        return self._entries.get(key)

    def put(self, key: FileId, env: EnvT) -> None:
        """Enter an environment that was opened, in place of a lost one."""
        self._entries[key] = env

    def remove(self, key: FileId, env: EnvT) -> None:
        """Remove an environment that is closed, unless another one has its place by now."""
        if self._entries.get(key) is env:
            del self._entries[key]

    def renew_locks(self) -> None:
        """Forget all locks, in a forked child: threads that held one did not come with it."""
        self._lock = threading.Lock()
        self._locks = WeakValueDictionary()

    def _lock_of(self, key: FileId) -> threading.Lock:
        with self._lock:
            lock = self._locks.get(key)
            if lock is None:
                lock = self._locks[key] = threading.Lock()
            return lock


@cache
def _watch_forks(registry: Registry[EnvT]) -> None:
    os.register_at_fork(after_in_child=registry.renew_locks)
