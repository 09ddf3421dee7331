"""How the bytes of a secondary tier are divided: catalog, segments, headroom. One pure function.

Both planes compute the same geometry from the same configuration, so they agree without a message:

    capacity = catalog (map size, reserved in full)
             + misc    (directories, lock files)
             + rank_count * space_pages of payload, of which
                   file:  preallocated segments, each with the file system's own blocks for it
                   lmdb:  the part of one payload map per rank that LMDB fills reliably
"""

from dataclasses import dataclass
from typing import Literal, Self

from tierstore.config import SecondaryConfig
from tierstore.errors import ConfigError
from tierstore.layout import PAGE_BYTES, round_up
from tierstore.manifest import Manifest
from tierstore.record import EXTENT_RECORDS_MAX

__all__ = ["SpaceGeometry", "lmdb_body_bytes", "segment_overhead_pages"]

_SEGMENT_BYTES_MIN = 1 << 20
_SEGMENT_BYTES_MAX = 1 << 30
_SEGMENTS_PER_TIER = 32
"""Room for about one segment stays free for the next writes, so this bounds the loss to 3 %."""

_CATALOG_BYTES_MIN = 1 << 20
_CATALOG_BYTES_PER_RECORD = 400
"""Measured 210 to 330 bytes under eviction in random order, copies of two transactions included."""

_MISC_BYTES = 64 << 10
_MISC_BYTES_PER_RANK = 32 << 10

_LMDB_PAGE_HEADER_BYTES = 16
_LMDB_TAIL_BYTES_MAX = 512
"""What a payload has beyond whole pages goes to a leaf if it is at most this; otherwise it is worth
a page of its own."""

_LMDB_SEGMENT_PAGES = 1 << 31
_LMDB_LEAF_PAGES_PER_RECORD = 0.15
"""Two nodes of about 200 bytes, in leaves that may be a third full."""

_LMDB_FILL_ONE_SIZE = 0.90
_LMDB_FILL_MIXED = 0.82
_LMDB_SLACK_RECORDS = 4
"""Share of a map, less some of the largest records, that LMDB fills reliably: a value needs
adjacent free pages, which single pages of the tree and values of other sizes cut short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceGeometry:
    """Sizes of one tier, the same in every process that opens it with this configuration."""

    header_pages: int
    """Pages in front of the payloads of an extent: 1 in segment files, 0 in LMDB."""
    charges_segments: bool
    """A new segment counts whole, since it is preallocated; otherwise each extent counts."""
    segment_pages: int
    """Pages of one segment; for LMDB only a range of addresses."""
    space_pages: int
    """What the pages charged by all owners may sum up to, on one rank."""
    ahead_pages: int
    """Room kept free so that writes need not wait for evictions, on one rank."""
    rank_count: int
    catalog_map_bytes: int
    payload_map_bytes: int
    """Map size of one rank's payload environment; 0 for segment files."""
    record_count_max: int

    @classmethod
    def of(cls, config: SecondaryConfig, manifest: Manifest, rank_count: int) -> Self:
        """Divide `config.capacity_bytes`.

        Raises:
            ConfigError: the capacity is too small for the catalog and one segment.
        """
        strides = _strides(config, manifest)
        rank_bytes = config.capacity_bytes // rank_count
        record_count_max = rank_bytes // (min(strides) * PAGE_BYTES) + EXTENT_RECORDS_MAX
        map_bytes = _CATALOG_BYTES_MIN + record_count_max * _CATALOG_BYTES_PER_RECORD
        map_bytes = round_up(map_bytes, PAGE_BYTES)
        misc_bytes = _MISC_BYTES + rank_count * _MISC_BYTES_PER_RANK
        payload_bytes = max(0, config.capacity_bytes - map_bytes - misc_bytes) // rank_count
        payload_pages = payload_bytes // PAGE_BYTES
        if config.backend == "file":
            segment_pages = _segment_pages(rank_bytes, max(strides))
            space_pages = payload_pages
            ahead_pages = segment_pages + segment_overhead_pages(segment_pages)
            needed_pages = ahead_pages
        else:
            segment_pages = _LMDB_SEGMENT_PAGES
            fill = _LMDB_FILL_ONE_SIZE if len(strides) == 1 else _LMDB_FILL_MIXED
            leaf_share = min(strides) / (min(strides) + _LMDB_LEAF_PAGES_PER_RECORD)
            slack_pages = _LMDB_SLACK_RECORDS * max(strides) if len(strides) > 1 else 0
            space_pages = max(0, int(payload_pages * fill * leaf_share) - slack_pages)
            ahead_pages = space_pages // (2 * _SEGMENTS_PER_TIER)
            needed_pages = 4 * max(strides)
        if space_pages < needed_pages:
            missing = (needed_pages - space_pages) * PAGE_BYTES * rank_count
            raise ConfigError(
                f"secondary {config.name!r}: capacity: {config.capacity_bytes} bytes are too few "
                f"for the catalog and one segment; raise it by at least {missing} bytes"
            )
        return cls(
            header_pages=1 if config.backend == "file" else 0,
            charges_segments=config.backend == "file",
            segment_pages=segment_pages,
            space_pages=space_pages,
            ahead_pages=ahead_pages,
            rank_count=rank_count,
            catalog_map_bytes=map_bytes,
            payload_map_bytes=0 if config.backend == "file" else payload_pages * PAGE_BYTES,
            record_count_max=record_count_max,
        )

    @property
    def segment_bytes(self) -> int:
        """Size to which a segment file is preallocated."""
        return self.segment_pages * PAGE_BYTES

    def stride_pages(self, payload_bytes: int) -> int:
        """Return the distance of adjacent records of one extent."""
        return _stride_pages(payload_bytes, "file" if self.header_pages else "lmdb")


def lmdb_body_bytes(payload_bytes: int) -> int:
    """Return how much of a payload the lmdb backend keeps in pages of its own.

    LMDB puts 16 bytes of its own in front of a large value, which would cost a payload of whole
    pages one page more; the rest lies in a leaf, behind the record's header.
    """
    page_count = (payload_bytes + _LMDB_PAGE_HEADER_BYTES) // PAGE_BYTES
    body_bytes = max(0, page_count * PAGE_BYTES - _LMDB_PAGE_HEADER_BYTES)
    return body_bytes if payload_bytes - body_bytes <= _LMDB_TAIL_BYTES_MAX else payload_bytes


def segment_overhead_pages(segment_pages: int) -> int:
    """Return what a file system may spend on a segment that was punched full of holes.

    ext4 keeps 340 extents per block outside the inode; the worst file alternates single pages.
    """
    return 2 + segment_pages // 512


def _strides(config: SecondaryConfig, manifest: Manifest) -> set[int]:
    sizes = [manifest.chunk_bytes(group_idx) for group_idx in range(len(manifest.groups))]
    return {_stride_pages(size, config.backend) for size in sizes if size} or {1}


def _stride_pages(payload_bytes: int, backend: Literal["file", "lmdb"]) -> int:
    if backend == "lmdb":
        payload_bytes = lmdb_body_bytes(payload_bytes) + _LMDB_PAGE_HEADER_BYTES
    return -(-payload_bytes // PAGE_BYTES)


def _segment_pages(rank_bytes: int, stride_max: int) -> int:
    """Return whole records with a header page each, so that no arrangement wastes the tail."""
    unit = stride_max + 1
    wanted = min(max(rank_bytes // _SEGMENTS_PER_TIER, _SEGMENT_BYTES_MIN), _SEGMENT_BYTES_MAX)
    return max(1, wanted // PAGE_BYTES // unit) * unit
