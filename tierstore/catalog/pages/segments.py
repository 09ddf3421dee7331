"""Segments within one write transaction: their rows, and the sums over them in the state row."""

from collections.abc import Mapping

import numpy as np

from tierstore.catalog.pages.cached_rows import CachedRows
from tierstore.catalog.rows import Databases, RowArray, SegmentRow, StateRow, segment_key
from tierstore.errors import CatalogDamagedError
from tierstore.lmdb_env.library import Transaction

__all__ = ["Segments", "by_segment", "is_in_use"]


class Segments:
    """The `segments` database. Pages of a row are those of one rank, those of the state of all."""

    def __init__(
        self, txn: Transaction, databases: Databases, state: StateRow, known: Mapping[int, bytes]
    ) -> None:
        self._txn = txn
        self._database = databases.segments
        self._state = state
        self._cached = CachedRows(txn, databases.segments, segment_key, SegmentRow.unpack, known)

    def find(self, segment: int) -> SegmentRow | None:
        """Return the row of a segment, to be changed in place; None: there is none."""
        return self._cached.find(segment)

    def row(self, segment: int) -> SegmentRow:
        """Return the row of a segment, to be changed in place.

        Raises:
            CatalogDamagedError: there is none.
        """
        row = self.find(segment)
        if row is None:
            raise CatalogDamagedError(f"segment {segment} is unknown")
        return row

    def all(self) -> list[tuple[int, SegmentRow]]:
        """Return the rows of all segments, read-only."""
        looked_at = self._cached.rows
        with self._txn.cursor(db=self._database) as cursor:
            stored = {int.from_bytes(key, "big"): value for key, value in cursor}
        rows = {s: SegmentRow.unpack(v) for s, v in stored.items() if s not in looked_at}
        changed = {s: row for s, row in looked_at.items() if row is not None}
        return sorted((rows | changed).items())

    def add(self, row: SegmentRow) -> int:
        """Add a segment with what it is charged; return its number."""
        segment = self._state.next_segment
        self._state.next_segment += 1
        self._state.charged_pages += row.charged_pages * row.rank_count
        self._cached.put(segment, row)
        return segment

    def remove(self, segment: int) -> None:
        """Remove a segment that every rank has given back; one without a row is skipped."""
        row = self.find(segment)
        if row is not None:
            self.uncharge(segment, row.charged_pages)
            self._cached.remove(segment)

    def count_in(self, segment: int, record_count: int, payload_bytes: int) -> None:
        """Count records of so many bytes each that were published."""
        self._count(segment, record_count, record_count * payload_bytes)

    def count_out(self, segment: int, record_count: int, payload_bytes: int) -> None:
        """Count records of so many bytes each that are gone."""
        self._count(segment, -record_count, -record_count * payload_bytes)

    def forget_records(self, row: SegmentRow) -> None:
        """Count a segment's records out, which are garbage now."""
        self._state.record_count -= row.record_count
        self._state.payload_bytes -= row.payload_bytes
        row.record_count = row.payload_bytes = 0

    def charge(self, row: SegmentRow, pages: int) -> None:
        """Charge pages."""
        row.charged_pages += pages
        self._state.charged_pages += pages * row.rank_count

    def add_pending(self, row: SegmentRow, pages: int) -> None:
        """Note that charged pages are being released."""
        row.pending_pages += pages
        self._state.pending_pages += pages * row.rank_count

    def uncharge(self, segment: int, pages: int) -> None:
        """Uncharge pages that every rank has given back; a segment without a row is skipped.

        Raises:
            CatalogDamagedError: so many were not being released.
        """
        row = self.find(segment)
        if row is None:
            return
        if min(row.pending_pages, row.charged_pages) < pages:
            raise CatalogDamagedError(f"a release of {pages} pages exceeds what is pending")
        row.pending_pages -= pages
        self._state.pending_pages -= pages * row.rank_count
        self.charge(row, -pages)

    @property
    def stored(self) -> Mapping[int, bytes]:
        """The rows that are known to be stored."""
        return self._cached.stored

    def flush(self) -> None:
        """Write the changed rows into the transaction."""
        self._cached.flush()

    def _count(self, segment: int, record_count: int, payload_bytes: int) -> None:
        row = self.row(segment)
        row.record_count += record_count
        row.payload_bytes += payload_bytes
        self._state.record_count += record_count
        self._state.payload_bytes += payload_bytes
        if row.record_count < 0 or row.payload_bytes < 0:
            raise CatalogDamagedError(f"segment {segment} loses more records than it has")


def by_segment(rows: RowArray) -> list[tuple[int, RowArray]]:
    """Cut rows with a segment apart; those of one request lie in one or two segments."""
    if not len(rows):
        return []
    segments = rows["segment"]
    first = int(segments[0])
    if (segments == first).all():
        return [(first, rows)]
    unique = np.unique(segments).tolist()
    return [(segment, rows[segments == segment]) for segment in unique]


def is_in_use(txn: Transaction, databases: Databases, segment: int) -> bool:
    """Return whether records lie in a segment or are being written to it; reads one row."""
    value = txn.get(segment_key(segment), db=databases.segments)
    row = None if value is None else SegmentRow.unpack(value)
    return row is not None and bool(row.record_count or row.writing_count)
