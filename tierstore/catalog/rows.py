"""Rows of the catalog: fixed layouts, checked when read. Nothing is pickled.

    state       b"state"                 -> StateRow
    state       b"units"                 -> BlockUnits, unless every page comes back by itself
    namespaces  namespace (8)            -> manifest, canonical JSON in full
    epochs      namespace (8)            -> owner (u32 LE): the one process that asks for it
    floors      namespace (8)            -> segment (u32 LE): its records in older ones are garbage
    owners      owner (u32 BE)           -> OwnerRow: a process that has the path open
    order       sequence (u64 BE)        -> segment, header page (u32 BE each); oldest first
    clusters    segment, header page (u32 BE each) -> ClusterRow; only those with a live record
    shards      start (u16 BE)           -> hashes of keys, and their clusters: see `index`
    shards      b"head"                  -> what is where in the index
    log         number (u64 BE)          -> what one transaction has added to the index and removed
    segments    segment (u32 BE)         -> SegmentRow
    units       segment, unit (u32 BE each) -> pages (u32 LE) that were freed; less than all of them
    pending     id (u64 BE)              -> PendingRow: extents being written, pages being released

Integers in values are little-endian. Keys are big-endian, so that their order is numeric; also one
that is the value of another row. A record has no checksum of its payload: ranks have different
bytes, and one catalog serves all ranks.
"""

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from tierstore.errors import CatalogDamagedError
from tierstore.lmdb_env.env import LmdbEnv
from tierstore.lmdb_env.library import Database

__all__ = [
    "CATALOG_VERSION",
    "EXTENT_DTYPE",
    "RUN_DTYPE",
    "Databases",
    "OwnerRow",
    "PendingRow",
    "RowArray",
    "SegmentRow",
    "SegmentState",
    "StateRow",
    "extent_key",
    "number_value",
    "parse_number",
    "segment_key",
    "wide_key",
]

CATALOG_VERSION = 4
"""Version of these rows; a catalog of another one is refused by name."""

RowArray = npt.NDArray[np.void]

EXTENT_DTYPE = np.dtype(
    [("segment", "<u4"), ("header_page", "<u4"), ("stride_pages", "<u4"), ("count", "<u4")]
)
RUN_DTYPE = np.dtype([("segment", "<u4"), ("first_page", "<u4"), ("page_count", "<u4")])
_NAMES_MAX = 64
_VERSION = struct.Struct("<Q")

segment_key = struct.Struct(">I").pack
"""Of `segments`; of `owners` likewise."""
number_value = struct.Struct("<I").pack
"""Of `epochs`, `floors` and `units`."""
wide_key = struct.Struct(">Q").pack
"""Of `order` and `pending`; of `clusters` and `units`, and where a cluster is named, with both
numbers in one."""


def parse_number(value: bytes) -> int:
    """Return what `number_value` packed; of a damaged value, of any length, no larger number."""
    return int.from_bytes(value[:4], "little")


def extent_key(segment: int, header_page: int) -> int:
    """Return both as the one number that `wide_key` packs."""
    return segment << 32 | header_page


class Databases:
    """Handles of the named databases of one catalog."""

    def __init__(self, env: LmdbEnv) -> None:
        """Open or create them.

        Raises:
            CatalogDamagedError: the environment is something else, such as a payload.
            BackendError: the catalog cannot be read or written.
        """
        with env.read() as txn, txn.cursor() as cursor:
            names = [name for name, _ in islice(cursor, _NAMES_MAX + 1)]
        # Of a later version there may be others, which is for `require_version` to say.
        if len(names) > _NAMES_MAX or not all(name.isalpha() for name in names):
            raise CatalogDamagedError("the file is no catalog, but another database")
        self.state = env.database(b"state")
        self.namespaces = env.database(b"namespaces")
        self.epochs = env.database(b"epochs")
        self.floors = env.database(b"floors")
        self.owners = env.database(b"owners")
        self.order = env.database(b"order")
        self.clusters = env.database(b"clusters")
        self.shards = env.database(b"shards")
        self.log = env.database(b"log")
        self.segments = env.database(b"segments")
        self.units = env.database(b"units")
        self.pending = env.database(b"pending")

    def all(self) -> list[Database]:
        """Return every database."""
        return list(vars(self).values())


class _Row:
    """A row of unsigned integers, and a namespace, in the order of its fields."""

    __slots__ = ()
    _LAYOUT: ClassVar[struct.Struct]

    @classmethod
    def unpack(cls, value: bytes) -> Self:
        if len(value) != cls._LAYOUT.size:
            raise CatalogDamagedError(
                f"a {cls.__name__} has {len(value)} bytes, expected {cls._LAYOUT.size}"
            )
        return cls(*cls._LAYOUT.unpack(value))

    def pack(self) -> bytes:
        return self._LAYOUT.pack(*map(self.__getattribute__, self.__match_args__))  # type: ignore[attr-defined]


