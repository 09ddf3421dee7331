"""LMDB environments: the only module that imports lmdb.

An environment must not be opened twice in one process, so openers of one directory share one
environment by reference count. Every exception of the library is translated here, and only here.
"""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeAlias

import lmdb

from tierstore import lmdb_file
from tierstore.errors import (
    BackendCorruptError,
    BackendError,
    BackendFullError,
    BackendMapFullError,
    ClosedError,
    TierStoreError,
)

__all__ = [
    "ERRORS",
    "Cursor",
    "Database",
    "LmdbEnv",
    "Transaction",
    "ViewTransaction",
    "translate",
]

# The library's classes are generic for type checkers only.
if TYPE_CHECKING:
    Transaction: TypeAlias = lmdb.Transaction[bytes]
    ViewTransaction: TypeAlias = lmdb.Transaction[memoryview]
    Cursor: TypeAlias = lmdb.Cursor[bytes]
    Database: TypeAlias = lmdb._Database  # noqa: SLF001 - exported under this name only
else:
    Transaction = ViewTransaction = lmdb.Transaction
    Cursor = lmdb.Cursor
    Database = lmdb._Database  # noqa: SLF001 - exported under this name only

_READERS_MAX = 126
_DATABASES_MAX = 16
_MAP_BYTES_MIN = 1 << 28
"""A smaller map is not tried where addresses are short."""

ERRORS: Mapping[str, type[TierStoreError]] = {
    "BadChecksumError": BackendCorruptError,
    "BadDbiError": BackendError,
    "BadRslotError": BackendError,
    "BadTxnError": BackendError,
    "BadValsizeError": BackendError,
    "CorruptedError": BackendCorruptError,
    "CryptoFailError": BackendError,
    "CursorFullError": BackendError,
    "DbsFullError": BackendError,
    "DiskError": BackendFullError,
    "EnvEncryptionError": BackendError,
    "Error": BackendError,
    "IncompatibleError": BackendCorruptError,
    "InvalidError": BackendCorruptError,
    "InvalidParameterError": BackendError,
    "KeyExistsError": BackendError,
    "LockError": BackendError,
    "MapFullError": BackendMapFullError,
    "MapResizedError": BackendError,
    "MemoryError": BackendError,
    "NotFoundError": BackendCorruptError,
    "PageFullError": BackendCorruptError,
    "PageNotFoundError": BackendCorruptError,
    "PanicError": BackendCorruptError,
    "ProblemError": BackendError,
    "ReadersFullError": BackendError,
    "ReadonlyError": BackendError,
    "TlsFullError": BackendError,
    "TxnFullError": BackendMapFullError,
    "VersionMismatchError": BackendCorruptError,
}
"""What each exception class of the library becomes, by name (older versions lack some)."""

_REMEDIES: Mapping[type[TierStoreError], str] = {
    BackendFullError: "free space on the device",
    BackendMapFullError: "raise the tier's capacity",
    BackendCorruptError: "remove the directory of the tier; it is rebuilt from nothing",
    BackendError: "check the permissions and the health of the device",
}


def translate(error: lmdb.Error, directory: Path) -> TierStoreError:
    """Return the error of ours that stands for one of the library's."""
    kind = ERRORS.get(type(error).__name__, BackendError)
    return kind(f"{directory}: {error}; {_REMEDIES[kind]}")


