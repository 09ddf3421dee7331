"""Which records are garbage: those of a namespace in segments older than its floor.

Forgetting a namespace sets its floor, whatever it holds; the rows go later, in small steps.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tierstore.catalog.rows import (
    Databases,
    RowArray,
    number_value,
    parse_number,
)
from tierstore.key import NAMESPACE_BYTES, Namespace
from tierstore.lmdb_env.library import Transaction

__all__ = ["Floors"]

_SEGMENT = slice(0, 4)
"""Where a place, and so a record row, names its segment."""


class Floors:
    """The floors as a transaction finds them; usually there are none, which costs one look."""

    def __init__(self, txn: Transaction, databases: Databases) -> None:
        self._txn = txn
        self._database = databases.floors
        with txn.cursor(db=databases.floors) as cursor:
            self._floors = {bytes(key): parse_number(value) for key, value in cursor.iternext()}

    def __bool__(self) -> bool:
        return bool(self._floors)

    def all(self) -> dict[Namespace, int]:
        """Return the floor of each namespace that has one."""
        return {Namespace(namespace): floor for namespace, floor in self._floors.items()}

    def of(self, namespace: bytes) -> int:
        """Return the first segment whose records of a namespace live; 0: all of them do."""
        return self._floors.get(namespace, 0)

    def raise_to(self, namespace: bytes, segment: int) -> None:
        """Make garbage of the records of a namespace in segments below `segment`."""
        self._floors[namespace] = segment
        self._txn.put(namespace, number_value(segment), db=self._database)

    def remove(self, namespace: bytes) -> None:
        """Forget a floor: no record lies below it any more."""
        del self._floors[namespace]
        self._txn.delete(namespace, db=self._database)

    def hide(self, key: bytes, value: bytes) -> bool:
        """Return whether a record row is garbage."""
        return parse_number(value[_SEGMENT]) < self.of(key[:NAMESPACE_BYTES])

    def living(self, keys: Sequence[bytes], records: RowArray) -> npt.NDArray[np.bool_]:
        """Return of each record whether it is none."""
        floors = np.array([self.of(key[:NAMESPACE_BYTES]) for key in keys], np.int64)
        living: npt.NDArray[np.bool_] = records["place"]["segment"] >= floors
        return living
