"""Rows of one database within one write transaction: read once, changed in place, written once."""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from tierstore.catalog.pages.cluster_row import ClusterRow
from tierstore.catalog.rows import SegmentRow
from tierstore.errors import CatalogDamagedError
from tierstore.lmdb_env.library import Database, Transaction

__all__ = ["CachedRows"]

RowT = TypeVar("RowT", SegmentRow, ClusterRow)

_NOTHING: Mapping[int, bytes] = {}


class CachedRows(Generic[RowT]):
    """The rows that a transaction has looked at, by number."""

    def __init__(
        self,
        txn: Transaction,
        database: Database,
        pack_key: Callable[[int], bytes],
        unpack: Callable[[bytes], RowT],
        known: Mapping[int, bytes] = _NOTHING,
    ) -> None:
        """`known` are values that were stored before, and have not changed."""
        self._txn = txn
        self._database = database
        self._pack_key = pack_key
        self._unpack: Callable[[bytes], RowT] = unpack
        self._rows: dict[int, RowT | None] = {}
        self._stored: dict[int, bytes] = dict(known)

    @property
    def rows(self) -> Mapping[int, RowT | None]:
        """What was looked at so far; None: there is no such row, or it was removed."""
        return self._rows

    def find(self, number: int) -> RowT | None:
        """Return a row, to be changed in place; None: there is none."""
        if number not in self._rows:
            value = self._stored.get(number)
            if value is None:
                value = self._txn.get(self._pack_key(number), db=self._database)
                if value is not None:
                    self._stored[number] = value
            self._rows[number] = None if value is None else self._unpack(value)
        return self._rows[number]

    def row(self, number: int) -> RowT:
        """Return a row, to be changed in place.

        Raises:
            CatalogDamagedError: there is none.
        """
        row = self.find(number)
        if row is None:
            raise CatalogDamagedError(f"row {number:#x} is unknown")
        return row

    def put(self, number: int, row: RowT) -> None:
        """Add a row, or replace it."""
        self._rows[number] = row

    def remove(self, number: int) -> None:
        """Remove a row."""
        self._rows[number] = None

    def discard(self, number: int) -> None:
        """Forget a row that the caller has removed from the transaction."""
        self._stored.pop(number, None)
        self._rows[number] = None

    @property
    def stored(self) -> Mapping[int, bytes]:
        """The values that are known to be stored."""
        return self._stored

    def flush(self) -> None:
        """Write what differs from the stored rows into the transaction."""
        for number, row in self._rows.items():
            stored = self._stored.get(number)
            value = None if row is None else row.pack()
            if value == stored:
                continue
            key = self._pack_key(number)
            if value is None:
                self._txn.delete(key, db=self._database)
                del self._stored[number]
            else:
                self._txn.put(key, value, db=self._database)
                self._stored[number] = value
