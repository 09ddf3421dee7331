"""Which pages of a segment were freed, where the file system takes back whole units of pages.

|<------- unit 0 ------->|<------- unit 1 ------->|
| record A | freed       | freed                  |    unit 1 goes, unit 0 waits for A
"""

import numpy as np

from tierstore.catalog.pages.extents import coalesce
from tierstore.catalog.rows import (
    RUN_DTYPE,
    Databases,
    RowArray,
    extent_key,
    number_value,
    parse_number,
    wide_key,
)
from tierstore.errors import CatalogDamagedError
from tierstore.lmdb_env.library import Transaction

__all__ = ["FreedUnits"]


class FreedUnits:
    """The `units` database within one write transaction."""

    def __init__(self, txn: Transaction, databases: Databases, unit_pages: int) -> None:
        """`unit_pages` go together; 0: a segment gives back nothing but all of it."""
        self._txn = txn
        self._database = databases.units
        self._unit_pages = unit_pages

    def free(self, runs: RowArray) -> RowArray:
        """Note pages that were freed; return the runs that can be given back.

        Raises:
            CatalogDamagedError: pages were freed twice.
        """
        if self._unit_pages == 1:
            return runs
        whole = []
        if self._unit_pages:
            for segment, first_page, page_count in coalesce(runs).tolist():
                whole += [
                    (segment, unit * self._unit_pages, self._unit_pages)
                    for unit in self._free_run(segment, first_page, first_page + page_count)
                ]
        return np.array(whole, RUN_DTYPE)

    def drop(self, segment: int) -> None:
        """Forget a segment: all of it is given back."""
        if self._unit_pages == 1:
            return
        with self._txn.cursor(db=self._database) as cursor:
            found = cursor.set_range(wide_key(extent_key(segment, 0)))
            while found and int.from_bytes(cursor.key(), "big") >> 32 == segment:
                found = cursor.delete() and bool(cursor.key())

    def _free_run(self, segment: int, first_page: int, end_page: int) -> list[int]:
        """Return the units of a segment of which a run was the last that they held."""
        unit_pages = self._unit_pages
        whole = []
        for unit in range(first_page // unit_pages, -(-end_page // unit_pages)):
            first = max(first_page, unit * unit_pages)
            count = min(end_page, (unit + 1) * unit_pages) - first
            key = wide_key(extent_key(segment, unit))
            stored = None
            if count < unit_pages:
                stored = self._txn.get(key, db=self._database)
                count += 0 if stored is None else parse_number(stored)
            if count > unit_pages:
                raise CatalogDamagedError(f"segment {segment} frees a page twice")
            if count < unit_pages:
                self._txn.put(key, number_value(count), db=self._database)
            else:
                whole.append(unit)
                if stored is not None:
                    self._txn.delete(key, db=self._database)
        return whole
