"""Releases that a power cut has undone: done according to the catalog, but the blocks are there.

A release is recorded when the file system has taken the blocks back, which may reach the device
later than the catalog does. An opener that is alone compares what each segment takes with what it
is charged, and punches again whatever no row holds. Unreferenced segments are released by the data
planes, a little later; or here, if they do not fit into the capacity until then.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tierstore.backend.names import rank_directories, segment_name
from tierstore.catalog.pages.cluster_row import ClusterRow
from tierstore.catalog.pages.unreferenced import NO_OWNER
from tierstore.catalog.rows import (
    Databases,
    PendingRow,
    SegmentRow,
    SegmentState,
    extent_key,
    segment_key,
    wide_key,
)
from tierstore.config import SecondaryConfig
from tierstore.device.directory import Directory
from tierstore.device.remedies import explain
from tierstore.device.system import SystemCalls
from tierstore.errors import BackendError
from tierstore.geometry import SpaceGeometry
from tierstore.layout import PAGE_BYTES
from tierstore.lmdb_env.library import Transaction
from tierstore.lmdb_env.pace import UNHURRIED, VerifyPace

__all__ = ["repeat_lost_releases"]

_CLUSTERS_AT_ONCE = 512

_Pages: TypeAlias = npt.NDArray[np.bool_]
_Runs: TypeAlias = list[tuple[int, int]]


def repeat_lost_releases(
    txn: Transaction,
    databases: Databases,
    config: SecondaryConfig,
    geometry: SpaceGeometry,
    stored: Mapping[int, int],
    *,
    catalog_pages: int,
    system: SystemCalls,
    pace: VerifyPace = UNHURRIED,
) -> None:
    """Give back what no row holds of the segments that take more than they are charged.

    `stored` are the pages that each segment takes, on the rank that has most of it. No other
    process may have the path open. O(segments), and O(records) in steps of `pace` if any takes too
    much. Reads rows, and changes none.

    Raises:
        ClosedError: see `VerifyPace.step`.
        BackendError: the path cannot be read or written.
    """
    rows = {segment: _row(txn, databases, segment) for segment in stored}
    swollen = {
        segment: row
        for segment, row in rows.items()
        if row is not None and stored[segment] > row.charged_pages
    }
    free: dict[int, _Runs | None] = {}
    if swollen and geometry.unit_pages:
        held = {segment: _given_out(row, geometry) for segment, row in swollen.items()}
        _mark_records(txn, databases, geometry, swollen, held, pace=pace)
        _mark_writing(txn, databases, geometry, held)
        for segment, pages in held.items():
            free[segment] = list(_runs(pages, geometry.unit_pages))
    capacity_pages = geometry.payload_pages(config.capacity_bytes, catalog_pages, 0)
    if sum(stored.values()) * geometry.rank_count > capacity_pages:
        unreferenced = [s for s, row in rows.items() if row is None or row.owner == NO_OWNER]
        free.update(dict.fromkeys(unreferenced))
    if free:
        _give_back(config, free, system)


def _give_back(
    config: SecondaryConfig, free: Mapping[int, _Runs | None], system: SystemCalls
) -> None:
    """Punch runs of pages; None: remove the segment."""
    try:
        with Directory.open(config.path) as base:
            for name in rank_directories(base).values():
                with base.subdirectory(name) as directory:
                    for segment, runs in free.items():
                        if runs is None:
                            with suppress(FileNotFoundError):
                                directory.unlink(segment_name(segment))
                        else:
                            _punch(directory, segment_name(segment), runs, system)
    except OSError as error:
        raise BackendError(explain(config.path, error)) from error


def _row(txn: Transaction, databases: Databases, segment: int) -> SegmentRow | None:
    value = txn.get(segment_key(segment), db=databases.segments)
    return None if value is None else SegmentRow.unpack(value)


def _given_out(row: SegmentRow, geometry: SpaceGeometry) -> _Pages:
    """Return which pages of a segment are charged because nothing was given out there yet."""
    pages: _Pages = np.zeros(row.page_count, bool)
    pages[row.next_page : geometry.charged_end(row.next_page, row.page_count)] = True
    return pages


def _mark_records(
    txn: Transaction,
    databases: Databases,
    geometry: SpaceGeometry,
    rows: Mapping[int, SegmentRow],
    held: Mapping[int, _Pages],
    *,
    pace: VerifyPace,
) -> None:
    """Mark what records hold, except those in dead segments."""
    for segment in [s for s, row in rows.items() if row.state != SegmentState.DEAD]:
        for number, (cluster, row) in enumerate(_clusters_of(txn, databases, segment)):
            for run in row.page_runs(cluster, row.live_bits, 0, geometry.header_pages):
                _, first_page, page_count = run
                held[segment][first_page : first_page + page_count] = True
            if number % _CLUSTERS_AT_ONCE == 0:
                pace.step()


def _clusters_of(
    txn: Transaction, databases: Databases, segment: int
) -> Iterator[tuple[int, ClusterRow]]:
    with txn.cursor(db=databases.clusters) as cursor:
        found = cursor.set_range(wide_key(extent_key(segment, 0)))
        while found:
            cluster = int.from_bytes(cursor.key(), "big")
            if cluster >> 32 != segment:
                break
            yield cluster, ClusterRow.unpack(cursor.value())
            found = cursor.next()


def _mark_writing(
    txn: Transaction, databases: Databases, geometry: SpaceGeometry, held: Mapping[int, _Pages]
) -> None:
    """Mark what is being written, perhaps by a rank that has outlived its scheduler."""
    with txn.cursor(db=databases.pending) as cursor:
        for _, value in cursor:
            for extent in PendingRow.unpack(value).extents:
                pages = held.get(int(extent["segment"]))
                if pages is not None:
                    first = int(extent["header_page"])
                    size = geometry.header_pages
                    size += int(extent["count"]) * int(extent["stride_pages"])
                    pages[first : first + size] = True


def _runs(held: _Pages, unit_pages: int) -> Iterator[tuple[int, int]]:
    """Return the runs [first, end) of whole units of which nothing is held."""
    units = np.add.reduceat(held, np.arange(0, len(held), unit_pages)) if len(held) else held
    edges = np.flatnonzero(np.diff(np.concatenate([[1], units != 0, [1]]))).tolist()
    for first, end in zip(edges[::2], edges[1::2], strict=True):
        yield first * unit_pages, min(end * unit_pages, len(held))


def _punch(directory: Directory, name: str, runs: _Runs, system: SystemCalls) -> None:
    try:
        descriptor = directory.open_file(name, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        size_pages = -(-os.fstat(descriptor).st_size // PAGE_BYTES)
        for first, end in runs:
            count = min(end, size_pages) - first
            if count > 0:
                system.punch_hole(descriptor, first * PAGE_BYTES, count * PAGE_BYTES)
    finally:
        os.close(descriptor)
