"""Pages of a tier within one write transaction: what holds them, and what they cost.

A page is never used twice: segments are appended to and then released. Pages of evicted or aborted
records stay charged until every rank has given them back. Where the file system takes back larger
units only (`BlockUnits`), they stay charged until all of their unit is free, and was given back.
"""

import numpy as np

from tierstore.catalog.pages.budget import Budget, read_owners
from tierstore.catalog.pages.cached_rows import CachedRows
from tierstore.catalog.pages.cluster_row import ClusterRow
from tierstore.catalog.pages.extents import (
    coalesce,
    extent_records_max,
    fit_count,
    laid_out_pages,
)
from tierstore.catalog.pages.file_size import FileSize
from tierstore.catalog.pages.freed_units import FreedUnits
from tierstore.catalog.pages.order import Order
from tierstore.catalog.pages.pending import PendingRows
from tierstore.catalog.pages.segments import Segments, by_segment
from tierstore.catalog.pages.state import LastWrite, read_state, write_state
from tierstore.catalog.rows import (
    EXTENT_DTYPE,
    RUN_DTYPE,
    Databases,
    PendingRow,
    RowArray,
    SegmentRow,
    SegmentState,
    StateRow,
    wide_key,
)
from tierstore.errors import CatalogDamagedError
from tierstore.geometry import SpaceGeometry
from tierstore.lmdb_env.library import Transaction

