"""The locks of an LMDB environment: one for opening it, one for having it open.

    opening.lock   tierstore's: held while the files are verified, opened and first used, and while
                   they are sealed. Its content is the process id of its holder, which has its
                   first byte locked for writing
    lock.mdb       the library's: a process that has the environment open has locked its first byte,
                   and one that has read, the byte at the number of its process id. The mutexes of
                   writers and the table of readers lie in it, shared in memory

Two openers are one too many for the library: the one that locks the first byte alone prepares
`lock.mdb`, and each one that had to wait for that byte takes it for prepared. So openers take
turns, and an opener that finds that no process has the environment open begins with an empty
`lock.mdb`. A mutex that was held during a power cut would never be given back.

A user of an environment can write to it, so its lock for writing counts: that of the byte of its
process id, which every process of tierstore has as long as it has the environment open. A process
that could open the file for reading at some time may hold locks for reading on any byte; then all
openers use a new file.

The library relies on process ids. It calls a reader dead if no process has the byte of its process
id locked. That is true across pid namespaces, since the kernel knows the holder and not the number.
But two processes with one number would need one byte. The kernel knows the owner of a mutex by a
number, too, that of a thread: one more reason to share the pid namespace.
"""

import errno
import fcntl
import logging
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from tierstore.bounded_log import bounded
from tierstore.device.directory import Directory
from tierstore.errors import BackendBusyError, BackendError

__all__ = [
    "LIBRARY_LOCK_NAME",
    "LOCK_FILE_BYTES",
    "LibraryLock",
    "library_lock",
    "opening_lock",
]

_logger = bounded(logging.getLogger(__name__))

LOCK_FILE_BYTES = 16 << 10
"""Bytes of an environment's lock file: 64 per reader, rounded up with room."""

_FOREIGN_LOCK_FILE_BYTES_MAX = 1 << 20
"""Of a lock file that another program prepared, so much is given its blocks."""

LIBRARY_LOCK_NAME = "lock.mdb"
_OPENING_LOCK_NAME = "opening.lock"
_POLL_SECONDS = 0.01
_BLOCKED_SECONDS = 0.2
"""A process that opens an environment has locked the byte of its process id so long after it."""

_PROCESS_ID_BYTES_MAX = 20

_ALL_BYTES = 0
"""Of a lock: up to the end, wherever that will be."""

_FLOCK = struct.Struct("hhqqi4x")
"""The kernel's `struct flock` on 64 bits: type, whence, start, length, process (0)."""

_held: set[int] = set()
"""Descriptors with a lock, which the kernel would keep for a forked child that has a copy."""


@contextmanager
def opening_lock(directory: Directory, *, wait_seconds_max: float) -> Iterator[None]:
    """Keep all others, of this process too, from opening or sealing the environment meanwhile.

    Raises:
        BackendError: another one does so for longer than `wait_seconds_max`.
        OSError: the file cannot be opened or locked.
    """
    deadline = time.monotonic() + wait_seconds_max
    while True:
        with _locked_file(directory, _OPENING_LOCK_NAME) as descriptor:
            if not _take_turn(directory, descriptor, deadline, wait_seconds_max):
                continue
            try:
                _write_process_id(descriptor)
                yield
                return
            finally:
                with suppress(OSError):
                    os.ftruncate(descriptor, 0)
                # Closing would not do it, if a process was forked meanwhile and has a copy.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                _try_set(descriptor, fcntl.F_UNLCK)


def _take_turn(
    directory: Directory, descriptor: int, deadline: float, wait_seconds_max: float
) -> bool:
    """Lock its first byte for writing, and the file; return whether it is still the one to lock.

    In this order, and given back in the other one: the holder of the file's lock is a writer at any
    time, however long it stands still between the two, or it is no process of tierstore.
    """
    blocked_until = time.monotonic() + _BLOCKED_SECONDS
    while not (_try_set(descriptor, fcntl.F_WRLCK) and _try_flock(descriptor)):
        now = time.monotonic()
        if not _lies_there(directory, descriptor):
            return False
        if _is_writers(descriptor):
            blocked_until = now + _BLOCKED_SECONDS
        elif now >= blocked_until:
            # Not what another process, which was blocked as well, has put in its place by now.
            if _lies_there(directory, descriptor):
                _replace(directory, _OPENING_LOCK_NAME)
            return False
        else:
            deadline = max(deadline, blocked_until)
        if now >= deadline:
            raise BackendBusyError(
                f"{directory.path}: could not be opened within {wait_seconds_max:g} s: another "
                f"process{_named_process(descriptor)} is opening it; end it if it is stuck"
            )
        time.sleep(_POLL_SECONDS)
    return _lies_there(directory, descriptor)


def _is_writers(descriptor: int) -> bool:
    """Return whether the holder of a lock can write to the file; readers can lock it, too.

    An earlier release wrote its process id there, and locked no byte.
    """
    if _writer(descriptor, 0, 1) is not None:
        return True
    content = os.pread(descriptor, _PROCESS_ID_BYTES_MAX, 0)
    return content.isdigit() and Path(f"/proc/{int(content)}").exists()


