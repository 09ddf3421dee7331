"""How large the file of a catalog is, how much of it the rows explain, and why it grows.

Pages are counted again when the file or the number of rows has changed: counting costs as much as
a few records, so that a transaction does not do it each time.
"""

from tierstore.catalog.pages.budget import GROWTH_PAGES, CatalogSize, count_live_pages
from tierstore.catalog.rows import Databases
from tierstore.layout import PAGE_BYTES
from tierstore.lmdb_env.env import LmdbEnv
from tierstore.lmdb_env.library import Transaction

__all__ = ["FileSize"]

_UNCOUNTED_ROWS_MAX = 128
"""Records that come or go before the pages of all rows are counted again."""

_MANIFEST_ROWS = 2 * _UNCOUNTED_ROWS_MAX
"""A manifest may have pages of its own: as many rows as to count again whenever one goes."""

_STALE_TRANSACTIONS = 4
"""A reader whose snapshot is older by so many transactions has stopped; others end before."""


class FileSize:
    """The size of one catalog's file, as this process has measured it last."""

    def __init__(self, env: LmdbEnv, databases: Databases) -> None:
        self._env = env
        self._databases = databases
        self._map_pages = env.map_bytes() // PAGE_BYTES
        self._last: CatalogSize | None = None
        self._counted_rows = 0
        self._needed_pages = 0
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

    def recount(self, txn: Transaction) -> CatalogSize:
        """Return the size for a write transaction, as it was counted last if little has changed."""
        row_count = int(txn.stat(db=self._databases.records)["entries"])
        row_count += _MANIFEST_ROWS * int(txn.stat(db=self._databases.namespaces)["entries"])
        grown_count = abs(row_count - self._counted_rows)
        last = self._last
        if (
            last is None
            or last.file_pages != self.file_pages()
            or grown_count > _UNCOUNTED_ROWS_MAX
        ):
            last = self._last = self.count(txn)
            self._counted_rows = row_count
        return last

    def note_needed(self, pages: int) -> None:
        """Note the pages that the rows explain, after a write transaction."""
        self._needed_pages = pages

    def is_outgrowing(self) -> bool:
        """Return whether the file grows because a stopped reader keeps freed pages from reuse.

        Another process may have been stopped within a read transaction. Each write makes the file
        larger then, and a file never shrinks: only what is necessary may be written.
        """
        file_pages = self.file_pages()
        # Early enough for the necessary writes to fit into what is charged in any case.
        if file_pages <= max(self._needed_pages - 2 * GROWTH_PAGES, self._settled_pages):
            return False
        self._env.forget_dead_readers()
        if self._env.reader_lag() >= _STALE_TRANSACTIONS:
            return True
        self._settled_pages = file_pages
        return False