__all__ = ["Space"]

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
        size: FileSize,
        owner: int,
        active: int | None,
        last: LastWrite | None = None,
    ) -> None:
        """`last` has the rows that need not be read again."""
        self._txn = txn
        self._databases = databases
        self._geometry = geometry
        self.owner = owner
        self.active = active
        """The segment that this owner appends to; the caller keeps it between transactions."""
        stored = None if last is None else last.state
        state = read_state(txn, databases) if stored is None else StateRow.unpack(stored)
        self.state = state
        self.owners = read_owners(txn, databases) if last is None else last.owners
        self.pending = PendingRows(txn, databases, state)
        self._units = FreedUnits(txn, databases, geometry.unit_pages)
        catalog_size = size.recount(txn, state, is_known=last is not None)
        self.budget = Budget.measure(geometry, state, self.owners, size=catalog_size)
        self._stored_state = state.pack()
        self.segments = Segments(txn, databases, state, {} if last is None else last.segments)
        self.clusters = CachedRows(txn, databases.clusters, wide_key, ClusterRow.unpack)
        self.order = Order(txn, databases, state, self.clusters)
        self.written_state: bytes | None = None
        """The state row that `flush` has written; None: it is as it was."""
        self._freed: list[RowArray] = []
        self._shrunk: set[int] = set()

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

        Rows of what this transaction has placed come later, and are counted now.
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
        row = None if self.active is None else self.segments.find(self.active)
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
            self.segments.charge(row, charged)
            count -= fit
        laid_out = np.array(extents, EXTENT_DTYPE)
        self.state.writing_count += sum(count for *_, count in extents)
        return laid_out

    def end_writing(self, extents: RowArray) -> RowArray:
        """Note that extents are no longer being written; return those in living segments.

        A dead segment goes when the last of them has ended.
        """
        self.state.writing_count -= sum(extents["count"].tolist())
        if self.state.writing_count < 0:
            raise CatalogDamagedError("more records end being written than began")
        living = [True] * len(extents)
        for index, segment in enumerate(extents["segment"].tolist()):
            row = self.segments.row(segment)
            if row.writing_count == 0:
                raise CatalogDamagedError(f"segment {segment} is not being written")
            row.writing_count -= 1
            if row.state == SegmentState.DEAD:
                living[index] = False
                self._shrunk.add(segment)
        if all(living):
            return extents
        kept: RowArray = extents[np.array(living)]
        return kept

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

    def free_records(self, cluster: int, row: ClusterRow, bits: int, live_bits: int) -> None:
        """Free the pages of records, with the headers of extents in which none lives any more."""
        runs = row.page_runs(cluster, bits, live_bits, self._geometry.header_pages)
        self._free(np.array(list(runs), RUN_DTYPE))

    def close_segment(self, segment: int) -> None:
        """Append no more to a segment. Its tail stays charged until `trim_segment`."""
        self.segments.row(segment).state = SegmentState.CLOSED
        self._shrunk.add(segment)

    def trim_segment(self, segment: int) -> None:
        """Free the unwritten tail of a closed segment, as far as it is charged.

        Only when no first write can follow that would preallocate the file again, after the tail
        was given back: once a record in it was committed, or when its owner is dead.
        """
        row = self.segments.row(segment)
        first = row.next_page
        tail = self._geometry.charged_end(first, row.page_count) - first
        if row.state == SegmentState.CLOSED and tail:
            row.held_pages += tail
            row.next_page += tail
            self._free(np.array([(segment, first, tail)], RUN_DTYPE))

    def kill_segments(self, namespace: bytes) -> None:
        """Take all segments of a namespace, with their records, out of the tier. O(segments).

        Each is given back whole as soon as nothing is being written to it.
        """
        for segment, found in self.segments.all():
            if found.namespace != namespace:
                continue
            row = self.segments.row(segment)
            is_going = row.state == SegmentState.CLOSED and not row.held_pages
            if row.state == SegmentState.DEAD or is_going:
                continue
            self.segments.forget_records(row)
            row.state = SegmentState.DEAD
            self._shrunk.add(segment)

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
            self.segments.uncharge(segment, pages)
        for segment in pending.empty_segments:
            self.segments.remove(segment)

    def flush(self) -> None:
        """Write the changed rows into the transaction."""
        self.segments.flush()
        self.clusters.flush()
        value = self.state.pack()
        if value != self._stored_state:  # else an idle transaction would write pages
            write_state(self._txn, self._databases, self.state)
            self.written_state = value

    def _usable(self, namespace: bytes) -> SegmentRow | None:
        """Return the active segment if it may take records of a namespace.

        Not after a reset, of which another process may not even have heard.
        """
        row = None if self.active is None else self.segments.find(self.active)
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
        active = None if self.active is None else self.segments.find(self.active)
        if self.active is not None and active is not None and active.state == SegmentState.ACTIVE:
            self.close_segment(self.active)
        row = SegmentRow(self.owner, self._geometry.rank_count, page_count, namespace)
        row.charged_pages = self._geometry.charged_end(0, page_count)
        row.charged_pages += self._geometry.overhead_pages(page_count)
        self.active = self.segments.add(row)

    def _free(self, runs: RowArray) -> None:
        for segment, pages in _pages_by_segment(runs):
            row = self.segments.row(segment)
            if row.held_pages < pages:
                raise CatalogDamagedError(f"segment {segment} frees too much")
            row.held_pages -= pages
            self._shrunk.add(segment)
        freed = self._units.free(runs)
        self._freed.append(freed)
        for segment, pages in _pages_by_segment(freed):
            self.segments.add_pending(self.segments.row(segment), pages)
        if not self._geometry.unit_pages:
            # At once: whoever evicts until enough is pending would go on, and empty the tier.
            for segment in np.unique(runs["segment"]).tolist():
                self._mark_empty(segment)

    def _mark_empty(self, segment: int) -> bool:
        """Return whether a segment holds nothing; then all of it becomes pending."""
        row = self.segments.row(segment)
        if row.state == SegmentState.DEAD:
            is_empty = not row.writing_count
        else:
            is_empty = row.state == SegmentState.CLOSED and not row.held_pages
        if not is_empty:
            return False
        self.segments.add_pending(row, row.charged_pages - row.pending_pages)
        self._units.drop(segment)
        return True


def _pages_by_segment(runs: RowArray) -> list[tuple[int, int]]:
    return [(s, int(part["page_count"].sum(dtype=np.int64))) for s, part in by_segment(runs)]
