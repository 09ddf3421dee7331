"""Verification of a tier's pages: extents, segments and sums recomputed from the records."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tierstore.catalog.pages.extent_row import ExtentRow
from tierstore.catalog.pages.order import extent_keys
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

__all__ = ["PageCheck"]

_NO_SEGMENTS = np.empty(0, np.uint32)


class PageCheck:
    """Compares the rows of pages, as one transaction sees them, with the records."""

    def __init__(
        self,
        txn: Transaction,
        databases: Databases,
        geometry: SpaceGeometry,
        state: StateRow,
        places: RowArray,
        *,
        has_garbage: bool,
    ) -> None:
        """`places` are those of the records that count; `has_garbage`: there are others, perhaps.

        Raises:
            CatalogDamagedError: a row cannot be decoded.
        """
        self._geometry = geometry
        self._state = state
        self._places = places
        self._has_garbage = has_garbage
        with txn.cursor(db=databases.segments) as cursor:
            self._segments = {
                int.from_bytes(key, "big"): SegmentRow.unpack(value) for key, value in cursor
            }
        with txn.cursor(db=databases.extents) as cursor:
            self._extents = {
                int.from_bytes(key, "big"): ExtentRow.unpack(value) for key, value in cursor
            }
        with txn.cursor(db=databases.pending) as cursor:
            self._pending = [PendingRow.unpack(value) for _, value in cursor]
        with txn.cursor(db=databases.units) as cursor:
            self._units = {int.from_bytes(key, "big"): parse_number(value) for key, value in cursor}

    def problems(self) -> list[str]:
        """Return the violations in words; empty when the rows are sound."""
        return [
            *self._record_problems(),
            *self._overlap_problems(),
            *self._segment_problems(),
            *self._state_problems(),
        ]

    def _record_problems(self) -> Iterator[str]:
        """Every record lies in a known extent, and extents count their records rightly."""
        places = self._places
        keys = extent_keys(places)
        unique, counts = np.unique(keys, return_counts=True)
        live = dict(zip(unique.tolist(), counts.tolist(), strict=True))
        for key in live.keys() | self._extents.keys():
            row = self._extents.get(key)
            if self._is_garbage(key >> 32):
                if key in live:
                    yield f"{live[key]} records lie in a segment that is dead or gone"
                elif not self._has_garbage:
                    yield f"extent {key:#x} lies in a segment that is dead or gone"
            elif row is None:
                yield f"{live[key]} records lie in the unknown extent {key:#x}"
            elif row.live_count != live.get(key, 0):
                yield f"extent {key:#x} counts {row.live_count} records, has {live.get(key, 0)}"
        slots = np.lexsort((places["index"], keys))
        twins = (np.diff(keys[slots]) == 0) & (
            np.diff(places["index"][slots].astype(np.int64)) == 0
        )
        if twins.any():
            yield "two records share a place"
        for index in self._misfits(unique, keys, places).tolist():
            yield f"a record does not fit its extent {int(keys[index]):#x}"

    def _misfits(
        self, unique: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64], places: RowArray
    ) -> npt.NDArray[np.intp]:
        """Return the indices of records that are not as their known extents say."""
        rows = [self._extents.get(key) for key in unique.tolist()]
        said = np.array(
            [
                (True, row.stride_pages, row.record_count, self._file_pages(key, row))
                if row
                else (False, 0, 0, 0)
                for key, row in zip(unique.tolist(), rows, strict=True)
            ],
            [("known", "?"), ("stride", "<i8"), ("count", "<i8"), ("file_pages", "<i8")],
        )[np.searchsorted(unique, keys)]
        sizes, size_of = np.unique(places["payload_bytes"], return_inverse=True)
        strides = np.array(list(map(self._geometry.stride_pages, sizes.tolist())), np.int64)
        return np.flatnonzero(
            said["known"]
            & (
                (places["segment_pages"] != said["file_pages"])
                | (places["stride_pages"] != said["stride"])
                | (places["index"] >= said["count"])
                | (strides[size_of] != said["stride"])
            )
        )

    def _overlap_problems(self) -> Iterator[str]:
        """Extents lie one behind the other, within what their segment has given out."""
        ends: dict[int, int] = {}
        for key, page_count in sorted(self._all_extents()):
            segment, first_page = key >> 32, key & 0xFFFFFFFF
            row = self._segments.get(segment)
            if self._is_garbage(segment) and self._has_garbage:
                continue
            if row is None:
                yield f"extent {key:#x} lies in an unknown segment"
                continue
            if first_page < ends.get(segment, 0):
                yield f"extent {key:#x} overlaps the one before it"
            ends[segment] = first_page + page_count
            if ends[segment] > row.next_page or row.next_page > row.page_count:
                yield f"extent {key:#x} reaches beyond what was given out"

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
        writing = _sums(
            np.concatenate([row.extents["segment"] for row in self._pending] or [_NO_SEGMENTS])
        )
        places = self._places
        records = _sums(places["segment"])
        payload = _sums(places["segment"], places["payload_bytes"])
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

    def _is_garbage(self, segment: int) -> bool:
        row = self._segments.get(segment)
        return row is None or row.state == SegmentState.DEAD

    def _file_pages(self, key: int, extent: ExtentRow) -> int:
        row = self._segments.get(key >> 32)
        end = (key & 0xFFFFFFFF) + self._extent_pages(extent.record_count, extent.stride_pages)
        return 0 if row is None else self._geometry.file_pages(end, row.page_count)

    def _state_problems(self) -> Iterator[str]:
        """The sums over all segments and records are those of the state row."""
        rows = self._segments.values()
        payload = self._places["payload_bytes"].sum(dtype=np.int64)
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
            ("payload bytes", self._state.payload_bytes, int(payload)),
            (
                "records being written",
                self._state.writing_count,
                sum(int(row.extents["count"].sum()) for row in self._pending),
            ),
            ("records", self._state.record_count, len(self._places)),
        ):
            if said != found:
                yield f"{name}: accounted {said}, found {found}"

    def _all_extents(self) -> Iterator[tuple[int, int]]:
        for key, row in self._extents.items():
            yield key, self._extent_pages(row.record_count, row.stride_pages)
        for pending in self._pending:
            for extent in pending.extents:
                key = extent_key(int(extent["segment"]), int(extent["header_page"]))
                yield key, self._extent_pages(int(extent["count"]), int(extent["stride_pages"]))

    def _extent_pages(self, record_count: int, stride_pages: int) -> int:
        return self._geometry.header_pages + record_count * stride_pages

    def _held_pages(self) -> dict[int, int]:
        held: dict[int, int] = {}
        for key, row in self._extents.items():
            pages = self._extent_pages(row.live_count, row.stride_pages)
            held[key >> 32] = held.get(key >> 32, 0) + pages
        for pending in self._pending:
            for extent in pending.extents:
                segment = int(extent["segment"])
                pages = self._extent_pages(int(extent["count"]), int(extent["stride_pages"]))
                held[segment] = held.get(segment, 0) + pages
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


def _sums(
    segments: npt.NDArray[np.uint32], weights: npt.NDArray[np.uint32] | None = None
) -> dict[int, int]:
    unique, inverse = np.unique(segments, return_inverse=True)
    sums = np.bincount(inverse, weights=weights, minlength=len(unique)).astype(np.int64)
    return dict(zip(unique.tolist(), sums.tolist(), strict=True))
