"""How the bytes of a secondary tier are divided: catalog, segments, headroom. Pure functions.

    capacity = misc    (directories, lock files)
             + catalog (file: what it takes, measured; lmdb: a fixed share)
             + rank_count * payload, of which
                   file:  preallocated segments, each with the file system's own blocks for it
                   lmdb:  the part of one payload map per rank that LMDB fills reliably

The data plane needs `payload_map_bytes` alone; how long a segment is stands in every place.
"""

from dataclasses import dataclass
from typing import Literal, Self

from tierstore.config import SecondaryConfig
from tierstore.errors import ConfigError
from tierstore.layout import PAGE_BYTES
from tierstore.manifest import Manifest

__all__ = ["SpaceGeometry", "lmdb_body_bytes", "segment_overhead_pages"]

_SEGMENT_PAGES_MIN = 8
_SEGMENT_PAGES_MAX = (1 << 30) // PAGE_BYTES
_SEGMENTS_PER_TIER = 32
"""Of one owner. Room for about one segment stays free for the next writes, and one is being filled,
so this bounds the loss to 6 %, however many owners there are."""

_CATALOG_BYTES_MIN = 1 << 20
_CATALOG_SHARE = 4
"""The catalog takes a fourth of the capacity at most; records of a page each need half of that."""
_LMDB_CATALOG_SHARE = 16
_LMDB_CATALOG_SHARE_SMALL = 24
_LMDB_CATALOG_EXTRA_BYTES_MAX = 32 << 20
"""A payload map cannot shrink for the catalog: it has a share of its own, a tenth in small tiers,
where copies of pages count more."""

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
    rank_count: int
    capacity_bytes: int
    payload_map_bytes: int
    """Map size of one rank's payload environment; 0 for segment files."""
    payload_fill_pages: int
    """What LMDB fills of that map reliably, leaves included."""

    @classmethod
    def of(cls, config: SecondaryConfig, manifest: Manifest, rank_count: int) -> Self:
        """Divide `config.capacity_bytes`.

        Raises:
            ConfigError: the capacity is too small for the catalog and one segment.
        """
        strides = _strides(config, manifest)
        is_file = config.backend == "file"
        payload_bytes = config.capacity_bytes - _misc_bytes(rank_count)
        payload_bytes -= (
            _CATALOG_BYTES_MIN if is_file else _lmdb_catalog_bytes(config.capacity_bytes)
        )
        payload_pages = max(0, payload_bytes) // rank_count // PAGE_BYTES
        fill_pages = 0
        if is_file:
            space_pages = payload_pages
            needed_pages = max(strides) + 1 + segment_overhead_pages(max(strides) + 1)
        else:
            fill = _LMDB_FILL_ONE_SIZE if len(strides) == 1 else _LMDB_FILL_MIXED
            slack_pages = _LMDB_SLACK_RECORDS * max(strides) if len(strides) > 1 else 0
            fill_pages = max(0, int(payload_pages * fill) - slack_pages)
            space_pages = fill_pages
            needed_pages = 4 * max(strides)
        if space_pages < needed_pages:
            missing = (needed_pages - space_pages) * PAGE_BYTES * rank_count
            raise ConfigError(
                f"secondary {config.name!r}: capacity: {config.capacity_bytes} bytes are too few "
                f"for the catalog and one segment; raise it by at least {missing} bytes"
            )
        return cls(
            header_pages=1 if is_file else 0,
            charges_segments=is_file,
            rank_count=rank_count,
            capacity_bytes=config.capacity_bytes,
            payload_map_bytes=0 if is_file else payload_pages * PAGE_BYTES,
            payload_fill_pages=fill_pages,
        )

    def stride_pages(self, payload_bytes: int) -> int:
        """Return the distance of adjacent records of one extent."""
        return _stride_pages(payload_bytes, "file" if self.header_pages else "lmdb")

    def payload_pages(self, capacity_bytes: int, catalog_pages: int, record_count: int) -> int:
        """Return what the pages charged by all owners, on all ranks, may sum up to.

        `catalog_pages` are those that the catalog takes or may take. An lmdb tier, whose maps are
        of one size, makes room for a catalog that outgrew its share only, and for the leaves of
        its records.
        """
        if self.charges_segments:
            misc_pages = _misc_bytes(self.rank_count) // PAGE_BYTES
            return max(0, capacity_bytes // PAGE_BYTES - misc_pages - catalog_pages)
        excess_pages = max(0, catalog_pages - self.catalog_pages_max(capacity_bytes))
        leaf_pages = int(record_count * _LMDB_LEAF_PAGES_PER_RECORD) + 1
        return max(0, (self.payload_fill_pages - leaf_pages) * self.rank_count - excess_pages)

    def catalog_pages_max(self, capacity_bytes: int) -> int:
        """Return the pages that a catalog may take, whatever its records are."""
        if not self.charges_segments:
            return _lmdb_catalog_bytes(capacity_bytes) // PAGE_BYTES
        return max(capacity_bytes // _CATALOG_SHARE, _CATALOG_BYTES_MIN) // PAGE_BYTES

    def segment_pages(self, capacity_bytes: int, owner_count: int, stride_pages: int) -> int:
        """Return the pages of a new segment on one rank; for LMDB only a range of addresses.

        Whole records with a header page each, so that no arrangement wastes the tail.
        """
        if not self.charges_segments:
            return _LMDB_SEGMENT_PAGES
        unit = stride_pages + 1
        wanted = self.share_pages(capacity_bytes, owner_count)
        return max(1, wanted // unit) * unit

    def share_pages(self, capacity_bytes: int, owner_count: int) -> int:
        """Return what one segment should have of one rank's pages, as long as a record fits."""
        share = capacity_bytes // PAGE_BYTES // self.rank_count
        share //= _SEGMENTS_PER_TIER * max(1, owner_count)
        return min(max(share, _SEGMENT_PAGES_MIN), _SEGMENT_PAGES_MAX)


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


def _misc_bytes(rank_count: int) -> int:
    return _MISC_BYTES + rank_count * _MISC_BYTES_PER_RANK


def _lmdb_catalog_bytes(capacity_bytes: int) -> int:
    extra = min(capacity_bytes // _LMDB_CATALOG_SHARE_SMALL, _LMDB_CATALOG_EXTRA_BYTES_MAX)
    return max(_CATALOG_BYTES_MIN, capacity_bytes // _LMDB_CATALOG_SHARE + extra)


def _strides(config: SecondaryConfig, manifest: Manifest) -> set[int]:
    sizes = [manifest.chunk_bytes(group_idx) for group_idx in range(len(manifest.groups))]
    return {_stride_pages(size, config.backend) for size in sizes if size} or {1}


def _stride_pages(payload_bytes: int, backend: Literal["file", "lmdb"]) -> int:
    if backend == "lmdb":
        payload_bytes = lmdb_body_bytes(payload_bytes) + _LMDB_PAGE_HEADER_BYTES
    return -(-payload_bytes // PAGE_BYTES)