class LmdbEnv:
    """One environment of this process, shared by all who open its directory; thread-safe.

    A write transaction belongs to the thread that began it. A forked child can neither use an
    environment of its parent nor open its directory: the library would take the child's readers
    for the parent's, and drop the parent's when the child closes.
    """

    _shared: "dict[str, LmdbEnv]" = {}  # noqa: RUF012 - one registry per process
    _registry_lock = threading.Lock()

    def __init__(
        self,
        directory: Path,
        env: lmdb.Environment,
        key: str,
        admission: lmdb_file.Admission,
    ) -> None:
        self.directory = directory
        self.admission = admission
        """What was found in its file when it was opened."""
        self._env = env
        self._page_bytes = int(env.stat()["psize"])
        self._key = key
        self._is_sealed = False
        self.process_id = os.getpid()
        self._reference_count = 0
        self._databases: dict[bytes, Database] = {}

    @classmethod
    def open(
        cls, directory: Path, *, map_bytes: int, readahead: bool = False, sealed: bool = False
    ) -> Self:
        """Open or create the environment below `directory`, which is made if needed.

        Its file is verified first, unless another process has it open; if it is damaged, it is
        removed, and `admission` says why. With `sealed`, the last one to close it seals it: every
        bit is verified then, and faster, for the price of reading the file once at the close.

        `map_bytes` bounds the data file for good, or grows to its present size. It is halved as
        long as the process may not have so many addresses. Of several openers in one process the
        first decides. Nothing is flushed but by `sync`. `readahead`
        is for large values: without it the kernel reads them page by page.

        Raises:
            BackendError: it cannot be opened; the message says what to do.
        """
        with cls._registry_lock:
            key = os.path.realpath(directory)
            shared = cls._shared.get(key)
            if shared is not None and shared.process_id != os.getpid():
                raise BackendError(
                    f"{directory}: was open when this process was forked, and cannot be opened "
                    "here; start this process by spawn, or before its parent opens the path"
                )
            if shared is None:
                env, admission = _open_env(directory, map_bytes, readahead=readahead)
                shared = cls._shared[key] = cls(directory, env, key, admission)
            shared._is_sealed |= sealed
            shared._reference_count += 1
            return shared  # type: ignore[return-value]

    def close(self) -> None:
        """Give one reference back; the last one closes the environment."""
        if self.process_id != os.getpid():
            return
        with self._registry_lock:
            if self._reference_count == 0:
                return
            self._reference_count -= 1
            if self._reference_count == 0:
                del self._shared[self._key]
                self._env.close()
                if self._is_sealed:
                    lmdb_file.seal(self.directory)

    def distrust(self, cause: str) -> None:
        """Let the next one who has the environment for himself start anew: its rows are wrong."""
        lmdb_file.distrust(self.directory, cause)

    def database(self, name: bytes) -> Database:
        """Open or create one named database; its handle lives as long as the environment."""
        with self._registry_lock:
            handle = self._databases.get(name)
            if handle is None:
                with self._translated():
                    handle = self._databases[name] = self._env.open_db(name)
            return handle

    @contextmanager
    def read(self, database: Database | None = None) -> Iterator[Transaction]:
        """Run a read transaction: a snapshot, which costs no lock.

        Library errors inside the block are translated.

        Raises:
            BackendError: the library failed.
        """
        with self._translated(), self._env.begin(db=database) as txn:
            yield txn

    @contextmanager
    def read_views(self, database: Database | None = None) -> Iterator[ViewTransaction]:
        """Run a read transaction whose values are views into the map, dead when it ends.

        Raises:
            BackendError: the library failed.
        """
        with self._translated(), self._env.begin(db=database, buffers=True) as txn:
            yield txn

    @contextmanager
    def write(self, database: Database | None = None) -> Iterator[Transaction]:
        """Run the one write transaction of all processes; waits for the others to end theirs.

        Committed at the end of the block, aborted by any exception.

        Raises:
            BackendMapFullError: the map or the transaction is full; nothing was changed.
            BackendFullError: the device is full; nothing was changed.
            BackendError: the library failed; nothing was changed.
        """
        with self._translated(), self._env.begin(db=database, write=True) as txn:
            yield txn

    def sync(self) -> None:
        """Flush everything committed to the device.

        Raises:
            BackendError: the device refused.
        """
        with self._translated():
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
        if self._reference_count == 0 or self.process_id != os.getpid():
            raise ClosedError(f"{self.directory}: the environment is closed, or its parent's")
        try:
            yield
        except lmdb.Error as error:
            raise translate(error, self.directory) from error


def _open_env(
    directory: Path, map_bytes: int, *, readahead: bool
) -> tuple[lmdb.Environment, lmdb_file.Admission]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        admission = lmdb_file.admit(directory, map_bytes=map_bytes)
        env = _open_mapped(directory, map_bytes, readahead=readahead)
        env.reader_check()
    except lmdb.Error as error:
        raise translate(error, directory) from error
    except OSError as error:
        raise BackendError(f"{directory}: {error}; make the path writable") from error
    return env, admission


def _open_mapped(directory: Path, map_bytes: int, *, readahead: bool) -> lmdb.Environment:
    while True:
        try:
            return lmdb.open(
                os.fspath(directory),
                map_size=map_bytes,
                max_dbs=_DATABASES_MAX,
                max_readers=_READERS_MAX,
                sync=False,
                metasync=False,
                readahead=readahead,
                meminit=False,
            )
        except lmdb.MemoryError:
            if map_bytes <= _MAP_BYTES_MIN:
                raise
            map_bytes //= 2
