"""Pages of a tier within one write transaction: who holds them, and what they cost.

A page is never used twice: segments are appended to and then released. Pages of evicted or aborted
records stay charged until every rank has given them back. Where the file system takes back larger
units only (`BlockUnits`), they stay charged until all of their unit is free, and was given back.
"""

import numpy as np
import numpy.typing as npt

from tierstore.catalog.pages.budget import Budget, CatalogSize
from tierstore.catalog.pages.extents import coalesce, extent_records_max, fit_count, laid_out_pages
from tierstore.catalog.pages.freed_units import FreedUnits
from tierstore.catalog.pages.pending import PendingRows
from tierstore.catalog.rows import (
    EXTENT_DTYPE,
    RUN_DTYPE,
    Databases,
    ExtentRow,
    PendingRow,
    RowArray,
    SegmentRow,
    SegmentState,
    StateRow,
    extent_key,
    segment_key,
    wide_key,
)
from tierstore.errors import CatalogDamagedError
from tierstore.geometry import SpaceGeometry
from tierstore.lmdb_env.library import Database, Transaction

__all__ = ["Space"]

_STATE_KEY = b"state"

_LMDB_AHEAD_SHARE = 64
"""Part of the space that an lmdb tier keeps free, so that writes need not wait for evictions."""


class Space:
    """The space rows of one transaction, read on first use and written back by `flush`."""

    def __init__(
        self,
        txn: Transaction,
        databases: Databases,
        geometry: SpaceGeometry,
        *,
        size: CatalogSize,
        owner: int,
        active: int | None,
    ) -> None:
        self._txn = txn
        self._databases = databases
        self._geometry = geometry
        self.owner = owner
        self.active = active
        """The segment that this owner appends to; the caller keeps it between transactions."""
        state = self.read_state(txn, databases)
        if state is None:
            raise CatalogDamagedError("the state row is missing")
        self.state = state
        self.pending = PendingRows(txn, databases, state)
        self._units = FreedUnits(txn, databases, geometry.unit_pages)
        self.budget = Budget.measure(txn, databases, geometry, state, size=size)
        self._stored_state = state.pack()
        self._segments: dict[int, SegmentRow | None] = {}
        self._extents: dict[int, ExtentRow | None] = {}
        self._freed: list[RowArray] = []
        self._shrunk: set[int] = set()

    @staticmethod
    def write_state(txn: Transaction, databases: Databases, state: StateRow) -> None:
        """Store the state row."""
        txn.put(_STATE_KEY, state.pack(), db=databases.state)

    @staticmethod
    def read_state(txn: Transaction, databases: Databases) -> StateRow | None:
        """Return the state row; None in a new catalog."""
        value = txn.get(_STATE_KEY, db=databases.state)
        return None if value is None else StateRow.unpack(value)

    @staticmethod
    def read_version(txn: Transaction, databases: Databases) -> int | None:
        """Return the version of the rows, which all versions say first; None in a new catalog.

        Raises:
            CatalogDamagedError: the row is of this version, and says another one.
        """
        value = txn.get(_STATE_KEY, db=databases.state)
        return None if value is None else StateRow.read_version(value)

    @staticmethod
    def is_in_use(txn: Transaction, databases: Databases, segment: int) -> bool:
        """Return whether records lie in a segment, or are written, as a transaction finds it."""
        value = txn.get(segment_key(segment), db=databases.segments)
        row = None if value is None else SegmentRow.unpack(value)
        return row is not None and bool(row.record_count or row.writing_count)

    def segment(self, segment: int) -> SegmentRow:
        """Return the row of a segment, to be changed in place.

        Raises:
            CatalogDamagedError: there is none.
        """
        row = self.find_segment(segment)
        if row is None:
            raise CatalogDamagedError(f"segment {segment} is unknown")
        return row

    def find_segment(self, segment: int) -> SegmentRow | None:
        """Return the row of a segment, to be changed in place, if there is one."""
        if segment not in self._segments:
            value = self._txn.get(segment_key(segment), db=self._databases.segments)
            self._segments[segment] = None if value is None else SegmentRow.unpack(value)
        return self._segments[segment]

    def charge_of(self, namespace: bytes, count: int, stride_pages: int) -> int:
        """Return the pages on all ranks that `count` records would cost now."""
        geometry = self._geometry
        header_pages, pages = geometry.header_pages, 0
        active = self._usable(namespace)
        if active is not None:
            room = active.page_count - active.next_page
            fit = min(count, fit_count(room, stride_pages, header_pages))
            used = laid_out_pages(fit, stride_pages, header_pages)
            pages = geometry.charged_end(active.next_page + used, active.page_count)
            pages -= geometry.charged_end(active.next_page, active.page_count)
            count -= fit
        if count:
            segment_pages = self._new_segment_pages(stride_pages)
            fit = fit_count(segment_pages, stride_pages, header_pages)
            full_count, rest = divmod(count, fit)
            for records, segments in ((fit, full_count), (rest, min(rest, 1))):
                used = laid_out_pages(records, stride_pages, header_pages)
                end = geometry.charged_end(used, segment_pages)
                pages += segments * (end + geometry.overhead_pages(segment_pages))
        return pages * geometry.rank_count

    def free_pages(self) -> int:
        """Return the pages on all ranks that may be charged, less than none if there are too many.

        Rows of what this transaction has placed come later, and are reckoned with now.
        """
        return self.budget.free_pages(self.state)

    def ahead_pages(self) -> int:
        """Return the pages on all ranks that should be free, so that the next writes do not wait.

        Grows while the active segment fills: when it is full, there is room for the next.
        """
        geometry = self._geometry
        if not geometry.is_file:
            return self.budget.space_pages // _LMDB_AHEAD_SHARE
        share_pages = geometry.share_pages(self.budget.capacity_bytes, self.budget.owner_count)
        row = None if self.active is None else self.find_segment(self.active)
        if row is None or row.state != SegmentState.ACTIVE:
            return self._segment_charge(geometry.units.whole(share_pages))
        overhead = geometry.overhead_pages(row.page_count)
        next_charge = self._segment_charge(min(row.page_count, geometry.units.whole(share_pages)))
        if not geometry.charges_segments:
            return next_charge
        return min(next_charge, (row.next_page + overhead) * row.rank_count)

    def allocate(self, namespace: bytes, count: int, stride_pages: int) -> RowArray:
        """Lay out `count` records in as few extents as possible (`EXTENT_DTYPE`) and charge them.

        The caller has made sure that `charge_of` fits.
        """
        extents = []
        while count:
            fit = 0
            row = self._usable(namespace)
            if row is not None:
                room = row.page_count - row.next_page - self._geometry.header_pages
                fit = min(count, extent_records_max(stride_pages), max(0, room) // stride_pages)
            if row is None or fit == 0:
                self._open_segment(namespace, self._new_segment_pages(stride_pages))
                continue
            extents.append((self.active, row.next_page, stride_pages, fit))
            row.writing_count += 1
            pages = self._geometry.header_pages + fit * stride_pages
            charged = self._geometry.charged_end(row.next_page + pages, row.page_count)
            charged -= self._geometry.charged_end(row.next_page, row.page_count)
            row.next_page += pages
            row.held_pages += pages
            row.charged_pages += charged
            self.state.charged_pages += charged * row.rank_count
            count -= fit
        laid_out = np.array(extents, EXTENT_DTYPE)
        self.state.writing_count += int(laid_out["count"].sum())
        return laid_out

    def end_writing(self, extents: RowArray) -> RowArray:
        """Note that extents are not being written any more; return those in living segments.

        A dead segment goes when the last of them has ended.
        """
        self.state.writing_count -= int(extents["count"].sum())
        if self.state.writing_count < 0:
            raise CatalogDamagedError("more records end being written than began")
        living: npt.NDArray[np.bool_] = np.ones(len(extents), bool)
        for index, segment in enumerate(extents["segment"].tolist()):
            row = self.segment(segment)
            if row.writing_count == 0:
                raise CatalogDamagedError(f"segment {segment} is not being written")
            row.writing_count -= 1
            if row.state == SegmentState.DEAD:
                living[index] = False
                self._shrunk.add(segment)
        kept: RowArray = extents[living]
        return kept

    def add_extents(self, extents: RowArray) -> None:
        """Make written extents known with all their records; failed ones are freed afterwards."""
        for extent in extents:
            key = extent_key(int(extent["segment"]), int(extent["header_page"]))
            count = int(extent["count"])
            self._extents[key] = ExtentRow(count, count, int(extent["stride_pages"]))

    def count_in(self, places: RowArray) -> None:
        """Count records that were published."""
        self._count(places, 1)

    def count_out(self, places: RowArray) -> None:
        """Count records that are gone."""
        self._count(places, -1)

    def free_extents(self, extents: RowArray) -> None:
        """Free whole extents that never became records."""
        if not len(extents):
            return
        runs = np.empty(len(extents), RUN_DTYPE)
        runs["segment"] = extents["segment"]
        runs["first_page"] = extents["header_page"]
        runs["page_count"] = (
            self._geometry.header_pages + extents["count"] * extents["stride_pages"]
        )
        self._free(runs)

    def free_places(self, places: RowArray) -> None:
        """Free records that are gone from the catalog, and headers whose last record goes."""
        header_pages = self._geometry.header_pages
        runs = np.empty(len(places), RUN_DTYPE)
        runs["segment"] = places["segment"]
        runs["first_page"] = (
            places["header_page"] + header_pages + places["index"] * places["stride_pages"]
        )
        runs["page_count"] = places["stride_pages"]
        keys = places["segment"].astype(np.uint64) << np.uint64(32) | places["header_page"]
        unique, counts = np.unique(keys, return_counts=True)
        headers = []
        for key, count in zip(unique.tolist(), counts.tolist(), strict=True):
            row = self._extent(key)
            if row.live_count < count:
                raise CatalogDamagedError(f"extent {key:#x} frees too many")
            row.live_count -= count
            if row.live_count == 0:
                self._extents[key] = None
                headers.append((key >> 32, key & 0xFFFFFFFF, 1))
        if headers and header_pages:
            runs = np.concatenate([runs, np.array(headers, RUN_DTYPE)])
        self._free(runs)

    def close_segment(self, segment: int) -> None:
        """Append no more to a segment. Its tail stays charged until `trim_segment`."""
        self.segment(segment).state = SegmentState.CLOSED
        self._shrunk.add(segment)

    def trim_segment(self, segment: int) -> None:
        """Free the unwritten tail of a closed segment, as far as it is charged.

        Only when no first write can follow that would preallocate the file again, after the tail
        was given back: once a record in it was committed, or when its owner is dead.
        """
        row = self.segment(segment)
        first = row.next_page
        tail = self._geometry.charged_end(first, row.page_count) - first
        if row.state == SegmentState.CLOSED and tail:
            row.held_pages += tail
            row.next_page += tail
            self._free(np.array([(segment, first, tail)], RUN_DTYPE))

    def kill_segments(self, namespace: bytes) -> None:
        """Take all segments of a namespace, with their records, out of the tier. O(segments).

        Each is given back whole as soon as nobody writes to it.
        """
        for segment, found in self.all_segments():
            if found.namespace != namespace:
                continue
            row = self.segment(segment)
            is_going = row.state == SegmentState.CLOSED and not row.held_pages
            if row.state == SegmentState.DEAD or is_going:
                continue
            self.state.record_count -= row.record_count
            self.state.payload_bytes -= row.payload_bytes
            row.record_count = row.payload_bytes = 0
            row.state = SegmentState.DEAD
            self._shrunk.add(segment)

    def all_segments(self) -> list[tuple[int, SegmentRow]]:
        """Return the rows of all segments, to be read only."""
        with self._txn.cursor(db=self._databases.segments) as cursor:
            stored = {int.from_bytes(key, "big"): value for key, value in cursor}
        rows = {s: SegmentRow.unpack(v) for s, v in stored.items() if s not in self._segments}
        changed = {s: row for s, row in self._segments.items() if row is not None}
        return sorted((rows | changed).items())

    def emit(self) -> tuple[int, PendingRow] | None:
        """Store what was freed since the last call as one pending row; None: nothing was."""
        empty = [segment for segment in sorted(self._shrunk) if self._mark_empty(segment)]
        runs = np.concatenate(self._freed) if self._freed else np.empty(0, RUN_DTYPE)
        if empty:
            runs = runs[~np.isin(runs["segment"], empty)]
        self._freed, self._shrunk = [], set()
        if not len(runs) and not empty:
            return None
        row = PendingRow(self.owner, runs=coalesce(runs), empty_segments=empty)
        return self.pending.add(row), row

    def release(self, pending_id: int) -> None:
        """Uncharge what a pending row names: every rank has given it back."""
        pending = self.pending.find(pending_id)
        if pending is None or len(pending.extents):
            return
        self.pending.remove(pending_id)
        for segment, pages in _pages_by_segment(pending.runs):
            row = self.find_segment(segment)
            if row is not None:
                self._uncharge(row, pages)
        for segment in pending.empty_segments:
            row = self.find_segment(segment)
            if row is not None:
                self._uncharge(row, row.charged_pages)
                self._segments[segment] = None

    def flush(self) -> None:
        """Write the changed rows into the transaction."""
        for segment, segment_row in self._segments.items():
            self._store(self._databases.segments, segment_key(segment), segment_row)
        for key, extent_row in self._extents.items():
            self._store(self._databases.extents, wide_key(key), extent_row)
        if self.state.pack() != self._stored_state:  # else an idle transaction would write pages
            self.write_state(self._txn, self._databases, self.state)

    def _store(self, database: Database, key: bytes, row: SegmentRow | ExtentRow | None) -> None:
        if row is None:
            self._txn.delete(key, db=database)
        else:
            value = row.pack()
            if value != self._txn.get(key, db=database):
                self._txn.put(key, value, db=database)

    def _usable(self, namespace: bytes) -> SegmentRow | None:
        """Return the active segment if it may take records of a namespace.

        Not after a reset, of which another process may not even have heard.
        """
        row = None if self.active is None else self.find_segment(self.active)
        if row is None or row.state != SegmentState.ACTIVE or row.namespace != namespace:
            return None
        return row

    def _new_segment_pages(self, stride_pages: int) -> int:
        budget = self.budget
        return self._geometry.segment_pages(budget.capacity_bytes, budget.owner_count, stride_pages)

    def _segment_charge(self, segment_pages: int) -> int:
        pages = segment_pages + self._geometry.overhead_pages(segment_pages)
        return pages * self._geometry.rank_count

    def _open_segment(self, namespace: bytes, page_count: int) -> None:
        active = None if self.active is None else self.find_segment(self.active)
        if self.active is not None and active is not None and active.state == SegmentState.ACTIVE:
            self.close_segment(self.active)
        row = SegmentRow(self.owner, self._geometry.rank_count, page_count, namespace)
        row.charged_pages = self._geometry.charged_end(0, page_count)
        row.charged_pages += self._geometry.overhead_pages(page_count)
        self.active = self.state.next_segment
        self.state.next_segment += 1
        self.state.charged_pages += row.charged_pages * row.rank_count
        self._segments[self.active] = row

    def _count(self, places: RowArray, sign: int) -> None:
        segments, inverse = np.unique(places["segment"], return_inverse=True)
        counts = np.bincount(inverse).tolist()
        payloads = np.bincount(inverse, weights=places["payload_bytes"]).astype(np.int64).tolist()
        for segment, count, payload in zip(segments.tolist(), counts, payloads, strict=True):
            row = self.segment(segment)
            row.record_count += sign * count
            row.payload_bytes += sign * payload
            self.state.record_count += sign * count
            self.state.payload_bytes += sign * payload
            if row.record_count < 0 or row.payload_bytes < 0:
                raise CatalogDamagedError(f"segment {segment} loses more records than it has")

    def _extent(self, key: int) -> ExtentRow:
        row = self._extents.get(key)
        if row is None:
            value = self._txn.get(wide_key(key), db=self._databases.extents)
            if value is None or key in self._extents:
                raise CatalogDamagedError(f"extent {key:#x} is unknown")
            row = self._extents[key] = ExtentRow.unpack(value)
        return row

    def _free(self, runs: RowArray) -> None:
        for segment, pages in _pages_by_segment(runs):
            row = self.segment(segment)
            if row.held_pages < pages:
                raise CatalogDamagedError(f"segment {segment} frees too much")
            row.held_pages -= pages
            self._shrunk.add(segment)
        freed = self._units.free(runs)
        self._freed.append(freed)
        for segment, pages in _pages_by_segment(freed):
            self._add_pending_pages(self.segment(segment), pages)
        if not self._geometry.unit_pages:
            # At once: whoever evicts until enough is pending would go on, and empty the tier.
            for segment in np.unique(runs["segment"]).tolist():
                self._mark_empty(segment)

    def _mark_empty(self, segment: int) -> bool:
        """Return whether a segment holds nothing any more; then all of it is pending."""
        row = self.segment(segment)
        if row.state == SegmentState.DEAD:
            is_empty = not row.writing_count
        else:
            is_empty = row.state == SegmentState.CLOSED and not row.held_pages
        if not is_empty:
            return False
        self._add_pending_pages(row, row.charged_pages - row.pending_pages)
        self._units.drop(segment)
        return True

    def _add_pending_pages(self, row: SegmentRow, pages: int) -> None:
        row.pending_pages += pages
        self.state.pending_pages += pages * row.rank_count

    def _uncharge(self, row: SegmentRow, pages: int) -> None:
        if min(row.pending_pages, row.charged_pages) < pages:
            raise CatalogDamagedError(f"a release of {pages} pages exceeds what is pending")
        row.pending_pages -= pages
        row.charged_pages -= pages
        self.state.pending_pages -= pages * row.rank_count
        self.state.charged_pages -= pages * row.rank_count


def _pages_by_segment(runs: RowArray) -> list[tuple[int, int]]:
    segments, inverse = np.unique(runs["segment"], return_inverse=True)
    sums = np.bincount(inverse, weights=runs["page_count"]).astype(np.int64)
    return list(zip(segments.tolist(), sums.tolist(), strict=True))
