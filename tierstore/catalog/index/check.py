"""Verification of the index: every entry compared with the records that there are."""

import numpy as np

from tierstore.catalog.index.cache import IndexCache, IndexDatabases
from tierstore.catalog.index.entries import net_entries
from tierstore.catalog.index.hashes import Numbers
from tierstore.catalog.index.head import HEAD_KEY, Head
from tierstore.catalog.index.log_row import log_key
from tierstore.catalog.index.run import Run
from tierstore.catalog.index.shard import shard_key, unpack_shard
from tierstore.lmdb_env.library import Transaction
from tierstore.lmdb_env.pace import UNHURRIED, VerifyPace

__all__ = ["check_index"]


def check_index(
    txn: Transaction,
    databases: IndexDatabases,
    hashes: Numbers,
    clusters: Numbers,
    pace: VerifyPace = UNHURRIED,
) -> list[str]:
    """Return violations in words; empty when the index is sound.

    `hashes` and `clusters` are those of all names that clusters have, also of garbage: of each key
    that was added and was not removed. O(records), about 0.3 us each, in steps of `pace`; 40 bytes
    of memory per record besides.

    Raises:
        CatalogDamagedError: a row cannot even be decoded.
        ClosedError: see `VerifyPace.step`.
    """
    cache = IndexCache()
    head = cache.head(txn, databases)
    problems = _row_problems(txn, databases, head)
    runs = cache.tail(txn, databases, head).runs
    pace.step()
    order = hashes.argsort(kind="stable")
    hashes, clusters = hashes[order], clusters[order]
    cuts = hashes.searchsorted(head.edges).tolist()
    lost = surplus = 0
    for index, (start, stop) in enumerate(zip(cuts, [*cuts[1:], len(hashes)], strict=True)):
        pace.step()
        has = _entries(txn, databases, head, index, runs)
        missing = _difference(hashes[start:stop], clusters[start:stop], *has)
        lost += missing[0]
        surplus += missing[1]
    if lost:
        problems.append(f"{lost} records are not in the index")
    if surplus:
        problems.append(f"{surplus} entries of the index name no record")
    return problems


def _row_problems(txn: Transaction, databases: IndexDatabases, head: Head) -> list[str]:
    """All rows are those that the head names; the named ones are read later."""
    problems = []
    starts = head.shards["start"][head.shards["count"] > 0].tolist()
    shard_keys = {shard_key(start) for start in starts}
    with txn.cursor(db=databases.shards) as cursor:
        stored = set(cursor.iternext(keys=True, values=False))
    if stored - {HEAD_KEY} != shard_keys:
        problems.append("there are shards of the index that its head does not name")
    log_keys = {log_key(number) for number in range(head.first_number, head.next_number)}
    with txn.cursor(db=databases.log) as cursor:
        stored = set(cursor.iternext(keys=True, values=False))
    if stored != log_keys:
        problems.append("there are rows in the log of the index that its head does not name")
    return problems


def _entries(
    txn: Transaction, databases: IndexDatabases, head: Head, index: int, runs: tuple[Run, ...]
) -> tuple[Numbers, Numbers]:
    merged = int(head.shards["merged"][index])
    low, end = int(head.edges[index]), head.end_of(index)
    ops = [run.between(low, end, merged) for run in runs]
    hashes, clusters = [run.hashes for run in ops], [run.clusters for run in ops]
    is_added = [run.is_added() for run in ops]
    if head.shards["count"][index]:
        value = txn.get(shard_key(int(head.shards["start"][index])), db=databases.shards)
        shard = unpack_shard(value, head, index)
        hashes.insert(0, shard.hashes)
        clusters.insert(0, shard.clusters)
        is_added.insert(0, np.ones(len(shard.hashes), np.bool_))
    if not hashes:
        return np.empty(0, np.uint64), np.empty(0, np.uint64)
    return net_entries(np.concatenate(hashes), np.concatenate(clusters), np.concatenate(is_added))


def _difference(
    hashes: Numbers, clusters: Numbers, entry_hashes: Numbers, entry_clusters: Numbers
) -> tuple[int, int]:
    """Return how many pairs are missing from the entries, and how many of these are too many."""
    all_hashes = np.concatenate((hashes, entry_hashes))
    all_clusters = np.concatenate((clusters, entry_clusters))
    signs = np.ones(len(all_hashes), np.int64)
    signs[len(hashes) :] = -1
    if not len(signs):
        return 0, 0
    order = np.lexsort((all_clusters, all_hashes))
    all_hashes, all_clusters, signs = all_hashes[order], all_clusters[order], signs[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = all_hashes[1:] != all_hashes[:-1]
    is_first[1:] |= all_clusters[1:] != all_clusters[:-1]
    sums = np.add.reduceat(signs, np.flatnonzero(is_first))
    return int(sums[sums > 0].sum()), -int(sums[sums < 0].sum())
