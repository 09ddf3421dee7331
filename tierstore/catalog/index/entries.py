"""Arithmetic on entries: (hash, cluster) pairs that were added and removed in some order."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore.catalog.index.hashes import Numbers

__all__ = ["NOTHING", "Matches", "equal_rows", "kept_rows", "net_entries"]

NOTHING: Numbers = np.empty(0, np.uint64)

Indices = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]


class Matches(NamedTuple):
    """Pairs of a query and of a row with the hash that it asks for, both by index."""

    queries: Indices
    rows: Indices


def equal_rows(hashes: Numbers, queries: Numbers) -> Matches:
    """Return which rows of sorted `hashes` equal which queries; rows of one query in order."""
    lows = hashes.searchsorted(queries)
    if not len(hashes):
        return Matches(lows[:0], lows[:0])
    found = np.flatnonzero(hashes.take(lows, mode="clip") == queries)
    lows = lows[found]
    following = hashes.take(lows + 1, mode="clip") == queries[found]
    if not np.any(following & (lows + 1 < len(hashes))):
        return Matches(found, lows)
    counts = hashes.searchsorted(queries[found], side="right") - lows
    ends = counts.cumsum()
    rows = np.arange(ends[-1]) + np.repeat(lows - ends + counts, counts)
    return Matches(np.repeat(found, counts), rows)


def net_entries(hashes: Numbers, clusters: Numbers, is_added: Flags) -> tuple[Numbers, Numbers]:
    """Return what is left of rows in the order of time, by hash; equal hashes by their age."""
    order = hashes.argsort(kind="stable")
    hashes, clusters, is_kept = hashes[order], clusters[order], is_added[order]
    is_equal = hashes[1:] == hashes[:-1]
    if is_equal.any():
        is_shared = np.zeros(len(hashes), np.bool_)
        is_shared[1:] = is_equal
        is_shared[:-1] |= is_equal
        shared = np.flatnonzero(is_shared)
        is_kept[shared] = kept_rows(hashes[shared], clusters[shared], is_kept[shared])
    return hashes[is_kept], clusters[is_kept]


def kept_rows(groups: Numbers | Indices, clusters: Numbers, is_added: Flags) -> Flags:
    """Return which of the added rows are left.

    Rows of equal group and cluster are in the order of time. Each removal takes back one that was
    added before it, if there is one: different keys of one cluster may have the same hash.

        sum of the rows   1  0 -1  0  1     (added, removed, removed, added, added)
        its minimum, or 0      -1
        left              1 - (-1) = 2      the last two: a removal of nothing does nothing
    """
    if not len(groups):
        return np.empty(0, np.bool_)
    order = np.lexsort((clusters, groups))
    groups, clusters, is_positive = groups[order], clusters[order], is_added[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (groups[1:] != groups[:-1]) | (clusters[1:] != clusters[:-1])
    firsts = np.flatnonzero(is_first)
    sizes = np.diff(firsts, append=len(order))
    sums = np.where(is_positive, 1, -1).cumsum()
    before = np.zeros(len(firsts), np.intp)
    before[1:] = sums[firsts[1:] - 1]
    lowest = np.minimum(np.minimum.reduceat(sums, firsts) - before, 0)
    lasts = firsts + sizes - 1
    left = sums[lasts] - before - lowest
    added = is_positive.cumsum()
    younger = np.repeat(added[lasts], sizes) - added
    result = np.empty(len(order), np.bool_)
    result[order] = is_positive & (younger < np.repeat(left, sizes))
    return result
