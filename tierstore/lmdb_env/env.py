"""LMDB environments of this process.

An environment must not be opened twice in one process, so openers of one directory share one
environment by reference count. Every exception of the library is translated here (`errors`).
"""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import ClassVar, Self, TypeAlias
from weakref import WeakValueDictionary

from tierstore.device.directory import Directory
from tierstore.device.marker import open_below
from tierstore.device.remedies import explain
from tierstore.device.system import SYSTEM, DatabasePoint, SystemCalls
from tierstore.errors import (
    BackendBusyError,
    BackendCorruptError,
    BackendError,
    ClosedError,
)
from tierstore.lmdb_env import seal as lmdb_file
from tierstore.lmdb_env.errors import translate, translate_memory, translate_os
from tierstore.lmdb_env.library import (
    Database,
    Environment,
    LibraryError,
    Transaction,
    ViewTransaction,
    open_library,
)
from tierstore.lmdb_env.lock import opening_lock
from tierstore.lmdb_env.reach import ReachedPages
from tierstore.lmdb_env.turns import WriterLock

__all__ = ["LmdbEnv"]

_OPENING_SECONDS_MAX = 10.0
"""An opener waits so long for others that verify and open the same environment."""

_WRITER_SECONDS_MAX = 5.0
"""A writer waits so long for others that write to the same environment."""

_MOMENT_SECONDS = 0.1
"""For another thread that opens or closes is waited at least so long."""

_FileId: TypeAlias = tuple[int, int]
"""Device and inode of a directory, whatever its path."""

_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}


