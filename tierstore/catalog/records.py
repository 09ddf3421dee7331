"""Records by their keys: which cluster has the living record of a key, and at which index."""

from collections.abc import Callable, Iterable, Sequence
from itertools import product

from tierstore.catalog.garbage import Floors
from tierstore.catalog.index.index import Index
from tierstore.catalog.pages.cluster_row import ClusterRow, indices_of
from tierstore.catalog.pages.order import Spot
from tierstore.key import NAMESPACE_BYTES

__all__ = ["Records"]

_KEYS_AT_ONCE = 512
"""Keys that are looked for in the index before the caller hears of them."""


class Records:
    """Records within one transaction.

    The index only says where to look. A record lives if its cluster says so, and no floor hides it.
    """

    def __init__(
        self, index: Index, floors: Floors, row_of: Callable[[int], ClusterRow | None]
    ) -> None:
        """`row_of` returns the row of a cluster; None: there is none."""
        self._index = index
        self._floors = floors
        self._row_of = row_of

    @property
    def log_number(self) -> int:
        """What tells later, in `add`, which records came since."""
        return self._index.log_number

    def find(
        self,
        keys: Sequence[bytes],
        passing: Callable[[Iterable[bytes]], Iterable[bytes]] = iter,
    ) -> list[Spot | None]:
        """Return where the living record of each key is; None: there is none.

        `passing` hears how far this has come.
        """
        found: list[Spot | None] = []
        named: dict[bytes, Spot] = {}
        looked_at: set[int] = set()
        # A request is mostly recorded from its beginning, some clusters of it: one of its keys
        # finds the cluster that names those which follow.
        for key in passing(keys):
            if key not in named and not self._look_at(self._index.hints(key), looked_at, named):
                break
            spot = named.get(key)
            if spot is None:
                break
            found.append(spot)
        for first in range(len(found), len(keys), _KEYS_AT_ONCE):
            part = keys[first : first + _KEYS_AT_ONCE]
            candidates = self._index.find(part)
            for key, clusters in zip(passing(part), candidates, strict=True):
                self._look_at(clusters, looked_at, named)
                found.append(named.get(key) if clusters else None)
        return found

    def _look_at(
        self, clusters: Iterable[int], looked_at: set[int], named: dict[bytes, Spot]
    ) -> bool:
        """Note the living records of clusters that were not looked at; return whether there are.

        Of several records with one key, that of the first cluster counts: the youngest.
        """
        fresh = [cluster for cluster in clusters if cluster not in looked_at]
        for cluster in fresh:
            looked_at.add(cluster)
            for key, spot in self._living(cluster).items():
                named.setdefault(key, spot)
        return bool(fresh)

    def add(self, cluster: int, keys: Sequence[bytes], since: int) -> set[bytes]:
        """Enter keys of a new cluster; return those that have a living record elsewhere.

        None of them had one when the log number was `since`.
        """
        candidates = self._index.added_since(since, keys)
        if candidates is None:
            candidates = self._index.find(keys)
        suspects = [key for key, clusters in zip(keys, candidates, strict=True) if clusters]
        taken = set()
        if suspects:
            spots = zip(suspects, self.find(suspects), strict=True)
            taken = {key for key, spot in spots if spot is not None}
            keys = [key for key in keys if key not in taken]
        self._index.add(cluster, keys)
        return taken

    def remove(self, cluster: int, keys: Sequence[bytes]) -> None:
        """Forget that living records of a cluster have these keys."""
        self._index.remove(cluster, keys)

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
