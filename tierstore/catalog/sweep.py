"""Removes what lies below the floors, a few hundred rows at a time.

First the records, namespace by namespace, then the extents of segments that are dead or gone. A
floor that no record lies below goes at the end; if the process ends before that, the next one to
open the path starts again.
"""

from dataclasses import dataclass

from tierstore.catalog.floors import Floors
from tierstore.catalog.rows import (
    Databases,
    SegmentRow,
    SegmentState,
    decode_records,
    extent_key,
    segment_key,
    wide_key,
)
from tierstore.key import NAMESPACE_BYTES, Namespace
from tierstore.lmdb_env.library import Transaction

__all__ = ["SWEEP_ROWS_MAX", "Sweep"]

SWEEP_ROWS_MAX = 256
"""Rows that one step looks at: the write lock of all processes is held meanwhile."""


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

    def step(self, txn: Transaction, databases: Databases, floors: Floors) -> "Sweep":
        """Remove some garbage; return the pass as it stands then."""
        if not self.is_in_extents:
            return self._sweep_records(txn, databases)
        return self._sweep_extents(txn, databases, floors)

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
        segments, sequences = records["place"]["segment"].tolist(), records["sequence"].tolist()
        for key, segment, sequence in zip(keys, segments, sequences, strict=True):
            if segment < self.floors[namespace]:
                txn.delete(key, db=databases.records)
                txn.delete(wide_key(sequence), db=databases.order)
        if len(keys) == SWEEP_ROWS_MAX:
            return Sweep(self.floors, keys[-1] + b"\0")
        following = int.from_bytes(namespace, "big") + 1
        if following >> (8 * NAMESPACE_BYTES):
            return Sweep(self.floors, is_in_extents=True)
        return Sweep(self.floors, following.to_bytes(NAMESPACE_BYTES, "big"))

    def _sweep_extents(self, txn: Transaction, databases: Databases, floors: Floors) -> "Sweep":
        at = self.extent
        with txn.cursor(db=databases.extents) as cursor:
            for _ in range(SWEEP_ROWS_MAX):
                if not cursor.set_range(wide_key(at)):
                    self._end(floors)
                    return Sweep(self.floors, is_in_extents=True, is_over=True)
                at = int.from_bytes(cursor.key(), "big")
                value = txn.get(segment_key(at >> 32), db=databases.segments)
                if value is None or SegmentRow.unpack(value).state == SegmentState.DEAD:
                    cursor.delete()
                else:
                    at = extent_key((at >> 32) + 1, 0)
        return Sweep(self.floors, extent=at, is_in_extents=True)

    def _end(self, floors: Floors) -> None:
        for namespace, floor in floors.all().items():
            if self.floors.get(namespace) == floor:  # not raised meanwhile
                floors.remove(namespace)
