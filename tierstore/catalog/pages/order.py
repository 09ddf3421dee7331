"""The order of eviction: groups of records of one cluster, the oldest group first.

    order    sequence -> cluster             clusters   cluster -> groups: sequence -> records
             7        -> A                              A       -> 7: 0 1 . .   9: . . 2 3
             8        -> B                              B       -> 8: 0 1 2 3
             9        -> A

The records of one cluster are mostly used one after the other, tail first. So a use of all of them
changes one row of the cluster and two of the order, and no row of a record.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tierstore.catalog.pages.cached_rows import CachedRows
from tierstore.catalog.pages.cluster_row import ClusterRow, indices_of
from tierstore.catalog.rows import Databases, StateRow, wide_key
from tierstore.errors import CatalogDamagedError
from tierstore.lmdb_env.library import Transaction

__all__ = ["Order", "Spot", "Victims"]

Spot: TypeAlias = tuple[int, int]
"""Where a record is: the number of its cluster, and its index there."""


@dataclass(slots=True)
class Victims:
    """Records of one group that are to be evicted."""

    cluster: int
    row: ClusterRow
    indices: list[int]
    keys: list[bytes]


class Order:
    """The `order` database, and the groups of clusters, within one write transaction."""

    def __init__(
        self,
        txn: Transaction,
        databases: Databases,
        state: StateRow,
        clusters: CachedRows[ClusterRow],
    ) -> None:
        self._txn = txn
        self._database = databases.order
        self._state = state
        self._clusters = clusters

    def enter(self, cluster: int, row: ClusterRow, bits: int) -> None:
        """Add a cluster of which these records live, as the youngest."""
        self._clusters.put(cluster, row)
        self._append(cluster, row, bits)

    def touch(self, spots: Sequence[Spot]) -> None:
        """Make records the youngest, in order.

        Raises:
            CatalogDamagedError: the order and the clusters contradict each other.
        """
        last_cluster, last_index, bits = -1, 0, 0
        # A run ends where another cluster begins, or a record follows that its group would put
        # before this one.
        for cluster, index in spots:
            if cluster != last_cluster or index >= last_index:
                self._renew(last_cluster, bits)
                last_cluster, bits = cluster, 0
            bits |= 1 << index
            last_index = index
        self._renew(last_cluster, bits)

    def take_out(self, cluster: int, bits: int) -> ClusterRow:
        """Take records of one cluster out; return its row, which goes with the last of them.

        Raises:
            CatalogDamagedError: the cluster is unknown, or one of them does not live there.
        """
        row = self._clusters.row(cluster)
        self._leave(row, bits)
        if not row.groups:
            self._clusters.remove(cluster)
        return row

    def oldest(self, pins: Container[bytes]) -> Iterator[Victims]:
        """Iterate over the groups, the oldest first, without pinned records.

        Nothing may be changed meanwhile.

        Raises:
            CatalogDamagedError: the order names what there is not.
        """
        with self._txn.cursor(db=self._database) as cursor:
            for sequence, value in cursor.iternext():
                cluster = int.from_bytes(value, "big")
                row = self._clusters.find(cluster)
                bits = 0 if row is None else row.groups.get(int.from_bytes(sequence, "big"), 0)
                if row is None or not bits:
                    raise CatalogDamagedError("the order names records that there are not")
                keys = row.keys()
                indices = indices_of(bits)
                if pins:
                    indices = [index for index in indices if keys[index] not in pins]
                yield Victims(cluster, row, indices, [keys[index] for index in indices])

    def discard(self, cluster: int, row: ClusterRow) -> None:
        """Forget the groups of a cluster whose row the caller has removed."""
        self._clusters.discard(cluster)
        for sequence in row.groups:
            self._txn.delete(wide_key(sequence), db=self._database)

    def _renew(self, cluster: int, bits: int) -> None:
        if bits:
            row = self._clusters.row(cluster)
            self._leave(row, bits)
            self._append(cluster, row, bits)

    def _append(self, cluster: int, row: ClusterRow, bits: int) -> None:
        sequence = self._state.next_sequence
        self._state.next_sequence += 1
        row.groups[sequence] = bits
        key, value = wide_key(sequence), wide_key(cluster)
        if not self._txn.put(key, value, db=self._database, append=True):
            raise CatalogDamagedError("the order has younger rows than the next one")

    def _leave(self, row: ClusterRow, bits: int) -> None:
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
            raise CatalogDamagedError("a record does not live in its cluster")