@dataclass(slots=True)
class StateRow(_Row):
    """Counters and sums over the whole path. Pages are summed over all ranks.

    With a checksum: nothing else tells a number that is damaged from what another release, or
    another kind of tier, would say.
    """

    _LAYOUT: ClassVar[struct.Struct] = struct.Struct("<13Q")
    _CHECKSUM: ClassVar[struct.Struct] = struct.Struct("<Q")

    format_version: int
    backend: int
    rank_count: int
    """Of the first opener; LMDB payload cannot be shared by different ones."""
    next_sequence: int = 1
    next_segment: int = 1
    next_pending: int = 1
    next_owner: int = 1
    charged_pages: int = 0
    """On disk or allowed to be: what counts against the capacity."""
    pending_pages: int = 0
    """The part of `charged_pages` that is being released."""
    payload_bytes: int = 0
    """Of all records, on one rank; garbage does not count."""
    record_count: int = 0
    evicted_count: int = 0
    writing_count: int = 0
    """Records that have a place and will have rows: those of tickets that are not committed."""

    def pack(self) -> bytes:
        """Return the row as bytes."""
        content = super(StateRow, self).pack()
        return content + self._CHECKSUM.pack(xxh3_64_intdigest(content))

    @classmethod
    def unpack(cls, value: bytes) -> Self:
        """Return the row.

        Raises:
            CatalogDamagedError: the length or the checksum does not fit.
        """
        if not cls._has_checksum(value):
            raise CatalogDamagedError("the state row is damaged")
        return super(StateRow, cls).unpack(value[: cls._LAYOUT.size])

    @classmethod
    def read_version(cls, value: bytes) -> int:
        """Return the version of a row that may be of any.

        Raises:
            CatalogDamagedError: it is of this one, as its checksum proves, and says another.
        """
        (version,) = _VERSION.unpack(value[: _VERSION.size].ljust(_VERSION.size, b"\0"))
        ours = _VERSION.pack(CATALOG_VERSION) + value[_VERSION.size :]
        if version != CATALOG_VERSION and cls._has_checksum(ours):
            raise CatalogDamagedError(f"the rows are of version {CATALOG_VERSION}, not {version}")
        return int(version)

    @classmethod
    def _has_checksum(cls, value: bytes) -> bool:
        content, checksum = value[: cls._LAYOUT.size], value[cls._LAYOUT.size :]
        return checksum == cls._CHECKSUM.pack(xxh3_64_intdigest(content))


class SegmentState(IntEnum):
    """What may still happen to a segment."""

    CLOSED = 0
    """Nothing more is appended."""
    ACTIVE = 1
    """The owner still appends to it."""
    DEAD = 2
    """Its namespace was forgotten: it goes as a whole when nothing is being written to it."""


@dataclass(slots=True)
class SegmentRow(_Row):
    """One segment, of one owner and one namespace. Pages are those of one rank.

    With namespaces mixed in a segment, a reset would punch every record: 25 s for 40,000 of them.

    |<------------ page_count (preallocated) ------------>|
    | allocated extents            |next_page   not yet   |
    held = live or being written; pending = being released; charged = held + pending + rest
    rest: what is not given out yet, but charged; what was freed in units that hold something else;
          the file system's own blocks
    """

    _LAYOUT: ClassVar[struct.Struct] = struct.Struct("<3I8s7IQ")

    owner: int
    rank_count: int
    page_count: int
    namespace: bytes
    state: int = SegmentState.ACTIVE
    next_page: int = 0
    held_pages: int = 0
    charged_pages: int = 0
    pending_pages: int = 0
    writing_count: int = 0
    """Extents that were given out and not yet committed."""
    record_count: int = 0
    payload_bytes: int = 0


@dataclass(slots=True)
class OwnerRow(_Row):
    """A process that has the path open."""

    _LAYOUT: ClassVar[struct.Struct] = struct.Struct("<8sQ")

    namespace: bytes
    """What it asks for."""
    capacity_bytes: int
    """What it was promised that all bytes below the path stay within."""


@dataclass(slots=True)
class PendingRow:
    """Pages that an owner is writing or releasing; what recovery needs after a kill."""

    _HEAD: ClassVar[struct.Struct] = struct.Struct("<IIII")

    owner: int
    extents: RowArray = field(default_factory=lambda: np.empty(0, EXTENT_DTYPE))
    """Being written, not yet records."""
    runs: RowArray = field(default_factory=lambda: np.empty(0, RUN_DTYPE))
    """Being released."""
    empty_segments: list[int] = field(default_factory=list)

    def pack(self) -> bytes:
        """Return the row as bytes."""
        head = self._HEAD.pack(
            self.owner, len(self.extents), len(self.runs), len(self.empty_segments)
        )
        empty = np.array(self.empty_segments, "<u4")
        return head + self.extents.tobytes() + self.runs.tobytes() + empty.tobytes()

    @classmethod
    def unpack(cls, value: bytes) -> Self:
        """Return the row.

        Raises:
            CatalogDamagedError: the lengths do not fit.
        """
        if len(value) < cls._HEAD.size:
            raise CatalogDamagedError("a pending row is damaged")
        owner, extent_count, run_count, empty_count = cls._HEAD.unpack_from(value)
        runs_at = cls._HEAD.size + extent_count * EXTENT_DTYPE.itemsize
        empty_at = runs_at + run_count * RUN_DTYPE.itemsize
        if len(value) != empty_at + 4 * empty_count:
            raise CatalogDamagedError("a pending row is damaged")
        return cls(
            owner,
            np.frombuffer(value, EXTENT_DTYPE, extent_count, cls._HEAD.size),
            np.frombuffer(value, RUN_DTYPE, run_count, runs_at),
            np.frombuffer(value, "<u4", empty_count, empty_at).tolist(),
        )
