"""An environment and what goes with it: opened in turn with others, verified, closed, sealed."""

import errno
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tierstore.device.directory import Directory
from tierstore.device.marker import open_below
from tierstore.device.remedies import explain
from tierstore.device.system import DatabasePoint, SystemCalls
from tierstore.errors import BackendCorruptError, BackendError
from tierstore.lmdb_env import seal
from tierstore.lmdb_env.errors import translate, translate_memory, translate_os
from tierstore.lmdb_env.library import Environment, LibraryError, open_library
from tierstore.lmdb_env.lock import opening_lock
from tierstore.lmdb_env.pace import VerifyPace
from tierstore.lmdb_env.reach import ReachedPages
from tierstore.lmdb_env.turns import WriterLock

__all__ = ["OpenFiles", "open_directory"]

_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}


@dataclass(frozen=True, slots=True)
class OpenFiles:
    """The files of one environment, as this process has them open."""

    directory: Directory
    env: Environment
    findings: seal.SealFindings
    """What was found in the data file when it was opened."""
    writer: WriterLock
    pages: ReachedPages
    ids: frozenset[tuple[int, int]]
    """Device and inode of the data file and of the library's lock file."""

    @classmethod
    @contextmanager
    def opened(
        cls,
        directory: Directory,
        map_bytes: int,
        *,
        readahead: bool,
        durable: bool,
        wait_seconds_max: float,
        writer_seconds_max: float,
        system: SystemCalls,
        pace: VerifyPace,
    ) -> Iterator[Self]:
        """Verify and open the files; `directory` is taken over. See `LmdbEnv.open`.

        No other process opens them within the block. They stay open when it ends, unless by an
        exception.

        Raises:
            BackendBusyError, BackendError, ClosedError: see `LmdbEnv.open`; the directory stays
                open.
        """
        with (
            _translated(directory),
            opening_lock(directory, wait_seconds_max=wait_seconds_max),
            ExitStack() as undo,
        ):
            env, findings = _open_env(
                directory,
                map_bytes,
                readahead=readahead,
                durable=durable,
                wait_seconds_max=wait_seconds_max,
                system=system,
                pace=pace,
            )
            writer, pages = _companions(directory, env, writer_seconds_max)
            # In this order: see `ReachedPages`.
            for close in (writer.close, pages.close, env.close):
                undo.callback(close)
            ids = frozenset(seal.file_ids(directory.path))
            yield cls(directory, env, findings, writer, pages, ids)
            seal.break_seal(directory, findings)
            undo.pop_all()

    def is_of(self, path: Path) -> bool:
        """Return whether a directory still holds any of these files."""
        return bool(self.ids & seal.file_ids(path))

    def is_lost(self, path: Path) -> bool:
        """Return whether the data file is no longer in a directory.

        It was removed, moved or unmounted. False also where the device fails, since nothing is
        known then.
        """
        try:
            status = (path / seal.DATA_NAME).stat()
        except OSError as error:
            return error.errno in _GONE
        return (status.st_dev, status.st_ino) not in self.ids

    def distrust(self, cause: str) -> None:
        """Let the next process that has the files for itself start with an empty database."""
        seal.distrust(self.directory, cause)

    def close(self, *, is_sealed: bool) -> None:
        """Close everything; seal the data file if wanted, and if it is still in its place."""
        self.env.close()
        self.pages.close()
        self.writer.close()
        if is_sealed and self.is_of(self.directory.path):
            seal.seal(self.directory)
        self.directory.close()


def open_directory(tier: Path | None, directory: Path, system: SystemCalls) -> Directory:
    """Open the directory of an environment, made if need be; see `LmdbEnv.open`.

    Raises:
        BackendError: it cannot be made or opened.
    """
    try:
        return open_below(tier, directory, create=True, system=system)
    except OSError as error:
        raise BackendError(explain(directory, error)) from error


def _companions(
    directory: Directory, env: Environment, writer_seconds_max: float
) -> tuple[WriterLock, ReachedPages]:
    """Open what goes with an environment; it is closed where that fails, before the pages are."""
    with ExitStack() as undo:
        pages = ReachedPages()
        undo.callback(pages.close)
        undo.callback(env.close)
        writer = WriterLock(directory, wait_seconds_max=writer_seconds_max)
        undo.callback(writer.close)
        pages.map(directory)
        undo.pop_all()
    return writer, pages


def _open_env(
    directory: Directory,
    map_bytes: int,
    *,
    readahead: bool,
    durable: bool,
    wait_seconds_max: float,
    system: SystemCalls,
    pace: VerifyPace,
) -> tuple[Environment, seal.SealFindings]:
    findings = seal.admit(
        directory, map_bytes=map_bytes, wait_seconds_max=wait_seconds_max, pace=pace
    )
    system.reach(DatabasePoint.OPEN)
    try:
        env = open_library(directory, map_bytes, readahead=readahead, durable=durable)
    except LibraryError as error:
        refusal = translate(error, directory.path)
        if not isinstance(refusal, BackendCorruptError):
            raise
        # Not known to happen: what the verification lets pass, the library accepts.
        replaced = seal.replace_damaged(directory, str(error), wait_seconds_max=wait_seconds_max)
        if replaced is None:
            seal.distrust(directory, str(error))
            raise BackendCorruptError(
                f"{refusal}, once the process that has it open has ended"
            ) from error
        findings = replaced
        env = open_library(directory, map_bytes, readahead=readahead, durable=durable)
    return env, findings


@contextmanager
def _translated(directory: Directory) -> Iterator[None]:
    try:
        yield
    except LibraryError as error:
        raise translate(error, directory.path) from error
    except OSError as error:
        raise translate_os(error, directory.path) from error
    except MemoryError as error:
        raise translate_memory(error, directory.path) from error
