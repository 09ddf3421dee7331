"""Which segments lie below the path of a tier, whether or not a catalog knows them."""

from pathlib import Path

from tierstore.config import SecondaryConfig
from tierstore.geometry import SpaceGeometry
from tierstore.layout import PAGE_BYTES
from tierstore.lmdb_env import LmdbEnv

__all__ = ["stored_segments"]

_SEGMENT_BYTES = 4
_SEGMENT_MAX = 1 << 31
"""A damaged key or name may say anything; segments are counted from 1."""


def stored_segments(config: SecondaryConfig, geometry: SpaceGeometry) -> dict[int, int]:
    """Return the pages of each segment, on the rank that has most of it.

    Of the lmdb backend, whose values tell nothing of their sum, all of the tier's pages are laid to
    the first segment.

    Raises:
        BackendError: a payload environment cannot be read.
    """
    pages: dict[int, int] = {}
    for directory in config.path.glob("rank[0-9]*"):
        if config.backend == "file":
            for path in directory.glob("*.seg"):
                segment = _number(path.stem)
                if segment:
                    used = -(-path.stat().st_blocks * 512 // PAGE_BYTES)
                    pages[segment] = max(used, pages.get(segment, 0))
        elif (directory / "payload" / "data.mdb").exists():
            found = _payload_segments(directory / "payload", geometry.payload_map_bytes)
            pages |= dict.fromkeys(found, 0)
    if config.backend == "lmdb" and pages:
        pages[min(pages)] = geometry.space_pages
    return pages


def _number(name: str) -> int:
    try:
        number = int(name, 16)
    except ValueError:
        return 0
    return number if 0 < number < _SEGMENT_MAX else 0


def _payload_segments(directory: Path, map_bytes: int) -> list[int]:
    env = LmdbEnv.open(directory, map_bytes=map_bytes, readahead=True)
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
    return segments
