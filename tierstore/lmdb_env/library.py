"""LMDB: the only module that imports it, and how an environment is opened."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import lmdb

from tierstore.device.directory import Directory

__all__ = [
    "Cursor",
    "Database",
    "Environment",
    "LibraryError",
    "Transaction",
    "ViewTransaction",
    "open_library",
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

Environment: TypeAlias = lmdb.Environment
LibraryError = lmdb.Error

_READERS_MAX = 126
_DATABASES_MAX = 16
_FILE_MODE = 0o600
_MAP_BYTES_MIN = 1 << 28
"""A smaller map is not tried where addresses are short."""


def open_library(
    directory: Directory, map_bytes: int, *, readahead: bool, durable: bool
) -> Environment:
    """Open the environment, and read once: that takes the byte of our process id."""
    env = _open_mapped(directory, map_bytes, readahead=readahead, durable=durable)
    try:
        if _has_readers(env, os.getpid()):
            # Of a killed process with our process id: a container starts its processes with the
            # same ones. Its snapshots would stay as long as this process lives, but the library
            # frees them when it closes after a reading.
            with env.begin():
                pass
            env.close()
            env = _open_mapped(directory, map_bytes, readahead=readahead, durable=durable)
        env.reader_check()
        with env.begin():
            pass
    except BaseException:
        env.close()
        raise
    return env


def _open_mapped(
    directory: Directory, map_bytes: int, *, readahead: bool, durable: bool
) -> Environment:
    path = _path_of(directory)
    while True:
        try:
            return lmdb.open(
                path,
                map_size=map_bytes,
                max_dbs=_DATABASES_MAX,
                max_readers=_READERS_MAX,
                mode=_FILE_MODE,
                sync=durable,
                metasync=False,  # a lost meta page names an older state, which is whole
                readahead=readahead,
                meminit=True,  # or what the heap held, keys and prompts, would come to the disk
            )
        except lmdb.MemoryError:
            if map_bytes <= _MAP_BYTES_MIN:
                raise
            map_bytes //= 2


def _path_of(directory: Directory) -> str:
    """Return a path to exactly the directory that is open, if the system has such paths."""
    path = f"/proc/self/fd/{directory.descriptor}"
    return path if Path(path).exists() else os.fspath(directory.path)


def _has_readers(env: Environment, process_id: int) -> bool:
    rows = env.readers().splitlines()[1:]  # behind the names of the columns
    return any(int(row.split()[0]) == process_id for row in rows)
