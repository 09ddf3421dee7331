"""The order of eviction: groups of records of one extent, the oldest group first.

    order    sequence -> extent              extents    extent -> groups: sequence -> records
             7        -> A                              A      -> 7: 0 1 . .   9: . . 2 3
             8        -> B                              B      -> 8: 0 1 2 3
             9        -> A

The records of one extent are mostly used one after the other, tail first. So a use of all of them
changes one row of the extent and two of the order, and no row of a record.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierstore.catalog.pages.extent_row import ExtentRow, indices_of
from tierstore.catalog.pages.extents import Extents
from tierstore.catalog.rows import Databases, RowArray, StateRow, wide_key
from tierstore.codec.record import EXTENT_RECORDS_MAX
from tierstore.errors import CatalogDamagedError
from tierstore.lmdb_env.library import Transaction

__all__ = ["Order", "Victims", "extent_keys"]


@dataclass(slots=True)
class Victims:
    """Records of one group that are to be evicted."""

    extent: int
    bits: int
    indices: list[int]
    keys: list[bytes]


class Order:
    """The `order` database, and the groups of extents, within one write transaction."""

    def __init__(
        self, txn: Transaction, databases: Databases, state: StateRow, extents: Extents
    ) -> None:
        self._txn = txn
        self._database = databases.order
        self._state = state
        self._extents = extents

    def enter(self, extent: int, row: ExtentRow, bits: int) -> None:
        """Add an extent of which these records live, as the youngest."""
        self._extents.put(extent, row)
        self._append(extent, row, bits)

    def touch(self, places: RowArray) -> None:
        """Make records the youngest, in order.

        Raises:
            CatalogDamagedError: the order and the extents contradict each other.
        """
        extents = extent_keys(places)
        indices = places["index"].astype(np.int64)
        # A run ends where another extent begins, or a record follows that its group would put
        # before this one.
        starts = np.ones(len(places), bool)
        starts[1:] = (extents[1:] != extents[:-1]) | (indices[1:] >= indices[:-1])
        firsts = np.flatnonzero(starts)
        runs_bits = np.add.reduceat(_bits(indices), firsts).tolist()
        for extent, bits in zip(extents[firsts].tolist(), runs_bits, strict=True):
            row = self._extents.row(extent)
            self._leave(row, bits)
            self._append(extent, row, bits)

    def remove(self, places: RowArray) -> list[int]:
        """Take records out; return the extents whose last record went.

        Raises:
            CatalogDamagedError: an extent is unknown, or a record does not live there.
        """
        bits_by_extent: dict[int, int] = {}
        bits = _bits(places["index"].astype(np.int64)).tolist()
        for extent, bit in zip(extent_keys(places).tolist(), bits, strict=True):
            known = bits_by_extent.get(extent, 0)
            if known & bit:
                raise CatalogDamagedError("two records share a place")
            bits_by_extent[extent] = known | bit
        return [extent for extent, bits in bits_by_extent.items() if self.take_out(extent, bits)]

    def take_out(self, extent: int, bits: int) -> bool:
        """Take records of one extent out; return whether the last one went.

        Raises:
            CatalogDamagedError: the extent is unknown, or one of them does not live there.
        """
        row = self._extents.row(extent)
        self._leave(row, bits)
        if row.groups:
            return False
        self._extents.remove(extent)
        return True

    def oldest(self, pins: Container[bytes]) -> Iterator[tuple[ExtentRow, Victims]]:
        """Iterate over the groups, the oldest first, without pinned records.

        Nothing may be changed meanwhile.

        Raises:
            CatalogDamagedError: the order names what there is not.
        """
        with self._txn.cursor(db=self._database) as cursor:
            for sequence, value in cursor.iternext():
                extent = int.from_bytes(value, "big")
                row = self._extents.find(extent)
                bits = 0 if row is None else row.groups.get(int.from_bytes(sequence, "big"), 0)
                if row is None or not bits:
                    raise CatalogDamagedError("the order names records that there are not")
                keys = row.keys()
                indices = [index for index in indices_of(bits) if keys[index] not in pins]
                yield row, Victims(extent, bits, indices, [keys[index] for index in indices])

    def discard(self, extent: int, row: ExtentRow) -> None:
        """Forget the groups of an extent whose row the caller has removed."""
        self._extents.discard(extent)
        for sequence in row.groups:
            self._txn.delete(wide_key(sequence), db=self._database)

    def _append(self, extent: int, row: ExtentRow, bits: int) -> None:
        sequence = self._state.next_sequence
        self._state.next_sequence += 1
        row.groups[sequence] = bits
        key, value = wide_key(sequence), wide_key(extent)
        if not self._txn.put(key, value, db=self._database, append=True):
            raise CatalogDamagedError("the order has younger rows than the next one")

    def _leave(self, row: ExtentRow, bits: int) -> None:
        """Take records out of their groups."""
        for sequence, group in list(row.groups.items()):
            common = group & bits
            if not common:
                continue
            bits ^= common
            if group != common:
                row.groups[sequence] = group ^ common
                continue
            del row.groups[sequence]
            if not self._txn.delete(wide_key(sequence), db=self._database):
                raise CatalogDamagedError("a record is missing in the order")
        if bits:
            raise CatalogDamagedError("a record does not live in its extent")


def extent_keys(places: RowArray) -> npt.NDArray[np.uint64]:
    """Return the extent of each place, as `extent_key` gives it."""
    keys: npt.NDArray[np.uint64] = (
        places["segment"].astype(np.uint64) << np.uint64(32) | places["header_page"]
    )
    return keys


def _bits(indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    if len(indices) and int(indices.max()) >= EXTENT_RECORDS_MAX:
        raise CatalogDamagedError("a record lies beyond the end of its extent")
    bits: npt.NDArray[np.int64] = np.int64(1) << indices
    return bits
