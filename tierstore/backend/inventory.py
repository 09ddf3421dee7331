"""Which segments lie below the path of a tier, whether or not a catalog knows them."""

from contextlib import suppress
from pathlib import Path

from tierstore.config import SecondaryConfig
from tierstore.errors import BackendError
from tierstore.geometry import SpaceGeometry
from tierstore.layout import PAGE_BYTES
from tierstore.lmdb_env import LmdbEnv

__all__ = ["stored_segments"]

_BLOCK_BYTES = 512
_SEGMENT_BYTES = 4
_SEGMENT_MAX = 1 << 31
"""A damaged key or name may say anything; segments are counted from 1."""


def stored_segments(config: SecondaryConfig, geometry: SpaceGeometry) -> dict[int, int]:
    """Return the pages of each segment, on the rank that has most of it.

    The lmdb backend would have to read every value for that: all pages of the tier are laid to the
    first segment.

    Raises:
        BackendError: the path cannot be read.
    """
    pages: dict[int, int] = {}
    try:
        for directory in config.path.glob("rank[0-9]*"):
            found = (
                _segment_files(directory)
                if config.backend == "file"
                else _payload_segments(directory / "payload", geometry)
            )
            for segment, count in found.items():
                pages[segment] = max(count, pages.get(segment, 0))
    except OSError as error:
        raise BackendError(f"{config.path}: {error}; make the path readable") from error
    return pages


def _segment_files(directory: Path) -> dict[int, int]:
    pages: dict[int, int] = {}
    for path in directory.glob("*.seg"):
        segment = _number(path.stem)
        # Another process may remove it before we look at it.
        with suppress(FileNotFoundError):
            if segment:
                pages[segment] = -(-path.stat().st_blocks * _BLOCK_BYTES // PAGE_BYTES)
    return pages


def _number(name: str) -> int:
    try:
        number = int(name, 16)
    except ValueError:
        return 0
    return number if 0 < number < _SEGMENT_MAX else 0


def _payload_segments(directory: Path, geometry: SpaceGeometry) -> dict[int, int]:
    if not (directory / "data.mdb").exists():
        return {}
    env = LmdbEnv.open(directory, map_bytes=geometry.payload_map_bytes, readahead=True)
    segments: list[int] = []
    try:
        with env.read() as txn, txn.cursor() as cursor:
            last = 0
            while cursor.set_range((last + 1).to_bytes(_SEGMENT_BYTES, "big")):
                segment = int.from_bytes(cursor.key()[:_SEGMENT_BYTES], "big")
                if not last < segment < _SEGMENT_MAX:
                    break
                segments.append(segment)
                last = segment
    finally:
        env.close()
    return dict.fromkeys(segments, 0) | dict.fromkeys(segments[:1], geometry.payload_fill_pages)
