"""One shard of the index: all entries of a range of hashes, as one row."""

import struct
from dataclasses import dataclass, field

import numpy as np
from xxhash import xxh3_64

from tierstore.catalog.index.hashes import Numbers
from tierstore.catalog.index.head import START_SHIFT, Head
from tierstore.catalog.index.searching import address_of
from tierstore.errors import CatalogDamagedError

__all__ = ["Shard", "pack_shard", "shard_key", "unpack_shard"]

shard_key = struct.Struct(">H").pack

_HEAD = struct.Struct("<IIQ")
_CHECKSUM = struct.Struct("<Q")


@dataclass(slots=True)
class Shard:
    """The entries of one version of a shard, by hash; equal hashes by age, the oldest first."""

    version: int
    hashes: Numbers
    clusters: Numbers
    used_at: int = 0
    """When it was used last, by the count of its cache."""
    is_unique: bool = field(init=False)
    """Whether no two entries have the same hash, as it nearly always is."""

    address: int = field(init=False)
    """Of the hashes."""

    def __post_init__(self) -> None:
        self.address = address_of(self.hashes)
        self.is_unique = bool(np.all(self.hashes[1:] != self.hashes[:-1]))

    @property
    def size_bytes(self) -> int:
        """What its arrays take."""
        return self.hashes.nbytes + self.clusters.nbytes


def pack_shard(merged: int, start: int, hashes: Numbers, clusters: Numbers) -> tuple[bytes, int]:
    """Return the row of a shard, and its version, which is not 0."""
    head = _HEAD.pack(start, len(hashes), merged)
    hashes, clusters = hashes.astype("<u8", copy=False), clusters.astype("<u8", copy=False)
    checksum = _checksum(head, hashes.data, clusters.data)
    return b"".join((head, hashes.data, clusters.data, _CHECKSUM.pack(checksum))), checksum


def unpack_shard(value: bytes | None, head: Head, index: int) -> Shard:
    """Return the shard that `head` names; its arrays are views of `value`.

    Raises:
        CatalogDamagedError: it is missing, or of another version; or length, checksum or order do
            not fit.
    """
    row = head.shards[index]
    start, count, merged, version = (int(row[name]) for name in head.shards.dtype.names or ())
    if value is None or len(value) != _HEAD.size + 16 * count + _CHECKSUM.size:
        raise CatalogDamagedError(f"shard {start} of the index is missing or damaged")
    view = memoryview(value)
    if (
        _HEAD.unpack_from(value) != (start, count, merged)
        or _CHECKSUM.unpack(view[-_CHECKSUM.size :]) != (version,)
        or _checksum(view[: -_CHECKSUM.size]) != version
    ):
        raise CatalogDamagedError(f"shard {start} of the index is damaged")
    numbers = np.frombuffer(value, "<u8", 2 * count, _HEAD.size).astype(np.uint64, copy=False)
    hashes = numbers[:count]
    if (
        np.any(hashes[1:] < hashes[:-1])
        or int(hashes[0]) < start << START_SHIFT
        or int(hashes[-1]) >= head.end_of(index)
    ):
        raise CatalogDamagedError(f"shard {start} of the index is not in order")
    return Shard(version, hashes, numbers[count:])


def _checksum(*parts: bytes | memoryview) -> int:
    digest = xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest() or 1
