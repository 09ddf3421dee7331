"""The row that says where the log and the shards of the index stand."""

import secrets
import struct
from dataclasses import dataclass, field
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from tierstore.catalog.index.hashes import Numbers
from tierstore.errors import CatalogDamagedError

__all__ = ["HEAD_KEY", "SHARDS_MAX", "SHARD_DTYPE", "START_SHIFT", "Head", "ShardTable"]

HEAD_KEY = b"head"
"""In the database of the shards, whose own keys have two bytes."""

SHARD_DTYPE = np.dtype([("start", "<u4"), ("count", "<u4"), ("merged", "<u8"), ("version", "<u8")])
SHARDS_MAX = 1 << 16
START_SHIFT = 48
"""A shard begins where its start and 48 zeros do, and ends where the next one begins."""

ShardTable = npt.NDArray[np.void]

_NUMBER_END = 1 << 62
_CHECKSUM = struct.Struct("<Q")


def _one_shard() -> ShardTable:
    return np.zeros(1, SHARD_DTYPE)


@dataclass(slots=True)
class Head:
    """Where the log begins and ends, and each shard: its hashes, entries, and what it contains.

    |<-- deleted -->|<-- first_number ... log rows ... last_number -->| next_number
    """

    _LAYOUT: ClassVar[struct.Struct] = struct.Struct("<5Q")

    identity: int = field(default_factory=lambda: secrets.randbits(64))
    """At random: numbers of another index, that lay here before, mean something else."""
    first_number: int = 1
    """Of the oldest log row."""
    next_number: int = 1
    log_version: int = 0
    """Checksum of the youngest log row."""
    owed_ops: int = 0
    """Additions and removals since the last merge that they paid for."""
    shards: ShardTable = field(default_factory=_one_shard)
    """By start. `merged` is the number of the last log row that is merged into it, `version` the
    checksum of its row; 0: it is empty, and there is no row."""
    edges: Numbers = field(init=False, repr=False)
    """The lowest hash of each shard."""

    starts: list[int] = field(init=False, repr=False)
    """Of each shard; as `versions`, to be had one by one."""
    versions: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.edges = self.shards["start"].astype(np.uint64) << np.uint64(START_SHIFT)
        self.starts = self.shards["start"].tolist()
        self.versions = self.shards["version"].tolist()

    @property
    def last_number(self) -> int:
        """The number of the youngest log row."""
        return self.next_number - 1

    def end_of(self, shard: int) -> int:
        """Return the hash behind the highest one of a shard."""
        after = shard + 1
        start = self.starts[after] if after < len(self.starts) else SHARDS_MAX
        return start << START_SHIFT

    def with_shards(self, shards: ShardTable) -> "Head":
        """Return a head that can be changed, and has other shards."""
        return Head(
            self.identity,
            self.first_number,
            self.next_number,
            self.log_version,
            self.owed_ops,
            shards,
        )

    def pack(self) -> bytes:
        """Return the row as bytes."""
        content = self._LAYOUT.pack(
            self.identity, self.first_number, self.next_number, self.log_version, self.owed_ops
        )
        content += self.shards.tobytes()
        return content + _CHECKSUM.pack(xxh3_64_intdigest(content))

    @classmethod
    def unpack(cls, value: bytes) -> Self:
        """Return the row; it is never changed.

        Raises:
            CatalogDamagedError: length, checksum or numbers do not fit.
        """
        content, checksum = value[: -_CHECKSUM.size], value[-_CHECKSUM.size :]
        size = len(content) - cls._LAYOUT.size
        if size <= 0 or size % SHARD_DTYPE.itemsize:
            raise CatalogDamagedError("the head of the index is damaged")
        if checksum != _CHECKSUM.pack(xxh3_64_intdigest(content)):
            raise CatalogDamagedError("the head of the index is damaged")
        shards = np.frombuffer(content, SHARD_DTYPE, offset=cls._LAYOUT.size)
        identity, first, following, log_version, owed = cls._LAYOUT.unpack_from(content)
        head = cls(identity, first, following, log_version, owed, shards)
        if not head._is_sound():
            raise CatalogDamagedError("the head of the index contradicts itself")
        return head

    def _is_sound(self) -> bool:
        starts, merged = self.shards["start"].astype(np.int64), self.shards["merged"]
        return bool(
            0 < self.first_number <= self.next_number < _NUMBER_END
            and self.owed_ops < _NUMBER_END
            and starts[0] == 0
            and starts[-1] < SHARDS_MAX
            and np.all(starts[1:] > starts[:-1])
            and merged.max() < self.next_number
            and merged.min() + 1 >= self.first_number
            and np.all((self.shards["count"] == 0) == (self.shards["version"] == 0))
        )
