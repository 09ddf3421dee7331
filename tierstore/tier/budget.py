"""What a tier may hold just now: its capacity, less what the catalog itself takes.

The catalog's file never shrinks, and a transaction writes to copies of pages: what the last two
freed cannot be used again yet. So a catalog is charged what its file has, and at least what its
living pages may need.

    |<------ live ------>|<---- copies ---->|<- growth ->|      needed
    |<------------- file ------------->|<- growth ->|           had
"""

from dataclasses import dataclass
from typing import Self

from tierstore.geometry import SpaceGeometry
from tierstore.lmdb_env import Database, Transaction
from tierstore.tier.catalog_schema import Databases, OwnerRow, StateRow

__all__ = ["GROWTH_PAGES", "Budget", "read_owners"]

GROWTH_PAGES = 32
"""By which a file may outgrow what is known of it until that is measured again."""

_COPIES_PAGES_MAX = 4096
"""Two transactions of 512 records in random order, and a third part for good measure."""
_MARGIN_PAGES = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of one write transaction, measured when it began."""

    capacity_bytes: int
    """The smallest that any owner was promised."""
    owner_count: int
    needed_pages: int
    """Pages that explain a file of this size: living ones, and copies of them."""
    catalog_pages: int
    """What is charged for the catalog."""
    space_pages: int
    """What the pages charged for payload, on all ranks, may sum up to."""
    is_catalog_over: bool
    """The rows need more than a catalog may have."""

    @classmethod
    def measure(
        cls,
        txn: Transaction,
        databases: Databases,
        geometry: SpaceGeometry,
        state: StateRow,
        *,
        file_pages: int,
        map_pages: int,
    ) -> Self:
        """Measure within a transaction; `file_pages` is what the file has, of `map_pages`."""
        owners = read_owners(txn, databases)
        capacities = [row.capacity_bytes for row in owners.values()]
        capacity_bytes = min(capacities, default=geometry.capacity_bytes)
        live_pages = _page_count(txn) + sum(_page_count(txn, db) for db in databases.all())
        needed_pages = live_pages + min(2 * live_pages, _COPIES_PAGES_MAX) + _MARGIN_PAGES
        catalog_pages = max(file_pages, needed_pages) + GROWTH_PAGES
        return cls(
            capacity_bytes=capacity_bytes,
            owner_count=len(owners),
            needed_pages=needed_pages,
            catalog_pages=catalog_pages,
            space_pages=geometry.payload_pages(capacity_bytes, catalog_pages, state.record_count),
            is_catalog_over=needed_pages
            > min(geometry.catalog_pages_max(capacity_bytes), map_pages),
        )


def read_owners(txn: Transaction, databases: Databases) -> dict[int, OwnerRow]:
    """Return who has the path open, as far as nobody has noticed his death."""
    with txn.cursor(db=databases.owners) as cursor:
        return {int.from_bytes(key, "big"): OwnerRow.unpack(value) for key, value in cursor}


def _page_count(txn: Transaction, database: Database | None = None) -> int:
    stat = txn.stat(db=database)
    return stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
