"""Rows of pages that are being written or released: what recovery needs after a kill."""

from tierstore.catalog.rows import Databases, PendingRow, StateRow, wide_key
from tierstore.lmdb_env.library import Transaction

__all__ = ["PendingRows"]


class PendingRows:
    """The `pending` database within one write transaction."""

    def __init__(self, txn: Transaction, databases: Databases, state: StateRow) -> None:
        self._txn = txn
        self._database = databases.pending
        self._state = state

    def add(self, row: PendingRow) -> int:
        """Store a row; return its id."""
        pending_id = self._state.next_pending
        self._state.next_pending += 1
        self.put(pending_id, row)
        return pending_id

    def put(self, pending_id: int, row: PendingRow) -> None:
        """Store a row under its id."""
        self._txn.put(wide_key(pending_id), row.pack(), db=self._database)

    def find(self, pending_id: int) -> PendingRow | None:
        """Return a row, if there is one."""
        value = self._txn.get(wide_key(pending_id), db=self._database)
        return None if value is None else PendingRow.unpack(value)

    def remove(self, pending_id: int) -> bool:
        """Forget a row; return whether there was one."""
        return self._txn.delete(wide_key(pending_id), db=self._database)

    def all(self) -> list[tuple[int, PendingRow]]:
        """Return all rows, of all owners."""
        with self._txn.cursor(db=self._database) as cursor:
            return [(int.from_bytes(key, "big"), PendingRow.unpack(value)) for key, value in cursor]
