"""What a tier may hold just now: its capacity, less what the catalog itself takes.

The catalog's file never shrinks, and a transaction writes to copies of pages: what the last two
freed cannot be used again yet. So a catalog is charged what its file has, and at least what its
living pages may need. Whoever charges payload leaves a margin for what the rows grow until they are
measured again.

    |<------ live ------>|<---- copies ---->|<- margin, growth ->|
    |<------------- file ------------->|<- margin, growth ->|
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from tierstore.catalog.rows import Databases, OwnerRow, StateRow
from tierstore.geometry import SpaceGeometry
from tierstore.layout import PAGE_BYTES
from tierstore.lmdb_env.library import Database, Transaction

__all__ = ["GROWTH_PAGES", "Budget", "CatalogSize", "count_live_pages", "read_owners"]

GROWTH_PAGES = 32
"""By which a file may outgrow what is known of it until that is measured again."""

_COPIES_PAGES_MAX = 4096
"""Two transactions of 512 records in random order, and a third of that as reserve."""
_MARGIN_PAGES = 96

_ROW_BYTES = 384
"""Of one record in all databases, of the longest key and in an extent of its own; leaves of rows
that come in random order are two thirds full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogSize:
    """Pages of a catalog's file."""

    live_pages: int
    """Those of its rows."""
    file_pages: int
    map_pages: int
    """What the file may grow to in this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of one write transaction, measured when it began."""

    capacity_bytes: int
    """The smallest that any living owner was promised."""
    owner_count: int
    needed_pages: int
    """Pages that explain a file of this size: living ones, and copies of them."""
    space_pages: int
    """What the pages charged for payload, on all ranks, may sum up to when more is charged."""
    space_pages_max: int
    """What they may ever sum up to: the catalog may have grown since they were charged."""
    is_catalog_over: bool
    """The rows need more than a catalog may have."""
    coming_pages: int
    """What the rows of all that is being written will need, with copies: it is charged."""

    @classmethod
    def measure(
        cls,
        geometry: SpaceGeometry,
        state: StateRow,
        owners: Mapping[int, OwnerRow],
        *,
        size: CatalogSize,
    ) -> Self:
        """Measure as of one transaction."""
        capacities = [row.capacity_bytes for row in owners.values()]
        capacity_bytes = min(capacities, default=geometry.capacity_bytes)
        copies_pages = min(2 * size.live_pages, _COPIES_PAGES_MAX)
        needed_pages = size.live_pages + copies_pages + _MARGIN_PAGES
        coming_pages = _coming_pages(state)
        charged_pages = max(size.file_pages, size.live_pages + copies_pages + coming_pages)
        reserved_pages = charged_pages + _MARGIN_PAGES + GROWTH_PAGES

        def payload_pages(catalog_pages: int) -> int:
            record_count = state.record_count + state.writing_count
            return geometry.payload_pages(capacity_bytes, catalog_pages, record_count)

        return cls(
            capacity_bytes=capacity_bytes,
            owner_count=len(owners),
            needed_pages=needed_pages,
            space_pages=payload_pages(reserved_pages),
            space_pages_max=payload_pages(charged_pages),
            is_catalog_over=needed_pages
            > min(geometry.catalog_pages_max(capacity_bytes), size.map_pages),
            coming_pages=coming_pages,
        )

    def free_pages(self, state: StateRow) -> int:
        """Return what more may be charged to `state` as it is now: less than none if too much is.

        Rows of what was given places since then are counted.
        """
        coming_pages = max(0, _coming_pages(state) - self.coming_pages)
        return self.space_pages - state.charged_pages - coming_pages


def count_live_pages(txn: Transaction, databases: Databases) -> int:
    """Return the pages of all rows."""
    return _page_count(txn) + sum(_page_count(txn, db) for db in databases.all())


def read_owners(txn: Transaction, databases: Databases) -> dict[int, OwnerRow]:
    """Return the owners of the path, dead ones included until their death is noticed."""
    with txn.cursor(db=databases.owners) as cursor:
        return {int.from_bytes(key, "big"): OwnerRow.unpack(value) for key, value in cursor}


def _coming_pages(state: StateRow) -> int:
    return 3 * -(-state.writing_count * _ROW_BYTES // PAGE_BYTES)


def _page_count(txn: Transaction, database: Database | None = None) -> int:
    stat = txn.stat(db=database)
    return stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
