"""How records are laid out in a run of pages, and how runs are joined."""

import numpy as np

from tierstore.catalog.rows import RowArray
from tierstore.codec.record import EXTENT_RECORDS_MAX

__all__ = ["coalesce", "extent_records_max", "fit_count", "laid_out_pages"]

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
