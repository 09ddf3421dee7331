"""The state row of a catalog, read and written; there is one. And what outlives a transaction."""

from collections.abc import Mapping
from dataclasses import dataclass

from tierstore.catalog.rows import Databases, OwnerRow, StateRow
from tierstore.errors import CatalogDamagedError
from tierstore.lmdb_env.library import Transaction

__all__ = ["LastWrite", "find_state", "read_state", "read_version", "write_state"]

_KEY = b"state"


@dataclass(frozen=True, slots=True)
class LastWrite:
    """Rows as the last write transaction of this process left them.

    They need not be read again if nobody else has written since. Each call of the library gives
    the interpreter away, and what is in memory does not.
    """

    number: int
    """Of the transaction. The next one has the next number if no other came between."""
    state: bytes
    owners: Mapping[int, OwnerRow]
    floors: Mapping[bytes, int]
    segments: Mapping[int, bytes]

    def is_last_before(self, txn: Transaction) -> bool:
        """Return whether a write transaction finds the rows as this one left them."""
        return int(txn.id()) == self.number + 1


def write_state(txn: Transaction, databases: Databases, state: StateRow) -> None:
    """Store the state row."""
    txn.put(_KEY, state.pack(), db=databases.state)


def find_state(txn: Transaction, databases: Databases) -> StateRow | None:
    """Return the state row; None in a new catalog.

    Raises:
        CatalogDamagedError: it is damaged.
    """
    value = txn.get(_KEY, db=databases.state)
    return None if value is None else StateRow.unpack(value)


def read_state(txn: Transaction, databases: Databases) -> StateRow:
    """Return the state row of a catalog that has been opened.

    Raises:
        CatalogDamagedError: it is missing or damaged.
    """
    state = find_state(txn, databases)
    if state is None:
        raise CatalogDamagedError("the state row is missing")
    return state


def read_version(txn: Transaction, databases: Databases) -> int | None:
    """Return the version of the rows, the first field in every version; None in a new catalog.

    Raises:
        CatalogDamagedError: the row is of this version, and says another one.
    """
    value = txn.get(_KEY, db=databases.state)
    return None if value is None else StateRow.read_version(value)
