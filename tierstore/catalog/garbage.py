"""Records of forgotten namespaces: which they are, and how their rows are removed.

A namespace has a floor: its records in older segments are garbage. Forgetting a namespace raises
its floor, whatever it holds, so that a reset is one short transaction. The rows go later, a few
hundred at a time: first the records, namespace by namespace, then the extents of segments that are
dead or gone, with their rows of the order. A floor with no record below it goes last. A pass that
does not end, since its process did, is begun again by the next one to open the path.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierstore.catalog.pages.extent_row import ExtentRow
from tierstore.catalog.pages.order import Order, Victims, extent_keys
from tierstore.catalog.rows import (
    Databases,
    RowArray,
    SegmentRow,
    SegmentState,
    decode_records,
    extent_key,
    number_value,
    parse_number,
    segment_key,
    wide_key,
)
from tierstore.key import NAMESPACE_BYTES, Namespace
from tierstore.lmdb_env.library import Transaction

__all__ = ["SWEEP_ROWS_MAX", "Floors", "Sweep", "drop_garbage"]

SWEEP_ROWS_MAX = 256
"""Rows that one step looks at: the write lock of all processes is held meanwhile."""

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
        """Forget a floor that no record lies below."""
        del self._floors[namespace]
        self._txn.delete(namespace, db=self._database)

    def hide(self, key: bytes, value: bytes) -> bool:
        """Return whether a record row is garbage."""
        return self.hides(key, parse_number(value[_SEGMENT]))

    def hides(self, key: bytes, segment: int) -> bool:
        """Return whether a record in a segment is garbage."""
        return segment < self.of(key[:NAMESPACE_BYTES])

    def living(self, keys: Sequence[bytes], records: RowArray) -> npt.NDArray[np.bool_]:
        """Return of each record whether it lives."""
        floors = np.array([self.of(key[:NAMESPACE_BYTES]) for key in keys], np.int64)
        living: npt.NDArray[np.bool_] = records["segment"] >= floors
        return living


@dataclass(slots=True)
class Sweep:
    """One pass, and how far it has come; a step that is rolled back is to be repeated."""

    floors: dict[Namespace, int]
    """As they were when the pass began."""
    key: bytes = b""
    """Records before it are swept."""
    extent: int = 0
    """Extents before it are swept, all records being so."""
    is_in_extents: bool = False
    is_over: bool = False

    def step(self, txn: Transaction, databases: Databases, floors: Floors, order: Order) -> "Sweep":
        """Remove some garbage; return the pass as it stands then."""
        if not self.is_in_extents:
            return self._sweep_records(txn, databases)
        return self._sweep_extents(txn, databases, floors, order)

    def _sweep_records(self, txn: Transaction, databases: Databases) -> "Sweep":
        behind = [namespace for namespace in sorted(self.floors) if namespace >= self.key[:8]]
        if not behind:
            return Sweep(self.floors, is_in_extents=True)
        namespace = behind[0]
        keys: list[bytes] = []
        values: list[bytes] = []
        with txn.cursor(db=databases.records) as cursor:
            found = cursor.set_range(max(self.key, namespace))
            while found and len(keys) < SWEEP_ROWS_MAX:
                if cursor.key()[:NAMESPACE_BYTES] != namespace:
                    break
                keys.append(cursor.key())
                values.append(cursor.value())
                found = cursor.next()
        records = decode_records(values)
        for key, segment in zip(keys, records["segment"].tolist(), strict=True):
            if segment < self.floors[namespace]:
                txn.delete(key, db=databases.records)
        if len(keys) == SWEEP_ROWS_MAX:
            return Sweep(self.floors, keys[-1] + b"\0")
        following = int.from_bytes(namespace, "big") + 1
        if following >> (8 * NAMESPACE_BYTES):
            return Sweep(self.floors, is_in_extents=True)
        return Sweep(self.floors, following.to_bytes(NAMESPACE_BYTES, "big"))

    def _sweep_extents(
        self, txn: Transaction, databases: Databases, floors: Floors, order: Order
    ) -> "Sweep":
        at = self.extent
        with txn.cursor(db=databases.extents) as cursor:
            for _ in range(SWEEP_ROWS_MAX):
                if not cursor.set_range(wide_key(at)):
                    self._end(floors)
                    return Sweep(self.floors, is_in_extents=True, is_over=True)
                at = int.from_bytes(cursor.key(), "big")
                value = txn.get(segment_key(at >> 32), db=databases.segments)
                if value is None or SegmentRow.unpack(value).state == SegmentState.DEAD:
                    row = ExtentRow.unpack(cursor.value())
                    cursor.delete()
                    order.discard(at, row)
                else:
                    at = extent_key((at >> 32) + 1, 0)
        return Sweep(self.floors, extent=at, is_in_extents=True)

    def _end(self, floors: Floors) -> None:
        for namespace, floor in floors.all().items():
            if self.floors.get(namespace) == floor:  # not raised meanwhile
                floors.remove(namespace)


def drop_garbage(txn: Transaction, databases: Databases, group: Victims) -> None:
    """Remove the rows of records that are garbage, except those that are younger records' by now.

    Raises:
        CatalogDamagedError: a row is damaged.
    """
    for key, index in zip(group.keys, group.indices, strict=True):
        value = txn.get(key, db=databases.records)
        if value is not None:
            place = decode_records([value])
            if extent_keys(place)[0] == group.extent and place["index"][0] == index:
                txn.delete(key, db=databases.records)
