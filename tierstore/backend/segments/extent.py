"""Arithmetic on places: which records form an extent, and which can be read by one call.

pages of a segment:   h          h+1          h+1+stride            h+1+n*stride
                      | headers  | payload 0  | payload 1 | ...     | headers of the next extent
a run from index 0    [-------------------------------------------------------- ...
a run from index 1                            [-------------------------------- ...
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tierstore.codec.record import EXTENT_RECORDS_MAX
from tierstore.layout import PAGE_BYTES

__all__ = ["ReadPart", "ReadRun", "end_page", "plan_reads", "split_extents", "valid_places"]

Places = npt.NDArray[np.void]
Pages = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ReadRun:
    """Half-open range of a part's positions whose records lie one behind another."""

    start: int
    stop: int
    segment: int
    first_page: int
    """Of the first payload, or of the header page before it if the run begins with it."""
    fetches_header: bool
    """It begins inside an extent whose header page no run before it brings."""


@dataclass(frozen=True, slots=True)
class ReadPart:
    """Records in the order of their places, of a bounded number of extents."""

    indices: list[int]
    """Of the records in the caller's order."""
    places: Places
    extents: npt.NDArray[np.int64]
    """Which extent of the part each record is in, from 0."""
    end_pages: Pages
    """Per record, the page behind its payload."""
    runs: list[ReadRun]


def valid_places(places: Places) -> npt.NDArray[np.bool_]:
    """Return which places are possible; the catalog's disk is not trusted."""
    stride = places["stride_pages"].astype(np.int64)
    valid: npt.NDArray[np.bool_] = (
        (places["index"] < EXTENT_RECORDS_MAX)
        & (places["payload_bytes"] > 0)
        & (places["payload_bytes"] <= stride * PAGE_BYTES)
    )
    return valid


def end_page(places: Places) -> int:
    """Return the page behind the last of the records of one extent."""
    last = places[-1]
    return int(last["header_page"]) + 1 + (int(last["index"]) + 1) * int(last["stride_pages"])


def split_extents(places: Places) -> list[tuple[int, int]]:
    """Return the half-open ranges of records that follow each other in one extent."""
    index = places["index"].astype(np.int64)
    follows = (
        (places["segment"][1:] == places["segment"][:-1])
        & (places["header_page"][1:] == places["header_page"][:-1])
        & (places["stride_pages"][1:] == places["stride_pages"][:-1])
        & (index[1:] == index[:-1] + 1)
    )
    bounds = [0, *(np.flatnonzero(~follows) + 1).tolist(), len(places)]
    return list(pairwise(bounds))


def plan_reads(
    places: Places, indices: npt.NDArray[np.int64], extent_count_max: int
) -> Iterator[ReadPart]:
    """Sort the records at `indices` by place and divide them into parts and runs."""
    chosen = places[indices]
    order = np.lexsort((chosen["index"], chosen["header_page"], chosen["segment"]))
    indices, chosen = indices[order], chosen[order]
    starts = np.ones(len(chosen), np.int64)
    starts[1:] = (chosen["segment"][1:] != chosen["segment"][:-1]) | (
        chosen["header_page"][1:] != chosen["header_page"][:-1]
    )
    extents = np.cumsum(starts) - 1
    for first_extent in range(0, int(extents[-1]) + 1, extent_count_max):
        start, stop = np.searchsorted(extents, (first_extent, first_extent + extent_count_max))
        yield _plan_part(
            indices[start:stop], chosen[start:stop], extents[start:stop] - first_extent
        )


def _plan_part(
    indices: npt.NDArray[np.int64], places: Places, extents: npt.NDArray[np.int64]
) -> ReadPart:
    first_pages = _payload_pages(places)
    end_pages = first_pages + places["stride_pages"]
    heads = places["index"] == 0
    first_pages -= heads
    breaks = (places["segment"][1:] != places["segment"][:-1]) | (first_pages[1:] != end_pages[:-1])
    bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(places)]
    fetches = ~heads
    fetches[1:] &= extents[1:] != extents[:-1]
    runs = [
        ReadRun(
            start,
            stop,
            int(places["segment"][start]),
            int(first_pages[start]),
            bool(fetches[start]),
        )
        for start, stop in pairwise(bounds)
    ]
    return ReadPart(indices.tolist(), places, extents, end_pages, runs)


def _payload_pages(places: Places) -> Pages:
    """Return the first page of each payload."""
    index = places["index"].astype(np.int64)
    pages: Pages = places["header_page"].astype(np.int64) + 1 + index * places["stride_pages"]
    return pages
