"""Records of forgotten namespaces: which they are, and how their rows are removed.

A namespace has a floor: its records in older segments are garbage. Forgetting a namespace raises
its floor, whatever it holds, so that a reset is one short transaction. The rows go later, a few
hundred at a time: the clusters of segments that are dead or gone, with their rows of the order and
of records. When none is left, the floors go. A pass that does not end, since its process did, is
begun again by the next one to open the path.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tierstore.catalog.pages.cluster_row import ClusterRow, indices_of
from tierstore.catalog.pages.order import Order
from tierstore.catalog.rows import (
    Databases,
    SegmentRow,
    SegmentState,
    extent_key,
    number_value,
    parse_number,
    segment_key,
    wide_key,
)
from tierstore.key import NAMESPACE_BYTES, Namespace
from tierstore.lmdb_env.library import Transaction

__all__ = ["SWEEP_ROWS_MAX", "Floors", "Sweep"]

SWEEP_ROWS_MAX = 256
"""Rows that one step removes: the write lock of all processes is held meanwhile."""


class Floors:
    """The floors as a transaction finds them; usually there are none, which costs one look."""

    def __init__(
        self, txn: Transaction, databases: Databases, known: Mapping[bytes, int] | None = None
    ) -> None:
        """Read them, unless they are `known`."""
        self._txn = txn
        self._database = databases.floors
        if known is not None:
            self._floors = dict(known)
            return
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

    def hides(self, key: bytes, segment: int) -> bool:
        """Return whether a record in a segment is garbage."""
        return segment < self.of(key[:NAMESPACE_BYTES])


@dataclass(slots=True)
class Sweep:
    """One pass, and how far it has come; a step that is rolled back is to be repeated."""

    floors: dict[Namespace, int]
    """As they were when the pass began."""
    cluster: int = 0
    """Clusters before it are swept."""
    is_over: bool = False

    def step(
        self,
        txn: Transaction,
        databases: Databases,
        floors: Floors,
        order: Order,
        remove_records: Callable[[int, Sequence[bytes]], None],
    ) -> "Sweep":
        """Remove some garbage; return the pass as it stands then.

        `remove_records` removes what leads from these keys to a cluster.
        """
        at, row_count = self.cluster, 0
        with txn.cursor(db=databases.clusters) as cursor:
            while row_count < SWEEP_ROWS_MAX:
                if not cursor.set_range(wide_key(at)):
                    self._end(floors)
                    return Sweep(self.floors, is_over=True)
                at = int.from_bytes(cursor.key(), "big")
                value = txn.get(segment_key(at >> 32), db=databases.segments)
                row_count += 1
                if value is not None and SegmentRow.unpack(value).state != SegmentState.DEAD:
                    at = extent_key((at >> 32) + 1, 0)
                    continue
                row = ClusterRow.unpack(cursor.value())
                cursor.delete()
                order.discard(at, row)
                keys = row.keys()
                living = [keys[index] for index in indices_of(row.live_bits)]
                remove_records(at, living)
                row_count += len(living)
        return Sweep(self.floors, at)

    def _end(self, floors: Floors) -> None:
        for namespace, floor in floors.all().items():
            if self.floors.get(namespace) == floor:  # not raised meanwhile
                floors.remove(namespace)
