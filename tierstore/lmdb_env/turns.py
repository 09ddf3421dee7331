"""Turns in writing to an LMDB environment: a lock before the library's own.

    writer.lock   without content. Byte 0 is locked by the process that runs a write transaction,
                  byte 1, shared, by those that wait for it

The library's mutex of writers cannot be waited for with a limit: a process that was stopped within
a transaction would stop all. So this lock goes before it, and is polled. It is a record lock of the
process: the kernel drops it when the process dies, tells others which process holds it, and does
not pass it on by a fork. It would be dropped, too, if this process closed another descriptor of the
file, so nothing else opens it.
"""

import errno
import fcntl
import os
import struct
import threading
import time

from tierstore.device.directory import Directory
from tierstore.errors import BackendBusyError

__all__ = ["WriterLock"]

_NAME = "writer.lock"
_HELD, _WAITED_FOR = 0, 1

_PAUSE_SECONDS_MIN = 0.00005
_PAUSE_SECONDS_MAX = 0.001
_COURTESY_SECONDS = 0.002
"""Longer than a waiting process pauses: it goes before one that has just had its turn."""
_TURN_SECONDS = 0.05
"""A process that had its turn longer ago did not come back at once."""
_STUCK_SECONDS = 0.02
"""Each further wait for a holder that exceeded one, until it lets go."""

_FLOCK = struct.Struct("hhqqi4x")
"""The kernel's `struct flock` on 64 bits: type, whence, start, length, process (0)."""


class WriterLock:
    """The lock of one environment in this process; thread-safe."""

    def __init__(self, directory: Directory, *, wait_seconds_max: float) -> None:
        """Open the file of the lock.

        Raises:
            BackendError: the name belongs to something else.
            OSError: it cannot be opened.
        """
        self._directory = directory.path
        self._wait_seconds_max = wait_seconds_max
        self._threads = threading.Lock()
        self._descriptor = directory.open_file(_NAME, os.O_RDWR | os.O_CREAT)
        self._stuck_holder: int | None = None
        """The process that exceeded a wait, and has not let go since."""
        self._stuck_since = 0.0
        self._released_at = -_TURN_SECONDS

    def acquire(self) -> None:
        """Wait for the turn of this thread, for a bounded time.

        A holder that exceeded a wait is waited for only a moment until it lets go.

        Raises:
            BackendBusyError: it did not come; the message names the process that holds the lock.
            OSError: the file system refuses locks.
        """
        until = time.monotonic() + self._wait_seconds_max
        if not self._threads.acquire(timeout=self._wait_seconds_max):
            raise self._busy(self._holder(), self._wait_seconds_max)
        try:
            self._give_way()
            if not self._try_lock():
                self._wait(until)
        except BaseException:
            self._threads.release()
            raise
        self._stuck_holder = None

    def release(self) -> None:
        """Let others write."""
        try:
            self._set(fcntl.F_UNLCK, _HELD)
        finally:
            self._released_at = time.monotonic()
            self._threads.release()

    def close(self) -> None:
        """Close the file; no thread waits for it."""
        os.close(self._descriptor)

    def _give_way(self) -> None:
        """Pause if this process has just had its turn and another one waits."""
        if time.monotonic() - self._released_at < _TURN_SECONDS and self._find(_WAITED_FOR):
            time.sleep(_COURTESY_SECONDS)

    def _wait(self, until: float) -> None:
        self._set(fcntl.F_RDLCK, _WAITED_FOR)
        try:
            self._poll(until)
        finally:
            self._set(fcntl.F_UNLCK, _WAITED_FOR)

    def _poll(self, until: float) -> None:
        pause = _PAUSE_SECONDS_MIN
        holder = self._holder()
        began_at = since = time.monotonic()
        while True:
            now = time.monotonic()
            is_known = holder is not None and holder == self._stuck_holder
            if now >= until or (is_known and now - began_at >= _STUCK_SECONDS):
                if not is_known and now - since >= (now - began_at) / 2:
                    # Else there is traffic, and no process is stuck.
                    self._stuck_holder, self._stuck_since = holder, since
                raise self._busy(holder, now - (self._stuck_since if is_known else since))
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_SECONDS_MAX)
            if self._try_lock():
                return
            current = self._holder()
            if current != holder:
                holder, since = current, time.monotonic()

    def _busy(self, holder: int | None, seconds: float) -> BackendBusyError:
        if holder is None:
            who = "another thread of this process"
        else:
            who = f"process id {holder}" if holder else "a process of another pid namespace"
        return BackendBusyError(
            f"{self._directory}: {who} has held the database for {seconds:.1f} s; it may be "
            "stopped, or its device hangs: let it go on, or end it"
        )

    def _holder(self) -> int | None:
        """Return the process that writes; None: this one, or none.

        A process of another pid namespace is 0.
        """
        found = self._find(_HELD)
        return found[0] if found else None

    def _find(self, byte: int) -> tuple[int] | None:
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        found = _FLOCK.unpack(fcntl.fcntl(self._descriptor, fcntl.F_GETLK, wanted))
        return None if found[0] == fcntl.F_UNLCK else (max(0, int(found[4])),)

    def _try_lock(self) -> bool:
        try:
            self._set(fcntl.F_WRLCK, _HELD)
        except OSError as error:
            if error.errno in {errno.EAGAIN, errno.EACCES}:
                return False
            raise
        return True

    def _set(self, kind: int, byte: int) -> None:
        wanted = _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
        fcntl.fcntl(self._descriptor, fcntl.F_SETLK, wanted)
