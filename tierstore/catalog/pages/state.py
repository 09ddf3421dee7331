"""The state row of a catalog, read and written. There is one."""

from tierstore.catalog.rows import Databases, StateRow
from tierstore.errors import CatalogDamagedError
from tierstore.lmdb_env.library import Transaction

__all__ = ["find_state", "read_state", "read_version", "write_state"]

_KEY = b"state"


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
