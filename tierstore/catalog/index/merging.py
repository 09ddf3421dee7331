"""How the log of the index gets into its shards, a few of them in each transaction."""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from tierstore.catalog.index.cache import IndexBounds, IndexCache, IndexDatabases
from tierstore.catalog.index.entries import NOTHING, net_entries
from tierstore.catalog.index.hashes import Numbers
from tierstore.catalog.index.head import SHARD_DTYPE, START_SHIFT, Head
from tierstore.catalog.index.run import Run
from tierstore.catalog.index.shard import Shard, pack_shard, shard_key
from tierstore.lmdb_env.library import Transaction

__all__ = ["Merge", "choose_shards"]

_SPARSE_SHARE = 8
"""Two shards that have so much less than one may have are joined."""

_Row: TypeAlias = tuple[int, int, int, int]
"""See `SHARD_DTYPE`."""
_Piece: TypeAlias = tuple[int, Numbers, Numbers]
"""Start, hashes and clusters of a shard that is written."""


class Merge:
    """The merge of one write transaction, up to and with its own row of the log."""

    def __init__(
        self,
        txn: Transaction,
        databases: IndexDatabases,
        cache: IndexCache,
        head: Head,
        runs: Sequence[Run],
        *,
        op_count: int,
    ) -> None:
        """`head` is as it was before; `runs` are the log, with `op_count` ops of our own."""
        self._txn = txn
        self._databases = databases
        self._cache = cache
        self._head = head.with_shards(head.shards)
        self._runs = runs
        self._op_count = op_count
        self._number = head.next_number
        self._rows: list[_Row] = []
        self.written: dict[int, Shard] = {}
        """The new versions of shards, by start."""

    def run(self) -> Head:
        """Merge the shards whose turn it is; return the head that names them, and no new row.

        Raises:
            CatalogDamagedError: a shard is damaged.
        """
        head, bounds = self._head, self._cache.bounds
        replaced: set[int] = set()
        for index in choose_shards(head, self._op_count, bounds):
            if index not in replaced:
                group = self._joined(index)
                replaced.update(group)
                self._merge(group)
        is_left = np.ones(len(head.shards), np.bool_)
        is_left[list(replaced)] = False
        shards = np.concatenate((head.shards[is_left], np.array(self._rows, SHARD_DTYPE)))
        return head.with_shards(shards[shards["start"].argsort(kind="stable")])

    def _joined(self, index: int) -> list[int]:
        counts = self._head.shards["count"][index : index + 2]
        sparse = self._cache.bounds.shard_entries_max // _SPARSE_SHARE
        return list(range(index, index + (len(counts) if counts.sum() <= sparse else 1)))

    def _merge(self, group: Sequence[int]) -> None:
        head = self._head
        parts = [self._merged(index) for index in group]
        hashes = np.concatenate([part[0] for part in parts])
        clusters = np.concatenate([part[1] for part in parts])
        gone = {head.starts[index] for index in group if head.versions[index]}
        start, end = head.starts[group[0]], head.end_of(group[-1]) >> START_SHIFT
        entries_max = self._cache.bounds.shard_entries_max
        for piece in _split((start, hashes, clusters), end, entries_max):
            version = 0
            if len(piece[1]):
                value, version = pack_shard(self._number, *piece)
                self._txn.put(shard_key(piece[0]), value, db=self._databases.shards)
                self.written[piece[0]] = Shard(version, *piece[1:])
                gone.discard(piece[0])
            self._rows.append((piece[0], len(piece[1]), self._number, version))
        for start in gone:
            self._txn.delete(shard_key(start), db=self._databases.shards)

    def _merged(self, index: int) -> tuple[Numbers, Numbers]:
        """Return hashes and clusters of a shard after all ops that it lacks."""
        head = self._head
        low, end, merged = int(head.edges[index]), head.end_of(index), head.shards["merged"][index]
        (shard,) = self._cache.shards(self._txn, self._databases, head, [index])
        hashes = [NOTHING if shard is None else shard.hashes]
        clusters = [NOTHING if shard is None else shard.clusters]
        is_added = [np.ones(len(hashes[0]), np.bool_)]
        for run in self._runs:
            ops = run.between(low, end, int(merged))
            hashes.append(ops.hashes)
            clusters.append(ops.clusters)
            is_added.append(ops.is_added())
        return net_entries(
            np.concatenate(hashes), np.concatenate(clusters), np.concatenate(is_added)
        )


def choose_shards(head: Head, op_count: int, bounds: IndexBounds) -> list[int]:
    """Return which shards are merged for so many new ops, and note in `head` what is still owed.

    In turn, and so often that all have their turn before the log gets longer than its bound.
    """
    entry_count = int(head.shards["count"].sum(dtype=np.uint64))
    shard_count = len(head.shards)
    log_ops = entry_count // bounds.log_share
    log_ops = min(max(log_ops, bounds.log_ops_min), bounds.log_ops_max)
    shard_ops = max(log_ops // shard_count, 1)
    owed = head.owed_ops + max(op_count, bounds.row_ops_min)
    turn_count = min(owed // shard_ops, shard_count)
    head.owed_ops = min(owed - turn_count * shard_ops, log_ops)
    by_age = head.shards["merged"].argsort(kind="stable")
    chosen: list[int] = np.sort(by_age[:turn_count]).tolist()
    return chosen


def _split(piece: _Piece, end: int, entries_max: int) -> Iterator[_Piece]:
    """Yield the entries of a shard that ends at `end` in halves of its range, until few enough."""
    start, hashes, clusters = piece
    if len(hashes) <= entries_max or end - start == 1:
        yield piece
        return
    middle = (start + end) // 2
    cut = int(hashes.searchsorted(np.uint64(middle << START_SHIFT)))
    yield from _split((start, hashes[:cut], clusters[:cut]), middle, entries_max)
    yield from _split((middle, hashes[cut:], clusters[cut:]), end, entries_max)
