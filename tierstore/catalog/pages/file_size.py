"""How large the file of a catalog is, how much of it the rows explain, and why it grows.

Pages are counted again when rows have come or gone: that takes a call of the library per database,
so that a transaction does not do it each time.
"""

from dataclasses import replace

from tierstore.catalog.pages.budget import GROWTH_PAGES, Budget, CatalogSize, count_live_pages
from tierstore.catalog.rows import Databases, StateRow
from tierstore.layout import PAGE_BYTES
from tierstore.lmdb_env.env import LmdbEnv
from tierstore.lmdb_env.library import Transaction

__all__ = ["FileSize"]

_UNCOUNTED_ROWS_MAX = 8
"""Groups and pending rows that may come before the pages of all rows are counted again. Each group
is a cluster that was written, of up to three pages."""

_UNCOUNTED_EVICTIONS_MAX = 256

_STALE_TRANSACTIONS = 4
"""A reader whose snapshot is older by so many transactions has stopped; others end before."""


class FileSize:
    """The size of one catalog's file, as this process has measured it last."""

    def __init__(self, env: LmdbEnv, databases: Databases) -> None:
        self._env = env
        self._databases = databases
        self._map_pages = env.map_bytes() // PAGE_BYTES
        self._last: CatalogSize | None = None
        self._grown_count = 0
        self._evicted_count = 0
        self._needed_pages = 0
        self._is_over = False
        self._settled_pages = self.file_pages()

    def file_pages(self) -> int:
        """Return the pages that the file has reached."""
        return self._env.used_bytes() // PAGE_BYTES

    def count(self, txn: Transaction) -> CatalogSize:
        """Count the pages of all rows, as a transaction sees them."""
        return CatalogSize(
            live_pages=count_live_pages(txn, self._databases),
            file_pages=self.file_pages(),
            map_pages=self._map_pages,
        )

    def recount(self, txn: Transaction, state: StateRow, *, is_known: bool) -> CatalogSize:
        """Return the size for a write transaction, as it was counted last if little has changed.

        `is_known`: nobody else has written since this process did.
        """
        grown_count = state.next_sequence + state.next_pending
        last = self._last
        if (
            last is None
            or not is_known
            or self._is_over
            or grown_count > self._grown_count + _UNCOUNTED_ROWS_MAX
            or state.evicted_count > self._evicted_count + _UNCOUNTED_EVICTIONS_MAX
        ):
            self._grown_count, self._evicted_count = grown_count, state.evicted_count
            last = self._last = self.count(txn)
        else:
            last = replace(last, file_pages=self.file_pages())
        return last

    def note(self, budget: Budget) -> None:
        """Note what a write transaction was allowed, after it."""
        self._needed_pages = budget.needed_pages
        self._is_over = budget.is_catalog_over

    def is_outgrowing(self) -> bool:
        """Return whether the file grows because a stopped reader keeps freed pages from reuse.

        Another process may have been stopped within a read transaction. Each write makes the file
        larger then, and a file never shrinks: only what is necessary may be written.
        """
        file_pages = self.file_pages()
        # Early enough for the necessary writes to fit into what is charged in any case: they write
        # shards of the index again.
        if file_pages <= max(self._needed_pages - 4 * GROWTH_PAGES, self._settled_pages):
            return False
        self._env.forget_dead_readers()
        if self._env.reader_lag() >= _STALE_TRANSACTIONS:
            return True
        self._settled_pages = file_pages
        return False
