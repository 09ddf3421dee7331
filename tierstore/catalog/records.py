"""Records by their keys: which cluster has the living record of a key, and at which index."""

from collections.abc import Callable, Iterable, Sequence
from itertools import product

from tierstore.catalog.garbage import Floors
from tierstore.catalog.pages.cluster_row import ClusterRow, indices_of
from tierstore.catalog.pages.order import Spot
from tierstore.catalog.rows import Databases, wide_key
from tierstore.key import NAMESPACE_BYTES
from tierstore.lmdb_env.library import Transaction

__all__ = ["Records"]


class Records:
    """The `records` database within one transaction.

    A row only says where to look. A record lives if its cluster says so, and no floor hides it.
    """

    def __init__(
        self,
        txn: Transaction,
        databases: Databases,
        floors: Floors,
        row_of: Callable[[int], ClusterRow | None],
    ) -> None:
        """`row_of` returns the row of a cluster; None: there is none."""
        self._txn = txn
        self._database = databases.records
        self._floors = floors
        self._row_of = row_of

    def find(self, keys: Iterable[bytes]) -> list[Spot | None]:
        """Return where the living record of each key is; None: there is none.

        A cluster answers for all keys that it names, so that a request costs one look per cluster.
        """
        found: list[Spot | None] = []
        named: dict[bytes, Spot] = {}
        looked_at: set[int] = set()
        for key in keys:
            spot = named.get(key)
            if spot is None:
                value = self._txn.get(key, db=self._database)
                if value is not None:
                    cluster = int.from_bytes(value, "big")
                    if cluster not in looked_at:
                        looked_at.add(cluster)
                        named.update(self._living(cluster))
                        spot = named.get(key)
            found.append(spot)
        return found

    def add(self, cluster: int, keys: Sequence[bytes]) -> list[bytes]:
        """Enter keys of a cluster; return those that have a living record elsewhere."""
        value = wide_key(cluster)
        # In the order of the keys: a page of rows is searched for and changed while it is at hand.
        with self._txn.cursor(db=self._database) as cursor:
            items = [(key, value) for key in sorted(keys)]
            consumed_count, added_count = cursor.putmulti(items, overwrite=False)
        if added_count == consumed_count:
            return []
        taken = []
        for key, spot in zip(keys, self.find(keys), strict=True):
            if spot is not None and spot[0] != cluster:
                taken.append(key)
            else:
                self._txn.put(key, value, db=self._database)
        return taken

    def remove(self, cluster: int, keys: Sequence[bytes]) -> None:
        """Remove the rows of keys that name a cluster; a younger record may have others."""
        value = wide_key(cluster)
        for key in keys:
            if self._txn.get(key, db=self._database) == value:
                self._txn.delete(key, db=self._database)

    def _living(self, cluster: int) -> dict[bytes, Spot]:
        row = self._row_of(cluster)
        if row is None:
            return {}
        keys = row.keys()
        if self._floors and self._floors.hides(keys[0][:NAMESPACE_BYTES], cluster >> 32):
            return {}
        bits = row.live_bits
        if bits == row.all_bits:
            return dict(zip(keys, product((cluster,), range(row.record_count)), strict=True))
        return {keys[index]: (cluster, index) for index in indices_of(bits)}
