"""Extents: how records are laid out in runs of pages."""

import numpy as np

from tierstore.catalog.pages.cluster_row import CLUSTER_RECORDS_MAX
from tierstore.catalog.rows import RowArray
from tierstore.codec.record import EXTENT_RECORDS_MAX

__all__ = ["adjacent", "coalesce", "extent_records_max", "fit_count", "laid_out_pages"]

_EXTENT_PAGES_MAX = 1024
"""Longer extents of large records would be written and read by one thread while others idle."""


def extent_records_max(stride_pages: int) -> int:
    """Return how many records one extent has at most."""
    return min(EXTENT_RECORDS_MAX, max(1, _EXTENT_PAGES_MAX // stride_pages))


def fit_count(room_pages: int, stride_pages: int, header_pages: int) -> int:
    """Return how many records fit into a run of pages, headers included."""
    per_extent = extent_records_max(stride_pages)
    extent_count, rest = divmod(room_pages, header_pages + per_extent * stride_pages)
    return extent_count * per_extent + max(0, rest - header_pages) // stride_pages


def laid_out_pages(record_count: int, stride_pages: int, header_pages: int) -> int:
    """Return how many pages records take that begin a new extent, headers included."""
    extent_count = -(-record_count // extent_records_max(stride_pages))
    return record_count * stride_pages + extent_count * header_pages


def coalesce(runs: RowArray) -> RowArray:
    """Sort runs (`RUN_DTYPE`) and join adjacent ones."""
    if not len(runs):
        return runs
    runs = runs[np.lexsort((runs["first_page"], runs["segment"]))]
    ends = runs["first_page"] + runs["page_count"]
    starts_new = np.ones(len(runs), bool)
    starts_new[1:] = (runs["segment"][1:] != runs["segment"][:-1]) | (
        runs["first_page"][1:] != ends[:-1]
    )
    firsts = np.flatnonzero(starts_new)
    joined = runs[firsts]
    joined["page_count"] = np.add.reduceat(runs["page_count"], firsts)
    return joined


def adjacent(extents: list[tuple[int, int, int, int]], header_pages: int) -> list[int]:
    """Return how many of the extents (`EXTENT_DTYPE`) that one request was given form each cluster.

    They are in the order of their pages.
    """
    lengths: list[int] = []
    room = first_count = 0
    following = -1, -1
    for segment, header_page, stride_pages, count in extents:
        if (segment, header_page) == following and count <= min(room, first_count):
            lengths[-1] += 1
        else:
            lengths.append(1)
            room = CLUSTER_RECORDS_MAX
            first_count = count
        room -= count
        if count < first_count:
            room = 0  # the last one: what comes behind it would not be where it is looked for
        following = segment, header_page + header_pages + count * stride_pages
    return lengths