class LmdbEnv:
    """One environment of this process, shared by all who open its directory; thread-safe.

    A write transaction belongs to the thread that began it. A forked child can neither use an
    environment of its parent nor open its directory: the library would take the child's readers
    for the parent's, and drop the parent's when the child closes.
    """

    # One registry per process. Entries change under the lock of their directory.
    _shared: ClassVar[dict[_FileId, "LmdbEnv"]] = {}
    _locks: ClassVar[WeakValueDictionary[_FileId, threading.Lock]] = WeakValueDictionary()
    _registry_lock = threading.Lock()

    def __init__(
        self,
        files: Directory,
        env: Environment,
        admission: lmdb_file.Admission,
        key: _FileId,
        lock: threading.Lock,
        *,
        system: SystemCalls,
        writer: WriterLock,
        pages: ReachedPages,
    ) -> None:
        self.directory = files.path
        self._files = files
        self._writer = writer
        self._pages = pages
        self._system = system
        self.admission = admission
        """What was found in its file when it was opened."""
        self._env = env
        self._page_bytes = int(env.stat()["psize"])
        self._key = key
        self._lock = lock
        self._is_sealed = False
        self.process_id = os.getpid()
        self._reference_count = 0
        self._use_count = 0
        """Calls that are under way in the library."""
        self._use_lock = threading.Lock()
        self._databases: dict[bytes, Database] = {}
        self._file_ids = lmdb_file.file_ids(files.path)

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        map_bytes: int,
        readahead: bool = False,
        sealed: bool = False,
        durable: bool = False,
        tier: Path | None = None,
        wait_seconds_max: float = _OPENING_SECONDS_MAX,
        writer_seconds_max: float = _WRITER_SECONDS_MAX,
        system: SystemCalls = SYSTEM,
    ) -> Self:
        """Open or create the environment below `directory`, which is made if needed.

        No link is followed below `tier`, the path of a tier, which has to be marked as one.

        Its file is verified first, unless another process has it open; if it is damaged, or the
        library refuses it, it is removed, and `admission` says why. Openers take turns. With
        `sealed`, the last one to close it seals it: every bit is verified then, and faster, for
        the price of reading the file once at the close.

        `map_bytes` bounds the data file for good, or grows to its present size. It is halved as
        long as the process may not have so many addresses. Of several openers in one process the
        first decides. Nothing is flushed but by `sync`, so that a power cut may leave anything;
        with `durable` each commit flushes what it wrote before it names it, and a power cut undoes
        the last one at most, but for what `sync` has flushed. `readahead` is for large values:
        without it the kernel reads them page by page. `system` is told of the points of its use.
        `writer_seconds_max` bounds how long `write` waits for other writers.

        Raises:
            BackendBusyError: another process or thread keeps it from being opened for longer than
                `wait_seconds_max`; the message names it.
            BackendError: it cannot be opened; the message says what to do.
        """
        _watch_forks()
        try:
            files = open_below(tier, directory, create=True, system=system)
        except OSError as error:
            raise BackendError(explain(directory, error)) from error
        shared: LmdbEnv | None = None
        try:
            status = os.fstat(files.descriptor)
            key = (status.st_dev, status.st_ino)
            system = system.at_database(directory)
            lock = cls._lock_of(key)
            with _held(lock, directory, wait_seconds_max):
                shared = cls._find_shared(key, directory)
                if shared is None:
                    env, admission = _open_env(
                        files,
                        map_bytes,
                        readahead=readahead,
                        durable=durable,
                        wait_seconds_max=wait_seconds_max,
                        system=system,
                    )
                    writer, pages = _companions(files, env, writer_seconds_max)
                    parts = (files, env, admission, key, lock)
                    shared = cls(*parts, system=system, writer=writer, pages=pages)
                    cls._shared[key] = shared
                shared._is_sealed |= sealed
                shared._reference_count += 1
                return shared  # type: ignore[return-value]
        finally:
            if shared is None or shared._files is not files:
                files.close()

    @classmethod
    def _find_shared(cls, key: _FileId, directory: Path) -> "LmdbEnv | None":
        shared = cls._shared.get(key)
        if shared is None or not shared.is_of(directory):
            # It was removed while it was open, and its number went to a new directory.
            return None
        if not shared.is_referred_to:
            raise BackendBusyError(
                f"{directory}: is being closed by this process, and something still uses it; its "
                "device may hang"
            )
        if shared.is_lost(directory):
            # Its lock file is in place: with two environments on one, the locks of the second
            # would go when the first is closed.
            raise BackendBusyError(
                f"{directory}: its data file was removed while this process has it open; it can be "
                "opened when nobody here uses it any more"
            )
        if shared.process_id != os.getpid():
            raise BackendError(
                f"{directory}: was open when this process was forked, and cannot be opened "
                "here; start this process by spawn, or before its parent opens the path"
            )
        return shared

    @classmethod
    def _lock_of(cls, key: _FileId) -> threading.Lock:
        """Return the lock of a directory: a stuck one must not stop those who use others."""
        with cls._registry_lock:
            lock = cls._locks.get(key)
            if lock is None:
                lock = cls._locks[key] = threading.Lock()
            return lock

    def close(self) -> None:
        """Give one reference back; the last one closes the environment.

        What other threads are doing in it ends undisturbed: the last of them closes it then.
        """
        if self.process_id != os.getpid():
            return
        with self._lock:
            if self._reference_count == 0:
                return
            with self._use_lock:
                self._reference_count -= 1
                is_over = self._reference_count == 0 and self._use_count == 0
            if is_over:
                self._close_files()

    def _close_files(self) -> None:
        """Close all; the lock of the directory is held, and nobody uses them any more."""
        if self._shared.get(self._key) is self:
            del self._shared[self._key]
        self._env.close()
        self._pages.close()
        self._writer.close()
        if self._is_sealed and self.is_of(self.directory):
            lmdb_file.seal(self._files)
        self._files.close()

    @property
    def is_referred_to(self) -> bool:
        """Whether somebody has it open; otherwise it is closed, or about to be."""
        return self._reference_count > 0

    def is_of(self, directory: Path) -> bool:
        """Return whether a directory still holds files of this environment."""
        return bool(self._file_ids & lmdb_file.file_ids(directory))

    def is_lost(self, directory: Path | None = None) -> bool:
        """Return whether the data file is not in a directory (None: where it was) any more.

        It was removed, moved, or unmounted. False also where nobody can tell, for the device fails.
        """
        try:
            status = ((directory or self.directory) / "data.mdb").stat()
        except OSError as error:
            return error.errno in _GONE
        return (status.st_dev, status.st_ino) not in self._file_ids

    def distrust(self, cause: str) -> None:
        """Let the next one who has the environment for himself start anew: its rows are wrong."""
        lmdb_file.distrust(self._files, cause)

    def database(self, name: bytes) -> Database:
        """Open or create one named database; its handle lives as long as the environment."""
        handle = self._databases.get(name)
        if handle is None:
            with self.write() as txn:  # the library would write without our lock
                handle = self._env.open_db(name, txn=txn)
            self._databases[name] = handle
        return handle

    @contextmanager
    def read(self, database: Database | None = None) -> Iterator[Transaction]:
        """Run a read transaction: a snapshot, which costs no lock.

        Library errors inside the block are translated.

        Raises:
            BackendError: the library failed.
        """
        with self._reading(), self._env.begin(db=database) as txn, self._reaching_readers():
            yield txn

    @contextmanager
    def read_views(self) -> Iterator[ViewTransaction]:
        """Run a read transaction whose values are views into the map, dead when it ends.

        Raises:
            BackendError: the library failed.
        """
        with self._reading(), self._env.begin(buffers=True) as txn, self._reaching_readers():
            yield txn

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._translated():
            self._system.reach(DatabasePoint.READ)
            self._pages.reach()
            yield

    @contextmanager
    def _reaching_readers(self) -> Iterator[None]:
        """Reach what the end of a read transaction writes to, however its block ends."""
        try:
            yield
        finally:
            self._pages.reach_readers()

    @contextmanager
    def write(self, database: Database | None = None) -> Iterator[Transaction]:
        """Run the one write transaction of all processes; waits for the others to end theirs.

        Committed at the end of the block, aborted by any exception. Waits for
        `writer_seconds_max`; for a process that was waited for in vain, and has not let go since,
        only a moment.

        Raises:
            BackendBusyError: another process or thread does not end its transaction; it is named.
            BackendMapFullError: the map or the transaction is full; nothing was changed.
            BackendFullError: the device is full; nothing was changed.
            BackendError: the library failed; nothing was changed.
        """
        with self._translated():
            self._writer.acquire()
            try:
                self._system.reach(DatabasePoint.WRITE)
                with self._env.begin(db=database, write=True) as txn:
                    yield txn
                    self._system.reach(DatabasePoint.COMMIT)
                self._system.reach(DatabasePoint.COMMITTED)
            finally:
                self._writer.release()

    def sync(self) -> None:
        """Flush everything committed to the device.

        Raises:
            BackendError: the device refused.
        """
        with self._translated():
            self._system.reach(DatabasePoint.SYNC)
            self._env.sync(force=True)

    def forget_dead_readers(self) -> int:
        """Free the slots of killed processes, whose snapshots would keep old pages from reuse."""
        with self._translated():
            return self._env.reader_check()

    def reader_lag(self) -> int:
        """Return how many transactions ago the snapshot was taken that the oldest reader sees."""
        with self._translated():
            last = int(self._env.info()["last_txnid"])
            seen = [line.split()[-1] for line in self._env.readers().splitlines()[1:]]
        return max((last - int(number) for number in seen if number.isdigit()), default=0)

    def map_bytes(self) -> int:
        """Return the bytes beyond which the data file cannot grow."""
        with self._translated():
            return int(self._env.info()["map_size"])

    def used_bytes(self) -> int:
        """Return the bytes that the data file has reached; it never shrinks."""
        with self._translated():
            return (self._env.info()["last_pgno"] + 1) * self._page_bytes

    @contextmanager
    def _translated(self) -> Iterator[None]:
        if self.process_id != os.getpid():
            raise ClosedError(f"{self.directory}: the environment is that of the parent process")
        with self._use_lock:
            if self._reference_count == 0:
                raise ClosedError(f"{self.directory}: the environment is closed")
            self._use_count += 1
        try:
            yield
        except LibraryError as error:
            raise translate(error, self.directory) from error
        except OSError as error:
            raise translate_os(error, self.directory) from error
        except MemoryError as error:
            raise translate_memory(error, self.directory) from error
        finally:
            with self._use_lock:
                self._use_count -= 1
                is_last = self._reference_count == 0 and self._use_count == 0
            if is_last:
                with self._lock:
                    self._close_files()


