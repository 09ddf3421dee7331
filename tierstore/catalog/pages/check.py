"""Verification of a tier's pages: segments and sums recomputed from the clusters."""

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
import numpy.typing as npt

from tierstore.catalog.pages.extents import extent_records_max
from tierstore.catalog.pages.said_clusters import SAID, halves, read_clusters
from tierstore.catalog.rows import (
    Databases,
    PendingRow,
    RowArray,
    SegmentRow,
    SegmentState,
    StateRow,
    extent_key,
    parse_number,
)
from tierstore.geometry import SpaceGeometry
from tierstore.lmdb_env.library import Transaction
from tierstore.lmdb_env.pace import UNHURRIED, VerifyPace

__all__ = ["PageCheck"]

_NUMBER_MAX = 1 << 31
"""Pages of a segment have fewer bits: a product of two larger numbers is wrong in any case."""
_PROBLEMS_MAX = 100


class PageCheck:
    """Compares the rows of pages, as one transaction sees them, with the clusters.

    About 80 bytes per cluster, and none per record.
    """

    def __init__(
        self,
        txn: Transaction,
        databases: Databases,
        geometry: SpaceGeometry,
        state: StateRow,
        *,
        has_garbage: bool,
        pace: VerifyPace = UNHURRIED,
    ) -> None:
        """`has_garbage`: there are clusters that do not count, perhaps. In steps of `pace`.

        Raises:
            CatalogDamagedError: a row cannot be decoded.
            ClosedError: see `VerifyPace.step`.
        """
        self._geometry = geometry
        self._state = state
        self._has_garbage = has_garbage
        with txn.cursor(db=databases.segments) as cursor:
            self._segments = {
                int.from_bytes(key, "big"): SegmentRow.unpack(value) for key, value in cursor
            }
        with txn.cursor(db=databases.pending) as cursor:
            self._pending = [PendingRow.unpack(value) for _, value in cursor]
        with txn.cursor(db=databases.units) as cursor:
            self._units = {int.from_bytes(key, "big"): parse_number(value) for key, value in cursor}
        self._clusters = read_clusters(txn, databases, geometry.header_pages, pace)
        is_garbage = self._of_segments(self._clusters, self._is_row_garbage, 1) != 0
        self._garbage = self._clusters[is_garbage]
        self._living = self._clusters[~is_garbage]
        """Those whose segment is neither dead nor gone."""

    @property
    def record_count(self) -> int:
        """How many records live."""
        return int(self._living["live"].sum())

    def problems(self) -> list[str]:
        """Return the violations in words; empty: the rows are sound.

        At most a hundred of each kind.
        """
        return [
            *islice(self._cluster_problems(), _PROBLEMS_MAX),
            *islice(self._overlap_problems(), _PROBLEMS_MAX),
            *islice(self._segment_problems(), _PROBLEMS_MAX),
            *self._state_problems(),
        ]

    def _cluster_problems(self) -> Iterator[str]:
        """Clusters are as long as their segment says, and laid out as their records need."""
        if not self._has_garbage:
            for key in self._garbage["key"].tolist():
                yield f"cluster {key:#x} lies in a segment that is dead or gone"
        living = self._living
        page_counts = self._of_segments(living, lambda row: row.page_count)
        ends = halves(living)[1] + living["pages"]
        fits = living["segment_pages"] == self._geometry.file_pages(ends, page_counts)  # type: ignore[arg-type]
        for name, most_of, per in (
            ("stride", self._geometry.stride_pages, "payload_bytes"),
            ("extent_records", extent_records_max, "stride"),
        ):
            values, value_of = np.unique(living[per], return_inverse=True)
            most = np.array(list(map(most_of, values.tolist())), np.int64)[value_of]
            if name == "extent_records":
                # A single extent may have fewer, whether or not there was room for more.
                most = np.where(living["count"] <= living[name], living["count"], most)
            fits &= living[name] == most
        for key in living["key"][~fits].tolist():
            yield f"cluster {key:#x} does not fit its segment or its records"

    def _overlap_problems(self) -> Iterator[str]:
        """Runs of pages lie one behind the other, within what their segment has given out."""
        writing = self._writing_extents()
        if self._has_garbage:
            writing = writing[self._of_segments(writing, self._is_row_garbage, 1) == 0]
        given = np.concatenate([self._living, writing])
        given = given[np.argsort(given["key"])]
        segments, firsts = halves(given)
        ends = firsts + given["pages"]
        page_counts = self._of_segments(given, lambda row: row.page_count, -1)
        next_pages = self._of_segments(given, lambda row: row.next_page)
        for at in np.flatnonzero(page_counts < 0).tolist():
            yield f"extent {int(given['key'][at]):#x} lies in an unknown segment"
        overlaps = (segments[1:] == segments[:-1]) & (firsts[1:] < ends[:-1])
        for at in (np.flatnonzero(overlaps) + 1).tolist():
            yield f"extent {int(given['key'][at]):#x} overlaps the one before it"
        beyond = (page_counts >= 0) & ((ends > next_pages) | (next_pages > page_counts))
        for at in np.flatnonzero(beyond).tolist():
            yield f"extent {int(given['key'][at]):#x} reaches beyond what was given out"

    def _segment_problems(self) -> Iterator[str]:
        """A segment's pages, writes and records are the sums of its parts."""
        held, pending, freed = self._held_pages(), self._pending_pages(), self._freed_pages()
        empty = {segment for row in self._pending for segment in row.empty_segments}
        yield from self._count_problems()
        yield from self._unit_problems()
        for segment, row in self._segments.items():
            if row.state == SegmentState.DEAD:
                if segment not in empty and not row.writing_count:
                    yield f"segment {segment} is dead, and is not given back"
                if row.pending_pages > row.charged_pages or (
                    segment in empty and row.pending_pages != row.charged_pages
                ):
                    yield f"segment {segment} is charged {row.charged_pages}, not as said"
                continue
            if row.held_pages != held.get(segment, 0):
                yield f"segment {segment} holds {held.get(segment, 0)}, says {row.held_pages}"
            expected = row.pending_pages
            if segment not in empty:
                expected += row.held_pages + self._rest_pages(row, freed.get(segment, 0))
            if segment not in empty and row.pending_pages != pending.get(segment, 0):
                yield f"segment {segment} has {pending.get(segment, 0)} pages pending, not as said"
            if row.charged_pages != expected:
                yield f"segment {segment} is charged {row.charged_pages}, not {expected}"

    def _count_problems(self) -> Iterator[str]:
        """Segments count what is written to them, and their records."""
        living, writing = self._living, dict[int, int]()
        segments = halves(living)[0]
        records, payload = dict[int, int](), dict[int, int]()
        _add_sums(records, segments, living["live"])
        _add_sums(payload, segments, living["live"] * living["payload_bytes"])
        for pending in self._pending:
            _add_sums(writing, pending.extents["segment"])
        for segment, row in self._segments.items():
            for name, said, found in (
                ("extents being written", row.writing_count, writing.get(segment, 0)),
                ("records", row.record_count, records.get(segment, 0)),
                ("payload bytes", row.payload_bytes, payload.get(segment, 0)),
            ):
                if said != found:
                    yield f"segment {segment}: {name}: accounted {said}, found {found}"

    def _unit_problems(self) -> Iterator[str]:
        """Units of which some pages were freed lie in segments, and hold something yet."""
        for key, count in self._units.items():
            row = self._segments.get(key >> 32)
            if row is None or not 0 < count < self._geometry.unit_pages:
                yield f"unit {key:#x} says that {count} of its pages were freed"

    def _rest_pages(self, row: SegmentRow, freed_pages: int) -> int:
        """Return what a living segment is charged besides what it holds and gives back."""
        pages = self._geometry.charged_end(row.next_page, row.page_count) - row.next_page
        if not self._geometry.unit_pages:
            freed_pages = row.next_page - row.held_pages
        return pages + freed_pages + self._geometry.overhead_pages(row.page_count)

    @staticmethod
    def _is_row_garbage(row: SegmentRow) -> int:
        return int(row.state == SegmentState.DEAD)

    def _of_segments(
        self, given: RowArray, value_of: Callable[[SegmentRow], int], missing: int = 0
    ) -> npt.NDArray[np.int64]:
        """Return a value of the segment row of each run of pages (`SAID`)."""
        unique, at = np.unique(halves(given)[0], return_inverse=True)
        rows = [self._segments.get(segment) for segment in unique.tolist()]
        values = [missing if row is None else value_of(row) for row in rows]
        return np.array(values, np.int64)[at]

    def _state_problems(self) -> Iterator[str]:
        """The sums over all segments and records are those of the state row."""
        rows = self._segments.values()
        if not self._geometry.is_file and any(
            row.rank_count != self._state.rank_count for row in rows
        ):
            yield "segments are divided among other ranks than the tier"
        for name, said, found in (
            (
                "charged pages",
                self._state.charged_pages,
                sum(row.charged_pages * row.rank_count for row in rows),
            ),
            (
                "pending pages",
                self._state.pending_pages,
                sum(row.pending_pages * row.rank_count for row in rows),
            ),
            (
                "payload bytes",
                self._state.payload_bytes,
                int((self._living["live"] * self._living["payload_bytes"]).sum()),
            ),
            (
                "records being written",
                self._state.writing_count,
                sum(int(row.extents["count"].sum()) for row in self._pending),
            ),
            ("records", self._state.record_count, self.record_count),
        ):
            if said != found:
                yield f"{name}: accounted {said}, found {found}"

    def _writing_extents(self) -> RowArray:
        """Return the extents that are being written, as `SAID`."""
        header_pages = self._geometry.header_pages
        given = np.zeros(sum(len(pending.extents) for pending in self._pending), SAID)
        rows = [row for pending in self._pending for row in pending.extents.tolist()]
        for at, (segment, header_page, stride, count) in enumerate(rows):
            given[at]["key"] = extent_key(segment, header_page)
            pages = header_pages + min(count, _NUMBER_MAX) * min(stride, _NUMBER_MAX)
            given[at]["pages"] = given[at]["held"] = pages
        return given

    def _held_pages(self) -> dict[int, int]:
        held: dict[int, int] = {}
        for given in (self._living, self._writing_extents()):
            _add_sums(held, halves(given)[0], given["held"])
        return held

    def _freed_pages(self) -> dict[int, int]:
        """Return per segment what was freed in units that hold something else."""
        pages: dict[int, int] = {}
        for key, count in self._units.items():
            pages[key >> 32] = pages.get(key >> 32, 0) + count
        return pages

    def _pending_pages(self) -> dict[int, int]:
        pages: dict[int, int] = {}
        for pending in self._pending:
            for run in pending.runs:
                segment = int(run["segment"])
                pages[segment] = pages.get(segment, 0) + int(run["page_count"])
        return pages


def _add_sums(
    sums: dict[int, int],
    segments: npt.NDArray[np.uint32] | npt.NDArray[np.int64],
    weights: npt.NDArray[np.int64] | None = None,
) -> None:
    """Add to the sum of each segment what it has of these."""
    unique, at = np.unique(segments, return_inverse=True)
    found = np.zeros(len(unique), np.int64)
    np.add.at(found, at, 1 if weights is None else weights)
    for segment, value in zip(unique.tolist(), found.tolist(), strict=True):
        sums[segment] = sums.get(segment, 0) + value