def _lies_there(directory: Directory, descriptor: int) -> bool:
    try:
        return os.path.samestat(directory.status(_OPENING_LOCK_NAME), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _replace(directory: Directory, name: str) -> None:
    with suppress(FileNotFoundError):
        directory.unlink(name)
    _logger.warning(
        "locked by a process that cannot write to it, and replaced: path=%s", directory.path / name
    )


class LibraryLock:
    """The library's lock file, held by `library_lock`."""

    def __init__(self, directory: Directory, descriptor: int) -> None:
        self._directory = directory
        self._descriptor = descriptor
        self.is_alone = False
        """Whether no process has the environment open; then none can open it for now."""

    def prepare_file(self) -> None:
        """Empty the file if no process uses it; give it all its blocks.

        The library writes to it through a mapping, which in a file with holes on a device without
        room ends the process by SIGBUS.

        Raises:
            OSError: there is no room.
        """
        if not self.is_alone:
            # What others have mapped keeps its size, which says how many readers it holds.
            size = min(os.fstat(self._descriptor).st_size, _FOREIGN_LOCK_FILE_BYTES_MAX)
            os.posix_fallocate(self._descriptor, 0, size or LOCK_FILE_BYTES)
            return
        # Not by a new file: a program that waits for a lock of this one would go on with it. Not
        # by cutting it to nothing: its blocks might be gone before they are asked for again.
        os.ftruncate(self._descriptor, LOCK_FILE_BYTES)
        os.posix_fallocate(self._descriptor, 0, LOCK_FILE_BYTES)
        os.pwrite(self._descriptor, bytes(LOCK_FILE_BYTES), 0)

    def try_lock(self) -> bool:
        """Lock the first byte, and return whether it was possible; a program may prepare the file.

        Raises:
            OSError: the file system knows no such locks.
        """
        self.is_alone = _try_set(self._descriptor, fcntl.F_WRLCK)
        return self.is_alone or _try_set(self._descriptor, fcntl.F_RDLCK)

    def is_blocked(self) -> bool:
        """Return whether locks keep this process from being alone, but none for writing."""
        return not self.is_alone and _writer(self._descriptor, 0, _ALL_BYTES) is None

    def unlock(self) -> None:
        """Give the first byte back, whoever else has a copy of the descriptor."""
        _try_set(self._descriptor, fcntl.F_UNLCK)

    def writer_of(self, byte: int) -> int | None:
        """Return a process that has a byte locked for writing; None: there is none.

        A process of another pid namespace is 0; -1: unknown.
        """
        return _writer(self._descriptor, byte, 1)

    def user(self) -> int | None:
        """Return a process that has the environment open, as `writer_of` does."""
        return _writer(self._descriptor, 1, _ALL_BYTES)


def _writer(descriptor: int, start: int, count: int) -> int | None:
    wanted = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, start, count, 0)
    found = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, wanted))
    return None if found[0] == fcntl.F_UNLCK else int(found[4])


def _try_set(descriptor: int, kind: int) -> bool:
    # The library's own lock, but of this description: it conflicts with those of the library in
    # this process too.
    wanted = _FLOCK.pack(kind, os.SEEK_SET, 0, 1, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, wanted)
    except OSError as error:
        if error.errno in {errno.EAGAIN, errno.EACCES}:
            return False
        raise
    return True


@contextmanager
def library_lock(directory: Directory, *, wait_seconds_max: float) -> Iterator[LibraryLock]:
    """Lock the library's first byte: alone if no process has it open, else with those that have.

    Under our opening lock, and while this process has not opened the environment: the kernel drops
    the locks that a process has on a file when the process closes any descriptor of it.

    Raises:
        BackendError: another program prepares the file for longer than `wait_seconds_max`; or a
            process of another pid namespace has our process id.
        OSError: the file cannot be opened or locked.
    """
    deadline = time.monotonic() + wait_seconds_max
    while True:
        with _locked_file(directory, LIBRARY_LOCK_NAME) as descriptor:
            lock = LibraryLock(directory, descriptor)
            _require_own_process_id(directory, lock)
            _wait_for(directory, lock, deadline, wait_seconds_max)
            try:
                if not lock.is_blocked():
                    yield lock
                    return
            finally:
                lock.unlock()
            _replace(directory, LIBRARY_LOCK_NAME)


def _wait_for(
    directory: Directory, lock: LibraryLock, deadline: float, wait_seconds_max: float
) -> None:
    patience = min(deadline, time.monotonic() + _BLOCKED_SECONDS)
    while not lock.try_lock() or (lock.is_blocked() and time.monotonic() < patience):
        if time.monotonic() >= deadline:
            raise BackendBusyError(
                f"{directory.path}: could not be opened within {wait_seconds_max:g} s: another "
                f"program (process id {lock.writer_of(0)}) prepares {LIBRARY_LOCK_NAME}; end "
                "it if it is stuck"
            )
        time.sleep(_POLL_SECONDS)
    if lock.user() == 0:
        _logger.warning(
            "open in another pid namespace, unsafe when one is killed: directory=%s; share "
            "the pid namespace",
            directory.path,
        )


def _require_own_process_id(directory: Directory, lock: LibraryLock) -> None:
    process_id = os.getpid()
    if lock.writer_of(process_id) not in {None, process_id}:
        raise BackendError(
            f"{directory.path}: another process with the same process id, {process_id}, in another "
            "pid namespace, has it open; share the pid namespace (Docker: --pid=host, Kubernetes: "
            "hostPID: true), or give each container a path of its own"
        )


@contextmanager
def _locked_file(directory: Directory, name: str) -> Iterator[int]:
    _watch_forks()
    descriptor = directory.open_file(name, os.O_RDWR | os.O_CREAT)
    _held.add(descriptor)
    try:
        yield descriptor
    finally:
        _held.discard(descriptor)
        os.close(descriptor)


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_leave_to_parent)


def _leave_to_parent() -> None:
    while _held:
        os.close(_held.pop())


def _try_flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_process_id(descriptor: int) -> None:
    with suppress(OSError):  # a full device: the lock counts, the name does not
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"%d" % os.getpid(), 0)


def _named_process(descriptor: int) -> str:
    content = os.pread(descriptor, _PROCESS_ID_BYTES_MAX, 0)
    return f" (process id {int(content)})" if content.isdigit() else ""
