"""LMDB environments of this process.

An environment must not be opened twice in one process, so openers of one directory share one
environment by reference count. Every exception of the library is translated here (`errors`).
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Self

from tierstore.device.system import SYSTEM, DatabasePoint, SystemCalls
from tierstore.errors import BackendBusyError, BackendError, ClosedError
from tierstore.lmdb_env.errors import translate, translate_memory, translate_os
from tierstore.lmdb_env.library import Database, LibraryError, Transaction, ViewTransaction
from tierstore.lmdb_env.opening import OpenFiles, open_directory
from tierstore.lmdb_env.pace import UNHURRIED, VerifyPace
from tierstore.lmdb_env.registry import FileId, Registry
from tierstore.lmdb_env.seal import announce

__all__ = ["LmdbEnv"]

_OPENING_SECONDS_MAX = 10.0
"""An opener waits so long for others that verify and open the same environment."""

_WRITER_SECONDS_MAX = 5.0
"""A writer waits so long for others that write to the same environment."""


class LmdbEnv:
    """One environment of this process, shared by all who open its directory; thread-safe.

    A write transaction belongs to the thread that began it. A forked child can neither use an
    environment of its parent nor open its directory once more: the library would take the child's
    readers for the parent's, and drop the parent's when the child closes.
    """

    _registry: ClassVar[Registry["LmdbEnv"]] = Registry()

    def __init__(
        self,
        files: OpenFiles,
        key: FileId,
        lock: threading.Lock,
        *,
        system: SystemCalls,
    ) -> None:
        """Take over open files; `lock` is that of their directory. Use `open`."""
        self.directory = files.directory.path
        self.findings = files.findings
        """What was found in its file when it was opened."""
        self._files = files
        self._env = files.env
        self._writer = files.writer
        self._pages = files.pages
        self._system = system
        self._page_bytes = int(files.env.stat()["psize"])
        self._key = key
        self._lock = lock
        self._is_sealed = False
        self.process_id = os.getpid()
        self._reference_count = 0
        self._use_count = 0
        """Calls that are under way in the library."""
        self._use_lock = threading.Lock()
        self._databases: dict[bytes, Database] = {}

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
        verify: Callable[["LmdbEnv"], None] | None = None,
        pace: VerifyPace = UNHURRIED,
    ) -> Self:
        """Open or create the environment below `directory`, which is made if needed.

        No link is followed below `tier`, the path of a tier, which has to be marked as one.

        Its file is verified first, unless another process has it open; if it is damaged, or the
        library refuses it, it is removed, and `findings` says why. Openers take turns. With
        `sealed`, the last one to close it seals it: every bit is verified then, and faster, for
        the price of reading the file once at the close.

        `map_bytes` bounds the data file, or grows to its present size. It is halved as long as the
        process may not have so many addresses. Of several openers in one process the first decides.
        Only `sync` flushes, so that a power cut may leave anything. With `durable` each commit
        flushes what it wrote before it names it: a power cut undoes at most the last one that
        `sync` has not flushed. `readahead` is for large values: without it the kernel reads them
        page by page. `system` is told of the points of its use. `writer_seconds_max` bounds how
        long `write` waits for other writers. `verify` is called if no other process has it open,
        and none can open it meanwhile; what it raises is raised here. `pace` is that of the
        verification; ended, it has changed nothing.

        Raises:
            ClosedError: see `VerifyPace.step`.
            BackendBusyError: another process or thread keeps it from being opened for longer than
                `wait_seconds_max`; the message names it.
            BackendError: it cannot be opened; the message says what to do.
        """
        files = open_directory(tier, directory, system)
        is_taken = False
        try:
            status = os.fstat(files.descriptor)
            key = (status.st_dev, status.st_ino)
            system = system.at_database(directory)
            announce(files, pace)
            with cls._registry.held(key, directory, wait_seconds_max) as lock:
                shared = cls._find_shared(key, directory)
                if shared is None:
                    with OpenFiles.opened(
                        files,
                        map_bytes,
                        readahead=readahead,
                        durable=durable,
                        wait_seconds_max=wait_seconds_max,
                        writer_seconds_max=writer_seconds_max,
                        system=system,
                        pace=pace,
                    ) as opened:
                        shared = cls(opened, key, lock, system=system)
                        shared._let_verify(verify)
                    cls._registry.put(key, shared)
                    is_taken = True
                shared._is_sealed |= sealed
                shared._reference_count += 1
                return shared  # type: ignore[return-value]
        finally:
            if not is_taken:
                files.close()

    def _let_verify(self, verify: Callable[["LmdbEnv"], None] | None) -> None:
        """Let it be used by one thread, while nobody else can open it."""
        if verify is None or not self.findings.is_alone:
            return
        self._reference_count = 1
        try:
            verify(self)
        finally:
            self._reference_count = 0

    @classmethod
    def _find_shared(cls, key: FileId, directory: Path) -> "LmdbEnv | None":
        shared = cls._registry.find(key)
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
                "opened again when this process has closed it"
            )
        if shared.process_id != os.getpid():
            raise BackendError(
                f"{directory}: was open when this process was forked, and cannot be opened "
                "here; start this process by spawn, or before its parent opens the path"
            )
        return shared

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
        """Close all; the lock of the directory is held, and no thread uses them."""
        self._registry.remove(self._key, self)
        self._files.close(is_sealed=self._is_sealed)

    @property
    def is_referred_to(self) -> bool:
        """Whether a user has it open; otherwise it is closed, or about to be."""
        return self._reference_count > 0

    def is_of(self, directory: Path) -> bool:
        """Return whether a directory still holds files of this environment."""
        return self._files.is_of(directory)

    def is_lost(self, directory: Path | None = None) -> bool:
        """Return whether the data file is no longer in a directory (None: where it was opened).

        It was removed, moved or unmounted. False also where the device fails.
        """
        return self._files.is_lost(directory or self.directory)

    def distrust(self, cause: str) -> None:
        """Let the next process that has the environment for itself start empty: rows are wrong."""
        self._files.distrust(cause)

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
