"""Records by their keys: which cluster has the living record of a key, and at which index."""

from collections.abc import Callable, Iterable, Sequence

from tierstore.catalog.garbage import Floors
from tierstore.catalog.index.index import Index
from tierstore.catalog.pages.cluster_row import ClusterRow
from tierstore.catalog.pages.order import Spot
from tierstore.key import NAMESPACE_BYTES

__all__ = ["Records"]

_KEYS_AT_ONCE = 512
"""Keys that are looked for in the index before the caller hears of them."""
_FOLLOWING_MIN = 8
"""Keys of a request that a cluster is expected to name; if not, they are searched for at once."""


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
        view = _View(self._row_of, self._floors)
        found: list[Spot | None] = []
        # A request is mostly recorded from its beginning, some clusters of it: one of its keys
        # finds the cluster that names those which follow.
        for key in passing(keys):
            spot = view.following(key)
            if spot is None and view.cluster_count * _FOLLOWING_MIN <= len(found):
                spot = view.living(key, self._index.hints(key))
            if spot is None:
                break
            found.append(spot)
        for first in range(len(found), len(keys), _KEYS_AT_ONCE):
            part = keys[first : first + _KEYS_AT_ONCE]
            candidates = self._index.find(part)
            for key, clusters in zip(passing(part), candidates, strict=True):
                found.append(view.living(key, clusters) if clusters else None)
        return found

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


class _View:
    """The clusters that one search has looked at."""

    def __init__(self, row_of: Callable[[int], ClusterRow | None], floors: Floors) -> None:
        self._row_of = row_of
        self._floors = floors
        self._rows: dict[int, tuple[ClusterRow, int] | None] = {}
        """With the living records as bits; None: there are none."""
        self._last: tuple[int, int, ClusterRow, int] | None = None
        """Cluster, index, row and living records of what was found last."""
        self._step = 1
        """To the next key: a prefix is looked up from its head, and used from its tail."""

    @property
    def cluster_count(self) -> int:
        """How many were looked at."""
        return len(self._rows)

    def following(self, key: bytes) -> Spot | None:
        """Return where a key is, if the cluster of the last one names it."""
        if self._last is None:
            return None
        cluster, last, row, bits = self._last
        index = row.index_of(key, last + self._step)
        if index is None or not bits >> index & 1:
            return None
        self._step = 1 if index > last else -1
        self._last = cluster, index, row, bits
        return cluster, index

    def living(self, key: bytes, clusters: Iterable[int]) -> Spot | None:
        """Return where the living record of a key is; the first cluster that has one counts."""
        for cluster in clusters:
            known = self._look_at(cluster)
            if known is not None:
                row, bits = known
                index = row.index_of(key)
                if index is not None and bits >> index & 1:
                    self._last = cluster, index, row, bits
                    return cluster, index
        return None

    def _look_at(self, cluster: int) -> tuple[ClusterRow, int] | None:
        if cluster not in self._rows:
            row = self._row_of(cluster)
            is_there = row is not None and not (
                self._floors and self._floors.hides(row.keys()[0][:NAMESPACE_BYTES], cluster >> 32)
            )
            self._rows[cluster] = (row, row.live_bits) if row is not None and is_there else None
        return self._rows[cluster]
