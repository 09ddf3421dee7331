"""One row of the log: what one transaction added to the index and removed from it, in order.

number (u64 LE), ops (u32), groups (u32), groups (GROUP_DTYPE), hashes (u64 LE each), checksum
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_intdigest

from tierstore.catalog.index.hashes import Numbers
from tierstore.catalog.index.run import Run
from tierstore.errors import CatalogDamagedError

__all__ = [
    "GROUP_DTYPE",
    "LogRow",
    "OpGroup",
    "group_run",
    "log_key",
    "pack_log_row",
    "unpack_log_row",
]

GROUP_DTYPE = np.dtype([("cluster", "<u8"), ("count", "<u4"), ("is_added", "<u4")])
"""Successive ops on one cluster."""

OpGroup = tuple[int, int, bool]
"""Cluster, number of hashes, and whether they were added."""

log_key = struct.Struct(">Q").pack

_HEAD = struct.Struct("<QQII")
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class LogRow:
    """The ops of one transaction, and what its row follows."""

    run: Run
    previous: int
    """Checksum of the row before."""
    version: int
    """Checksum of this one."""


def pack_log_row(
    number: int, previous: int, groups: Sequence[OpGroup], hashes: Numbers
) -> tuple[bytes, int]:
    """Return the row of a transaction, and its checksum."""
    content = b"".join(
        (
            _HEAD.pack(number, previous, len(hashes), len(groups)),
            np.array(groups, GROUP_DTYPE).tobytes(),
            hashes.astype("<u8", copy=False).data,
        )
    )
    checksum = xxh3_64_intdigest(content)
    return content + _CHECKSUM.pack(checksum), checksum


def group_run(number: int, groups: Sequence[OpGroup], hashes: Numbers) -> Run:
    """Return the same ops to be searched."""
    return _run(number, np.array(groups, GROUP_DTYPE), hashes)


def unpack_log_row(value: bytes | None, number: int) -> LogRow:
    """Return the ops of the row that should have this number.

    Raises:
        CatalogDamagedError: it is missing, or length, checksum or numbers do not fit.
    """
    row = _unpack(value, number) if value is not None else None
    if row is None:
        raise CatalogDamagedError(f"row {number} of the log of the index is missing or damaged")
    return row


def _unpack(value: bytes, number: int) -> LogRow | None:
    if len(value) < _HEAD.size + _CHECKSUM.size:
        return None
    stored_number, previous, op_count, group_count = _HEAD.unpack_from(value)
    hashes_at = _HEAD.size + GROUP_DTYPE.itemsize * group_count
    checksum_at = hashes_at + 8 * op_count
    if stored_number != number or len(value) != checksum_at + _CHECKSUM.size:
        return None
    view = memoryview(value)
    version = xxh3_64_intdigest(view[:checksum_at])
    if _CHECKSUM.unpack(view[checksum_at:]) != (version,):
        return None
    groups = np.frombuffer(value, GROUP_DTYPE, group_count, _HEAD.size)
    hashes = np.frombuffer(value, "<u8", op_count, hashes_at).astype(np.uint64, copy=False)
    # Before they are repeated: a damaged count must not take memory.
    if groups["count"].sum(dtype=np.uint64) != op_count or np.any(groups["is_added"] > 1):
        return None
    return LogRow(_run(number, groups, hashes), previous, version)


def _run(number: int, groups: np.ndarray, hashes: Numbers) -> Run:
    counts = groups["count"]
    stamps = groups["is_added"].astype(np.uint64) | np.uint64(number << 1)
    return Run.of(
        hashes,
        np.repeat(groups["cluster"].astype(np.uint64, copy=False), counts),
        np.repeat(stamps, counts),
        number,
    )
