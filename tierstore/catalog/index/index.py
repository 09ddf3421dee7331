"""The index as one transaction sees it: which clusters may hold a key."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from tierstore.catalog.index.cache import IndexCache, IndexDatabases, Written
from tierstore.catalog.index.entries import Flags, Indices, equal_rows, kept_rows
from tierstore.catalog.index.hashes import Numbers
from tierstore.catalog.index.head import HEAD_KEY, START_SHIFT, Head
from tierstore.catalog.index.log_row import LogRow, OpGroup, group_run, log_key, pack_log_row
from tierstore.catalog.index.merging import Merge
from tierstore.catalog.index.run import Run
from tierstore.catalog.index.searching import address_of
from tierstore.catalog.index.shard import Shard
from tierstore.catalog.index.tail import Tail, append_run, merged_run
from tierstore.lmdb_env.library import Transaction

__all__ = ["Index"]

_ONE = np.uint64(1)

_Found: TypeAlias = list[tuple[Indices, Numbers, Flags]]
"""Queries, their clusters, and whether these were added, in the order of time."""


class Index:
    """Where keys may be, in one transaction, read or write; one thread.

    An entry is a hint: the cluster may be gone, hold another key with the same hash, or hold the
    key as garbage. That a living record has its entry is what can be relied on.
    """

    def __init__(self, txn: Transaction, databases: IndexDatabases, cache: IndexCache) -> None:
        """Read nothing yet; `cache` is of the environment of `txn`."""
        self._txn = txn
        self._databases = databases
        self._cache = cache
        self._now: tuple[Head, Tail] | None = None
        self._groups: list[OpGroup] = []
        """What this transaction added and removed, and is not in the log."""
        self._hashes: list[Numbers] = []
        self._own: list[Run] = []
        """The first `_sorted_count` groups of them, to be searched."""
        self._sorted_count = 0

    @property
    def log_number(self) -> int:
        """The number of the last log row that this transaction sees.

        Raises:
            CatalogDamagedError: rows are damaged.
        """
        return self._read()[0].last_number

    def find(self, keys: Sequence[bytes]) -> list[tuple[int, ...]]:
        """Return the clusters that may hold each key, the youngest first; () if none does.

        About 0.5 us per key, and one call of the library for each shard that is not in memory.

        Raises:
            CatalogDamagedError: rows are damaged.
        """
        head, tail = self._read()
        if not len(keys):
            return []
        order, hashes = self._sorted_hashes(keys)
        shards = head.edges.searchsorted(hashes, side="right") - 1
        found = self._search_shards(head, shards, hashes)
        found += self._search_log(head, tail, hashes, head.shards["merged"][shards])
        return _candidates(order, found)

    def hints(self, key: bytes) -> list[int]:
        """Return the clusters that `find` gives for one key, and maybe some that it does not.

        About 5 us. Without numpy, which gives the interpreter away some twenty times in `find`.

        Raises:
            CatalogDamagedError: rows are damaged.
        """
        head, tail = self._read()
        hash_ = int(self._cache.hashing([key])[0])
        found: list[int] = []
        for run in (*tail.runs, *self._own_runs(head)):
            found += _clusters_of(hash_, run.hashes, run.clusters)
        at = bisect_right(head.starts, hash_ >> START_SHIFT) - 1
        for shard in self._cache.shards(self._txn, self._databases, head, [at]):
            if shard is not None:
                found += _clusters_of(hash_, shard.hashes, shard.clusters)
        return found

    def added_since(self, log_number: int, keys: Sequence[bytes]) -> list[tuple[int, ...]] | None:
        """Return as `find` what was added after a log row and is not removed since.

        Reads no shard. None: so old rows are not in the log any more, ask `find`.

        Raises:
            CatalogDamagedError: rows are damaged.
        """
        head, tail = self._read()
        if not tail.first_number - 1 <= log_number <= head.last_number:
            return None
        order, hashes = self._sorted_hashes(keys)
        after = np.full(len(hashes), log_number, np.uint64)
        return _candidates(order, self._search_log(head, tail, hashes, after))

    def add(self, cluster: int, keys: Sequence[bytes]) -> None:
        """Note that a cluster holds keys; other transactions see it when this one is committed.

        Each is to be removed as often as it was added.
        """
        self._note(cluster, keys, is_added=True)

    def remove(self, cluster: int, keys: Sequence[bytes]) -> None:
        """Note that a cluster does not hold keys any more that were added before."""
        self._note(cluster, keys, is_added=False)

    def flush(self) -> None:
        """Write what was added and removed to the log, and merge some shards.

        For a write transaction, before it ends. Calls the library for the row, the head, two times
        for each shard, and for each row that is not needed any more. About 0.3 us per op.

        Raises:
            CatalogDamagedError: rows are damaged.
        """
        if not self._groups:
            return
        head, tail = self._read()
        own = self._own_runs(head)
        value, version = pack_log_row(
            head.next_number, head.log_version, self._groups, np.concatenate(self._hashes)
        )
        runs = (*tail.runs, *own)
        op_count = sum(map(len, self._hashes))
        merge = Merge(self._txn, self._databases, self._cache, head, runs, op_count=op_count)
        former, head = head, merge.run()
        head.log_version = version
        head.next_number += 1
        head.first_number = int(head.shards["merged"].min()) + 1
        if head.first_number < head.next_number:
            self._txn.put(log_key(head.last_number), value, db=self._databases.log)
        for number in range(former.first_number, min(head.first_number, former.next_number)):
            self._txn.delete(log_key(number), db=self._databases.log)
        self._txn.put(HEAD_KEY, head.pack(), db=self._databases.shards)
        row = LogRow(merged_run(own), former.log_version, version)
        self._cache.note_written(Written(row, merge.written))
        self._now = (head, tail.up_to(head, lambda _: row))
        self._groups, self._hashes, self._own, self._sorted_count = [], [], [], 0

    def _read(self) -> tuple[Head, Tail]:
        if self._now is None:
            head = self._cache.head(self._txn, self._databases)
            self._now = (head, self._cache.tail(self._txn, self._databases, head))
        return self._now

    def _note(self, cluster: int, keys: Sequence[bytes], *, is_added: bool) -> None:
        if len(keys):
            self._groups.append((cluster, len(keys), is_added))
            self._hashes.append(self._cache.hashing(keys))

    def _own_runs(self, head: Head) -> list[Run]:
        """Return what this transaction did: of what was sorted before, little is sorted again."""
        count = self._sorted_count
        if count < len(self._groups):
            hashes = np.concatenate(self._hashes[count:])
            append_run(self._own, group_run(head.next_number, self._groups[count:], hashes))
            self._sorted_count = len(self._groups)
        return self._own

    def _sorted_hashes(self, keys: Sequence[bytes]) -> tuple[Indices, Numbers]:
        hashes = self._cache.hashing(keys)
        order = hashes.argsort(kind="stable")
        return order, hashes[order]

    def _search_shards(self, head: Head, shards: Indices, hashes: Numbers) -> _Found:
        """Return which of the sorted `hashes` have entries in shards, and their clusters."""
        values, clusters = ~hashes, np.empty_like(hashes)
        several: _Found = []
        cuts = (np.flatnonzero(shards[1:] != shards[:-1]) + 1).tolist()
        starts = [0, *cuts]
        present = self._cache.shards(self._txn, self._databases, head, shards[starts].tolist())
        if self._is_in_no_shard(present, hashes, starts):
            return []
        for shard, start, stop in zip(present, starts, [*cuts, len(hashes)], strict=True):
            if shard is None:
                continue
            part = hashes[start:stop]
            if shard.is_unique:
                rows = shard.hashes.searchsorted(part)
                shard.hashes.take(rows, mode="clip", out=values[start:stop])
                shard.clusters.take(rows, mode="clip", out=clusters[start:stop])
            else:
                queries, rows = equal_rows(shard.hashes, part)
                several.append((queries + start, shard.clusters[rows], np.ones(len(rows), bool)))
        found = np.flatnonzero(values == hashes)
        return [(found, clusters[found], np.ones(len(found), bool)), *several]

    def _is_in_no_shard(
        self, shards: Sequence[Shard | None], hashes: Numbers, starts: Sequence[int]
    ) -> bool:
        """Return whether it is certain that no part of `hashes` is in its shard."""
        at = address_of(hashes)
        searches = [
            (shard.address, len(shard.hashes), at + 8 * start, stop - start)
            for shard, start, stop in zip(shards, starts, [*starts[1:], len(hashes)], strict=True)
            if shard is not None
        ]
        return self._cache.quick.finds_none(searches)

    def _search_log(self, head: Head, tail: Tail, hashes: Numbers, after: Numbers) -> _Found:
        """Return what happened to each of the sorted `hashes` after a row of its own."""
        own = self._own_runs(head)
        last = head.next_number if own else head.last_number
        found: _Found = []
        runs = (*tail.runs, *own)
        queries_at = address_of(hashes)
        searches = [
            (address_of(run.hashes), len(run.hashes), queries_at, len(hashes)) for run in runs
        ]
        if self._cache.quick.finds_none(searches):
            return found
        for run in runs:
            queries, rows = equal_rows(run.hashes, hashes)
            if len(rows):
                stamps = run.stamps[rows]
                numbers = stamps >> _ONE
                is_wanted = (numbers > after[queries]) & (numbers <= np.uint64(last))
                is_added = (stamps[is_wanted] & _ONE).astype(np.bool_)
                found.append((queries[is_wanted], run.clusters[rows[is_wanted]], is_added))
        return found


def _clusters_of(hash_: int, hashes: Numbers, clusters: Numbers) -> Iterator[int]:
    """Iterate over the clusters of the entries with one hash; the entries are sorted."""
    known = hashes.data
    at = bisect_left(known, hash_)
    while at < len(known) and known[at] == hash_:
        yield int(clusters[at])
        at += 1


def _candidates(order: Indices, found: _Found) -> list[tuple[int, ...]]:
    result: list[tuple[int, ...]] = [()] * len(order)
    if not found:
        return result
    queries = np.concatenate([part[0] for part in found])
    clusters = np.concatenate([part[1] for part in found])
    is_added = np.concatenate([part[2] for part in found])
    if len(found) > 1:
        by_query = queries.argsort(kind="stable")
        queries, clusters, is_added = queries[by_query], clusters[by_query], is_added[by_query]
    is_again = queries[1:] == queries[:-1]
    if not is_added.all() or is_again.any():
        is_kept = kept_rows(queries, clusters, is_added)
        queries, clusters = queries[is_kept], clusters[is_kept]
        is_again = queries[1:] == queries[:-1]
    numbers = order[queries].tolist()
    for number, cluster in zip(numbers, clusters.tolist(), strict=True):
        result[number] = (cluster,)
    if is_again.any():
        _list_several(result, numbers, clusters.tolist())
    return result


def _list_several(
    result: list[tuple[int, ...]], numbers: Sequence[int], clusters: Sequence[int]
) -> None:
    """Give each query its clusters once, the youngest first; they come with the oldest first."""
    lists: dict[int, list[int]] = {}
    for number, cluster in zip(numbers, clusters, strict=True):
        lists.setdefault(number, []).append(cluster)
    for number, several in lists.items():
        result[number] = tuple(dict.fromkeys(reversed(several)))