@contextmanager
def _held(lock: threading.Lock, directory: Path, seconds_max: float) -> Iterator[None]:
    """Hold a lock of this process.

    Raises:
        BackendBusyError: another thread does not give it back.
    """
    if not lock.acquire(timeout=max(seconds_max, _MOMENT_SECONDS)):
        raise BackendBusyError(
            f"{directory}: another thread of this process has been opening or closing it for "
            f"{seconds_max:g} s; its device hangs"
        )
    try:
        yield
    finally:
        lock.release()


def _companions(
    files: Directory, env: Environment, writer_seconds_max: float
) -> tuple[WriterLock, ReachedPages]:
    """Open what goes with an environment; it is closed where that fails, before the pages are."""
    try:
        with ExitStack() as undo:
            pages = ReachedPages()
            undo.callback(pages.close)
            undo.callback(env.close)
            writer = WriterLock(files, wait_seconds_max=writer_seconds_max)
            undo.callback(writer.close)
            pages.map(files)
            undo.pop_all()
    except OSError as error:
        raise translate_os(error, files.path) from error
    except MemoryError as error:
        raise translate_memory(error, files.path) from error
    return writer, pages


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_renew_locks)


def _renew_locks() -> None:
    """Forget the locks in a forked child: who held one did not come with it."""
    LmdbEnv._registry_lock = threading.Lock()  # noqa: SLF001
    LmdbEnv._locks = WeakValueDictionary()  # noqa: SLF001


def _open_env(
    directory: Directory,
    map_bytes: int,
    *,
    readahead: bool,
    durable: bool,
    wait_seconds_max: float,
    system: SystemCalls,
) -> tuple[Environment, lmdb_file.Admission]:
    try:
        with opening_lock(directory, wait_seconds_max=wait_seconds_max):
            admission = lmdb_file.admit(
                directory, map_bytes=map_bytes, wait_seconds_max=wait_seconds_max
            )
            system.reach(DatabasePoint.OPEN)
            try:
                env = open_library(directory, map_bytes, readahead=readahead, durable=durable)
            except LibraryError as error:
                refusal = translate(error, directory.path)
                if not isinstance(refusal, BackendCorruptError):
                    raise
                # Nothing that was verified is refused, so far as we know it.
                anew = lmdb_file.start_anew(
                    directory, str(error), wait_seconds_max=wait_seconds_max
                )
                if anew is None:
                    lmdb_file.distrust(directory, str(error))
                    raise BackendCorruptError(
                        f"{refusal}, once the process that has it open has ended"
                    ) from error
                admission = anew
                env = open_library(directory, map_bytes, readahead=readahead, durable=durable)
            return env, admission
    except LibraryError as error:
        raise translate(error, directory.path) from error
    except OSError as error:
        raise translate_os(error, directory.path) from error
    except MemoryError as error:
        raise translate_memory(error, directory.path) from error
