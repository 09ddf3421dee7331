"""How the bytes of a secondary tier are divided: catalog, segments, headroom. Pure functions.

    capacity = misc    (directories, lock files)
             + catalog (file: what it takes, measured; lmdb: a fixed share)
             + rank_count * payload, of which
                   file:  segments, each with the file system's own blocks for it
                   lmdb:  the part of one payload map per rank that LMDB fills reliably

A segment is preallocated and charged whole, and gives back single pages. Where the file system has
larger units (`BlockUnits`), it is charged unit by unit as it is filled, and gives back whole units;
every file counts whole units, too. Where only whole files give anything back, segments do.

The data plane needs `payload_map_bytes` alone; how long a segment is stands in every place.
"""

from dataclasses import dataclass
from typing import Self

from tierstore.config import SecondaryConfig
from tierstore.device.block_units import PAGE_UNITS, BlockUnits
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

_SEGMENT_UNITS_MIN = 16
"""Of a segment that gives back units: its tables count, and what is never filled costs nothing."""
_ORDERED_STRIDE_UNITS = 4
"""Records of fewer units leave in the order in which they were written: neighbours share units."""

_MISC_BYTES = 64 << 10
_MISC_BYTES_PER_RANK = 32 << 10
_FOLDER_COUNT = 4
"""The path, its catalog, its owners, and one to spare; each rank has more."""
_FILE_COUNT = 4
"""Of the catalog: `lock.mdb`, `opening.lock`, `seal.bin` or `distrust`, and one to spare."""
_FILE_COUNT_PER_RANK = 3
"""Of a payload environment: `lock.mdb`, `opening.lock`, `distrust`."""

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

    units: BlockUnits = PAGE_UNITS
    """What the file system below the path does with blocks."""

    @classmethod
    def of(
        cls,
        config: SecondaryConfig,
        manifest: Manifest,
        rank_count: int,
        units: BlockUnits = PAGE_UNITS,
    ) -> Self:
        """Divide `config.capacity_bytes`.

        Raises:
            ConfigError: the capacity is too small for the catalog and one segment.
        """
        strides = _strides(config, manifest)
        is_file = config.backend != "lmdb"
        payload_pages = _payload_pages(config, config.capacity_bytes, rank_count, units)
        least_bytes = _least_bytes(config, strides, rank_count, units)
        if least_bytes > config.capacity_bytes:
            raise ConfigError(
                f"secondary {config.name!r}: capacity: {config.capacity_bytes} bytes are too few "
                f"for the catalog and one segment{_unit_text(units)}; raise it by at least "
                f"{least_bytes - config.capacity_bytes} bytes, to {least_bytes}"
            )
        return cls(
            header_pages=1 if is_file else 0,
            charges_segments=is_file and units.is_paged,
            rank_count=rank_count,
            capacity_bytes=config.capacity_bytes,
            payload_map_bytes=0 if is_file else payload_pages * PAGE_BYTES,
            payload_fill_pages=0 if is_file else _space_pages(config, payload_pages, strides),
            units=units,
        )

    @property
    def is_file(self) -> bool:
        """Whether payload lies in segment files."""
        return self.header_pages > 0

    @property
    def unit_pages(self) -> int:
        """The pages that a segment gives back together; 0: only all of them."""
        if not self.is_file:
            return 1
        return self.units.unit_pages if self.units.frees_parts else 0

    def keeps_order(self, stride_pages: int) -> bool:
        """Return whether records leave in the order in which they were written, whoever uses them.

        Neighbours that leave at different times would keep the unit that they share.
        """
        unit_pages = self.unit_pages
        if unit_pages == 1:
            return False
        return unit_pages == 0 or stride_pages < _ORDERED_STRIDE_UNITS * unit_pages

    def charged_end(self, next_page: int, page_count: int) -> int:
        """Return the first page of a segment that is not charged, when `next_page` comes next."""
        if self.charges_segments:
            return page_count
        return self.units.whole(next_page) if self.is_file else next_page

    def file_pages(self, end_page: int, page_count: int) -> int:
        """Return how long a segment's file has to be for an extent that ends before `end_page`."""
        is_gradual = self.is_file and not self.charges_segments
        return self.units.whole(end_page) if is_gradual else page_count

    def overhead_pages(self, page_count: int) -> int:
        """Return what is charged for a segment beside its own pages."""
        return segment_overhead_pages(page_count, self.units) if self.is_file else 0

    def stride_pages(self, payload_bytes: int) -> int:
        """Return the distance of adjacent records of one extent."""
        return _stride_pages(payload_bytes, "file" if self.is_file else "lmdb")

    def payload_pages(self, capacity_bytes: int, catalog_pages: int, record_count: int) -> int:
        """Return what the pages charged by all owners, on all ranks, may sum up to.

        `catalog_pages` are those that the catalog takes or may take. An lmdb tier, whose maps are
        of one size, makes room for a catalog that outgrew its share only, and for the leaves of
        its records.
        """
        catalog_pages = self.units.whole(catalog_pages)
        if self.is_file:
            misc_pages = _misc_pages(self.rank_count, self.units, is_file=True)
            return max(0, capacity_bytes // PAGE_BYTES - misc_pages - catalog_pages)
        excess_pages = max(0, catalog_pages - self.catalog_pages_max(capacity_bytes))
        leaf_pages = int(record_count * _LMDB_LEAF_PAGES_PER_RECORD) + 1
        return max(0, (self.payload_fill_pages - leaf_pages) * self.rank_count - excess_pages)

    def catalog_pages_max(self, capacity_bytes: int) -> int:
        """Return the pages that a catalog may take, whatever its records are."""
        share_bytes = (
            max(capacity_bytes // _CATALOG_SHARE, _CATALOG_BYTES_MIN)
            if self.is_file
            else _lmdb_catalog_bytes(capacity_bytes)
        )
        return self.units.whole(share_bytes // PAGE_BYTES)

    def segment_pages(self, capacity_bytes: int, owner_count: int, stride_pages: int) -> int:
        """Return the pages of a new segment on one rank; for LMDB only a range of addresses.

        Whole records with a header page each, so that no arrangement wastes the tail.
        """
        if not self.is_file:
            return _LMDB_SEGMENT_PAGES
        wanted = self.share_pages(capacity_bytes, owner_count)
        if self.unit_pages > 1:
            wanted = max(wanted, stride_pages + 1, _SEGMENT_UNITS_MIN * self.unit_pages)
            return self.units.whole(wanted)
        return self.units.whole(max(1, wanted // (stride_pages + 1)) * (stride_pages + 1))

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


def segment_overhead_pages(segment_pages: int, units: BlockUnits = PAGE_UNITS) -> int:
    """Return what a file system may spend on a segment that was punched full of holes."""
    return units.table_pages(segment_pages)


def _misc_pages(rank_count: int, units: BlockUnits, *, is_file: bool) -> int:
    """Return the pages of directories and small files."""
    pages = (_MISC_BYTES + rank_count * _MISC_BYTES_PER_RANK) // PAGE_BYTES
    folder_count = _FOLDER_COUNT + rank_count * (1 if is_file else 2)
    file_count = _FILE_COUNT + rank_count * (0 if is_file else _FILE_COUNT_PER_RANK)
    if units.metadata_pages > 1:
        pages += folder_count * units.metadata_pages
    if units.unit_pages > 1:
        pages += file_count * units.unit_pages
    return pages


def _least_bytes(
    config: SecondaryConfig, strides: set[int], rank_count: int, units: BlockUnits
) -> int:
    """Return a capacity that is large enough: the configured one, or the least that is."""
    needed_pages = _needed_pages(config, strides, units)
    least_bytes = config.capacity_bytes
    while True:
        payload_pages = _payload_pages(config, least_bytes, rank_count, units)
        missing_pages = needed_pages - _space_pages(config, payload_pages, strides)
        if missing_pages <= 0:
            return least_bytes
        least_bytes += missing_pages * PAGE_BYTES * rank_count


def _payload_pages(
    config: SecondaryConfig, capacity_bytes: int, rank_count: int, units: BlockUnits
) -> int:
    """Return the pages of one rank that payload may have; none if they are less."""
    is_file = config.backend != "lmdb"
    catalog_bytes = _CATALOG_BYTES_MIN if is_file else _lmdb_catalog_bytes(capacity_bytes)
    pages = capacity_bytes // PAGE_BYTES - _misc_pages(rank_count, units, is_file=is_file)
    pages -= units.whole(-(-catalog_bytes // PAGE_BYTES))
    pages = max(0, pages) // rank_count
    if is_file:
        return pages
    if not (units.is_paged and units.allocates):
        pages = max(0, pages - units.table_pages(pages))
    return pages // units.unit_pages * units.unit_pages


def _space_pages(config: SecondaryConfig, payload_pages: int, strides: set[int]) -> int:
    """Return the pages of one rank that records can reliably have."""
    if config.backend != "lmdb":
        return payload_pages
    fill = _LMDB_FILL_ONE_SIZE if len(strides) == 1 else _LMDB_FILL_MIXED
    slack_pages = _LMDB_SLACK_RECORDS * max(strides) if len(strides) > 1 else 0
    return max(0, int(payload_pages * fill) - slack_pages)


def _needed_pages(config: SecondaryConfig, strides: set[int], units: BlockUnits) -> int:
    """Return the pages of one rank with which a tier of these records can work."""
    if config.backend == "lmdb":
        return 4 * max(strides)
    record_pages = max(strides) + 1
    if units.is_paged:
        return record_pages + segment_overhead_pages(record_pages, units)
    # One that is filled, one that leaves, one ahead; a unit may be shared with neighbours.
    segment_pages = units.whole(record_pages) + (units.unit_pages if units.unit_pages > 1 else 0)
    overhead_pages = segment_overhead_pages(_SEGMENT_UNITS_MIN * segment_pages, units)
    return 3 * segment_pages + 2 * overhead_pages


def _unit_text(units: BlockUnits) -> str:
    if units.unit_pages == 1:
        return ""
    return (
        f" on a file system that gives out {units.unit_pages * PAGE_BYTES} bytes at once, to every "
        "small file too"
    )


def _lmdb_catalog_bytes(capacity_bytes: int) -> int:
    extra = min(capacity_bytes // _LMDB_CATALOG_SHARE_SMALL, _LMDB_CATALOG_EXTRA_BYTES_MAX)
    return max(_CATALOG_BYTES_MIN, capacity_bytes // _LMDB_CATALOG_SHARE + extra)


def _strides(config: SecondaryConfig, manifest: Manifest) -> set[int]:
    sizes = [manifest.chunk_bytes(group_idx) for group_idx in range(len(manifest.groups))]
    return {_stride_pages(size, config.backend) for size in sizes if size} or {1}


def _stride_pages(payload_bytes: int, backend: str) -> int:
    if backend == "lmdb":
        payload_bytes = lmdb_body_bytes(payload_bytes) + _LMDB_PAGE_HEADER_BYTES
    return -(-payload_bytes // PAGE_BYTES)
