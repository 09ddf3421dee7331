"""The segments that lie below the path of a tier, whether or not a catalog has rows of them."""

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tierstore.backend.names import SEGMENT_LIMIT, rank_directories, segment_number
from tierstore.config import SecondaryConfig
from tierstore.device.directory import Directory
from tierstore.device.remedies import explain
from tierstore.errors import BackendError
from tierstore.geometry import SpaceGeometry
from tierstore.layout import PAGE_BYTES
from tierstore.lmdb_env.env import LmdbEnv
from tierstore.lmdb_env.seal import DATA_NAME

__all__ = ["stored_segments", "trim_segments"]

_BLOCK_BYTES = 512
_SEGMENT_BYTES = 4


def stored_segments(config: SecondaryConfig, geometry: SpaceGeometry) -> dict[int, int]:
    """Return the pages of each segment, on the rank that has most of it.

    What has the name of a segment and is no file of the tier is removed. For the lmdb backend this
    would mean to read every value, so all pages of the tier are attributed to its first segment.

    Raises:
        BackendForeignError: a directory with content has the name of a segment; or something
            belongs to another user.
        BackendError: the path cannot be read.
    """
    pages: dict[int, int] = {}
    try:
        with Directory.open(config.path) as base:
            for name in rank_directories(base).values():
                if config.backend != "lmdb":
                    with base.subdirectory(name) as directory:
                        found = _segment_files(directory)
                else:
                    found = _payload_segments(config.path, base, name, geometry)
                for segment, count in found.items():
                    pages[segment] = max(count, pages.get(segment, 0))
    except OSError as error:
        raise BackendError(explain(config.path, error)) from error
    return pages


def trim_segments(config: SecondaryConfig, charged: Mapping[int, tuple[int, int]]) -> None:
    """Cut off and remove what no row is charged for; `charged` are pages and ranks by segment.

    Segments without a row are left alone.

    Raises:
        BackendError: the path cannot be read or written.
    """
    try:
        with Directory.open(config.path) as base:
            for rank, rank_name in rank_directories(base).items():
                with base.subdirectory(rank_name) as directory:
                    for entry in directory.entries():
                        found = charged.get(segment_number(entry.name))
                        if found is not None:
                            _trim(directory, entry, 0 if rank >= found[1] else found[0])
    except OSError as error:
        raise BackendError(explain(config.path, error)) from error


def _trim(directory: Directory, entry: "os.DirEntry[str]", page_count: int) -> None:
    with suppress(FileNotFoundError):
        if page_count == 0:
            directory.unlink(entry.name)
        elif entry.stat(follow_symlinks=False).st_size > page_count * PAGE_BYTES:
            descriptor = directory.open_file(entry.name, os.O_RDWR)
            try:
                os.ftruncate(descriptor, page_count * PAGE_BYTES)
            finally:
                os.close(descriptor)


def _segment_files(directory: Directory) -> dict[int, int]:
    pages: dict[int, int] = {}
    intruders: list[str] = []
    for entry in directory.entries():
        segment = segment_number(entry.name)
        # Another process may remove it before we look at it.
        with suppress(FileNotFoundError):
            if segment:
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                    pages[segment] = -(-status.st_blocks * _BLOCK_BYTES // PAGE_BYTES)
                else:
                    intruders.append(entry.name)
    for name in intruders:
        directory.clear(name)
    return pages


def _payload_segments(
    tier: Path, base: Directory, name: str, geometry: SpaceGeometry
) -> dict[int, int]:
    with base.subdirectory(name) as directory:
        try:
            payload = directory.subdirectory("payload")
        except (FileNotFoundError, NotADirectoryError):
            return {}
        with payload:
            if not payload.has_file(DATA_NAME):
                return {}
    env = LmdbEnv.open(
        tier / name / "payload", tier=tier, map_bytes=geometry.payload_map_bytes, readahead=True
    )
    segments: list[int] = []
    try:
        with env.read() as txn, txn.cursor() as cursor:
            last = 0
            while cursor.set_range((last + 1).to_bytes(_SEGMENT_BYTES, "big")):
                segment = int.from_bytes(cursor.key()[:_SEGMENT_BYTES], "big")
                if not last < segment < SEGMENT_LIMIT:
                    break
                segments.append(segment)
                last = segment
    finally:
        env.close()
    return dict.fromkeys(segments, 0) | dict.fromkeys(segments[:1], geometry.payload_fill_pages)
