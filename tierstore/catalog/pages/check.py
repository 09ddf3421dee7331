"""Verification of a tier's pages: extents, segments and sums recomputed from the records."""

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
import numpy.typing as npt

from tierstore.catalog.pages.order import extent_keys
from tierstore.catalog.pages.said_extents import SAID, halves, read_extents
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
from tierstore.codec.record import EXTENT_RECORDS_MAX
from tierstore.geometry import SpaceGeometry
from tierstore.lmdb_env.library import Transaction
from tierstore.lmdb_env.pace import UNHURRIED, VerifyPace

__all__ = ["PageCheck"]

_NUMBER_MAX = 1 << 31
"""Pages of a segment have fewer bits: a product of two larger numbers is wrong in any case."""
_PROBLEMS_MAX = 100


class PageCheck:
    """Compares the rows of pages, as one transaction sees them, with the records.

    About 40 bytes per extent, and none per record.
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
        """`has_garbage`: there are records that do not count, perhaps. In steps of `pace`.

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
        self._extents = read_extents(txn, databases, pace)
        self._file_pages = self._said_file_pages()
        self._found = np.zeros(len(self._extents), np.int64)
        """How many records each extent has."""
        self._taken = np.zeros(len(self._extents) * EXTENT_RECORDS_MAX, bool)
        """Places in extents that have a record."""
        self._record_count = 0
        self._records: dict[int, int] = {}
        self._payload: dict[int, int] = {}
        self._unknown: dict[int, int] = {}
        """Records without an extent, by its key."""
        self._misplaced: list[str] = []

    def add(self, places: RowArray) -> None:
        """Take the places of some more of the records that count."""
        self._record_count += len(places)
        _add_sums(self._records, places["segment"])
        _add_sums(self._payload, places["segment"], places["payload_bytes"])
        keys = extent_keys(places)
        at = np.searchsorted(self._extents["key"], keys)
        at[at == len(self._extents)] = 0
        known = self._extents["key"][at] == keys if len(self._extents) else np.zeros(len(at), bool)
        if not known.all():
            unknown, counts = np.unique(keys[~known], return_counts=True)
            for key, count in zip(unknown.tolist(), counts.tolist(), strict=True):
                if key in self._unknown or len(self._unknown) < _PROBLEMS_MAX:
                    self._unknown[key] = self._unknown.get(key, 0) + count
            keys, at, places = keys[known], at[known], places[known]
        np.add.at(self._found, at, 1)
        fits = self._fits(at, places)
        for key in keys[~fits][:_PROBLEMS_MAX].tolist():
            self._complain(f"a record does not fit its extent {key:#x}")
        slots = at[fits] * EXTENT_RECORDS_MAX + places["index"][fits]
        if self._taken[slots].any() or len(np.unique(slots)) < len(slots):
            self._complain("two records share a place")
        self._taken[slots] = True

    def problems(self) -> list[str]:
        """Return the violations in words, when all records were added; empty: the rows are sound.

        At most a hundred of each kind.
        """
        return [
            *self._misplaced,
            *islice(self._extent_problems(), _PROBLEMS_MAX),
            *islice(self._overlap_problems(), _PROBLEMS_MAX),
            *islice(self._segment_problems(), _PROBLEMS_MAX),
            *self._state_problems(),
        ]

    def _complain(self, problem: str) -> None:
        if len(self._misplaced) < _PROBLEMS_MAX:
            self._misplaced.append(problem)

    def _fits(self, at: npt.NDArray[np.intp], places: RowArray) -> npt.NDArray[np.bool_]:
        """Return of each record whether it is as its extent says."""
        said = self._extents[at]
        sizes, size_of = np.unique(places["payload_bytes"], return_inverse=True)
        strides = np.array(list(map(self._geometry.stride_pages, sizes.tolist())), np.int64)
        fits: npt.NDArray[np.bool_] = places["segment_pages"] == self._file_pages[at]
        fits &= places["stride_pages"] == said["stride"]
        fits &= places["index"] < np.minimum(said["count"], EXTENT_RECORDS_MAX)
        fits &= strides[size_of] == said["stride"]
        return fits

    def _said_file_pages(self) -> npt.NDArray[np.int64]:
        """Return how long the file of each extent has to be; 0: its segment is gone."""
        extents = self._extents
        page_counts = self._of_segments(extents, lambda row: row.page_count)
        ends = halves(extents)[1] + self._pages_of(extents)
        pages = self._geometry.file_pages(ends, page_counts)  # type: ignore[arg-type]
        return np.where(page_counts, pages, 0)

    def _extent_problems(self) -> Iterator[str]:
        """Every record lies in a known extent, and extents count their records rightly."""
        for key, count in self._unknown.items():
            if self._is_garbage(key >> 32):
                yield f"{count} records lie in a segment that is dead or gone"
            else:
                yield f"{count} records lie in the unknown extent {key:#x}"
        extents, found = self._extents, self._found
        is_garbage = self._of_segments(extents, self._is_row_garbage, 1) != 0
        wrong = np.where(
            is_garbage, (found > 0) | (not self._has_garbage), extents["live"] != found
        )
        for at in np.flatnonzero(wrong).tolist():
            key, count = int(extents["key"][at]), int(found[at])
            if not is_garbage[at]:
                yield f"extent {key:#x} counts {extents['live'][at]} records, has {count}"
            elif count:
                yield f"{count} records lie in a segment that is dead or gone"
            else:
                yield f"extent {key:#x} lies in a segment that is dead or gone"

    def _overlap_problems(self) -> Iterator[str]:
        """Extents lie one behind the other, within what their segment has given out."""
        extents = np.concatenate([self._extents, self._writing_extents()])
        extents = extents[np.argsort(extents["key"])]
        if self._has_garbage:
            extents = extents[self._of_segments(extents, self._is_row_garbage, 1) == 0]
        segments, firsts = halves(extents)
        ends = firsts + self._pages_of(extents)
        page_counts = self._of_segments(extents, lambda row: row.page_count, -1)
        next_pages = self._of_segments(extents, lambda row: row.next_page)
        for at in np.flatnonzero(page_counts < 0).tolist():
            yield f"extent {int(extents['key'][at]):#x} lies in an unknown segment"
        overlaps = (segments[1:] == segments[:-1]) & (firsts[1:] < ends[:-1])
        for at in (np.flatnonzero(overlaps) + 1).tolist():
            yield f"extent {int(extents['key'][at]):#x} overlaps the one before it"
        beyond = (page_counts >= 0) & ((ends > next_pages) | (next_pages > page_counts))
        for at in np.flatnonzero(beyond).tolist():
            yield f"extent {int(extents['key'][at]):#x} reaches beyond what was given out"

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
        writing: dict[int, int] = {}
        for pending in self._pending:
            _add_sums(writing, pending.extents["segment"])
        for segment, row in self._segments.items():
            for name, said, found in (
                ("extents being written", row.writing_count, writing.get(segment, 0)),
                ("records", row.record_count, self._records.get(segment, 0)),
                ("payload bytes", row.payload_bytes, self._payload.get(segment, 0)),
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

    def _is_garbage(self, segment: int) -> bool:
        row = self._segments.get(segment)
        return row is None or row.state == SegmentState.DEAD

    @staticmethod
    def _is_row_garbage(row: SegmentRow) -> int:
        return int(row.state == SegmentState.DEAD)

    def _of_segments(
        self, extents: RowArray, value_of: Callable[[SegmentRow], int], missing: int = 0
    ) -> npt.NDArray[np.int64]:
        """Return a value of the segment row of each extent."""
        unique, at = np.unique(halves(extents)[0], return_inverse=True)
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
            ("payload bytes", self._state.payload_bytes, sum(self._payload.values())),
            (
                "records being written",
                self._state.writing_count,
                sum(int(row.extents["count"].sum()) for row in self._pending),
            ),
            ("records", self._state.record_count, self._record_count),
        ):
            if said != found:
                yield f"{name}: accounted {said}, found {found}"

    def _writing_extents(self) -> RowArray:
        """Return the extents that are being written, as `SAID`."""
        rows = [
            (extent_key(segment, header_page), count, count, stride)
            for pending in self._pending
            for segment, header_page, stride, count in pending.extents.tolist()
        ]
        return np.array(rows, SAID)

    def _pages_of(self, extents: RowArray, counts: str = "count") -> npt.NDArray[np.int64]:
        """Return the pages of each extent, with as many records as a field says."""
        records = np.minimum(extents[counts], _NUMBER_MAX)
        pages: npt.NDArray[np.int64] = records * np.minimum(extents["stride"], _NUMBER_MAX)
        return pages + self._geometry.header_pages

    def _held_pages(self) -> dict[int, int]:
        held: dict[int, int] = {}
        for extents in (self._extents, self._writing_extents()):
            _add_sums(held, halves(extents)[0], self._pages_of(extents, "live"))
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
