"""Rows of one database within one write transaction: read once, changed in place, written once."""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from tierstore.catalog.rows import ExtentRow, SegmentRow
from tierstore.lmdb_env.library import Database, Transaction

__all__ = ["CachedRows"]

RowT = TypeVar("RowT", SegmentRow, ExtentRow)


class CachedRows(Generic[RowT]):
    """The rows that a transaction has looked at, by number."""

    def __init__(
        self,
        txn: Transaction,
        database: Database,
        pack_key: Callable[[int], bytes],
        unpack: Callable[[bytes], RowT],
    ) -> None:
        self._txn = txn
        self._database = database
        self._pack_key = pack_key
        self._unpack: Callable[[bytes], RowT] = unpack
        self._rows: dict[int, RowT | None] = {}

    @property
    def rows(self) -> Mapping[int, RowT | None]:
        """What was looked at so far; None: there is no such row, or it was removed."""
        return self._rows

    def find(self, number: int) -> RowT | None:
        """Return a row, to be changed in place; None: there is none."""
        if number not in self._rows:
            value = self._txn.get(self._pack_key(number), db=self._database)
            self._rows[number] = None if value is None else self._unpack(value)
        return self._rows[number]

    def put(self, number: int, row: RowT) -> None:
        """Add a row, or replace it."""
        self._rows[number] = row

    def remove(self, number: int) -> None:
        """Remove a row."""
        self._rows[number] = None

    def flush(self) -> None:
        """Write what differs from the stored rows into the transaction."""
        for number, row in self._rows.items():
            key = self._pack_key(number)
            if row is None:
                self._txn.delete(key, db=self._database)
                continue
            value = row.pack()
            if value != self._txn.get(key, db=self._database):
                self._txn.put(key, value, db=self._database)
