"""Verification of a catalog: every row searched for, every sum and reference recomputed."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tierstore.catalog.floors import Floors
from tierstore.catalog.pages.space import Space
from tierstore.catalog.rows import (
    ORDER_PAGES_BYTES,
    Databases,
    ExtentRow,
    PendingRow,
    RowArray,
    SegmentRow,
    SegmentState,
    StateRow,
    decode_records,
    extent_key,
    parse_number,
)
from tierstore.errors import CatalogDamagedError
from tierstore.geometry import SpaceGeometry
from tierstore.lmdb_env.library import Transaction
from tierstore.manifest import namespace_of

__all__ = ["check_catalog", "verify_sums"]

_PROBLEMS_MAX = 100
_NUMBER_END = 1 << 31
"""Segments and owners have 31 bits. What counts further could be given out, and not be stored."""
_WIDE_NUMBER_END = 1 << 62
"""Nobody counts so far, and what does would soon be no number of 63 bits any more."""
_NO_SEGMENTS = np.empty(0, np.uint32)


def check_catalog(txn: Transaction, databases: Databases, geometry: SpaceGeometry) -> list[str]:
    """Return at most a hundred violations in words; empty when the catalog is sound.

    O(records) time and memory; meant for tests and offline tools.

    Raises:
        CatalogError: a row cannot even be decoded.
    """
    state = Space.read_state(txn, databases)
    if state is None:
        return ["the state row is missing"]
    return _Check(txn, databases, geometry, state).run()[:_PROBLEMS_MAX]


def verify_sums(txn: Transaction, databases: Databases, state: StateRow) -> None:
    """Compare the state row with the rows that it sums up and counts.

    O(segments); a sum that is too small would let the tier outgrow its capacity, and a number that
    is too large could not be given out.

    Raises:
        CatalogDamagedError: they contradict each other.
    """
    with txn.cursor(db=databases.segments) as cursor:
        rows = [SegmentRow.unpack(value) for _, value in cursor]
    if state.charged_pages != sum(row.charged_pages * row.rank_count for row in rows):
        raise CatalogDamagedError("the charged pages of its segments do not add up")
    if state.pending_pages != sum(row.pending_pages * row.rank_count for row in rows):
        raise CatalogDamagedError("the pending pages of its segments do not add up")
    if state.record_count != sum(row.record_count for row in rows):
        raise CatalogDamagedError("the records of its segments do not add up")
    if state.payload_bytes != sum(row.payload_bytes for row in rows):
        raise CatalogDamagedError("the payload of its segments does not add up")
    for database, next_number, end in (
        (databases.order, state.next_sequence, _WIDE_NUMBER_END),
        (databases.segments, state.next_segment, _NUMBER_END),
        (databases.pending, state.next_pending, _WIDE_NUMBER_END),
        (databases.owners, state.next_owner, _NUMBER_END),
    ):
        if next_number >= end:
            raise CatalogDamagedError(f"the next number would be {next_number}")
        with txn.cursor(db=database) as cursor:
            if cursor.last() and int.from_bytes(cursor.key(), "big") >= next_number:
                raise CatalogDamagedError("a row is younger than the next one would be")


class _Check:
    def __init__(
        self, txn: Transaction, databases: Databases, geometry: SpaceGeometry, state: StateRow
    ) -> None:
        self._txn = txn
        self._databases = databases
        self._geometry = geometry
        self._state = state
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
        self._floors = Floors(txn, databases)
        with txn.cursor(db=databases.records) as cursor:
            rows = [(key, value) for key, value in cursor]
        self._index_of = {key: index for index, (key, _) in enumerate(rows)}
        records = self._all_records = decode_records([value for _, value in rows])
        living = self._floors.living([key for key, _ in rows], records)
        self._garbage = records[~living]
        self._records = records[living]
        """Those that count. Garbage has a place in the order, and nothing else."""

    def run(self) -> list[str]:
        return [
            *self._search_problems(),
            *self._manifest_problems(),
            *self._floor_problems(),
            *self._order_problems(),
            *self._record_problems(),
            *self._overlap_problems(),
            *self._segment_problems(),
            *self._state_problems(),
        ]

    def _search_problems(self) -> Iterator[str]:
        """Every row is found under its key.

        A damaged key, of a row or of a branch above, leads searches astray. What lies beyond it is
        there for who reads all rows, but nobody else will change or remove it.
        """
        for name, database in vars(self._databases).items():
            with self._txn.cursor(db=database) as cursor:
                lost = sum(self._txn.get(key, db=database) != value for key, value in cursor)
            if lost:
                yield f"{lost} rows of {name} are not found under their keys"

    def _manifest_problems(self) -> Iterator[str]:
        """Manifests give the namespaces under which they are stored."""
        with self._txn.cursor(db=self._databases.namespaces) as cursor:
            for namespace, manifest in cursor:
                if namespace_of(manifest) != namespace:
                    yield f"the manifest of namespace {namespace.hex()} gives another one"

    def _floor_problems(self) -> Iterator[str]:
        """A floor hides nothing that is to come."""
        for namespace, floor in self._floors.all().items():
            if floor > self._state.next_segment:
                yield f"the floor of namespace {namespace.hex()} is above all segments"

    def _order_problems(self) -> Iterator[str]:
        """Records and order name each other, one to one."""
        with self._txn.cursor(db=self._databases.order) as cursor:
            rows = [(key, value) for key, value in cursor]
        order_count = len(rows)
        sequences = np.frombuffer(b"".join([key.rjust(8, b"\0")[:8] for key, _ in rows]), ">u8")
        pages = np.frombuffer(b"".join([value[:4].ljust(4, b"\0") for _, value in rows]), "<u4")
        keys = [value[ORDER_PAGES_BYTES:] for _, value in rows]
        index_of = self._index_of
        indices = np.array([index_of.get(key, -1) for key in keys], np.int64)
        for i in np.flatnonzero(indices < 0).tolist():
            yield f"order names {keys[i].hex()}, which has no record"
        known = np.flatnonzero(indices >= 0)
        named = self._all_records[indices[known]]
        for i in known[named["sequence"] != sequences[known]].tolist():
            yield f"record {keys[i].hex()} and the order disagree about its age"
        for i in known[named["place"]["stride_pages"] != pages[known]].tolist():
            yield f"record {keys[i].hex()} and the order disagree about its pages"
        row_count = len(self._records) + len(self._garbage)
        if order_count != row_count:
            yield f"{row_count} records, but {order_count} in the order"
        for records in (self._records, self._garbage):
            if len(records) and int(records["sequence"].max()) >= self._state.next_sequence:
                yield "a record is younger than the next sequence"

    def _record_problems(self) -> Iterator[str]:
        """Every record lies in a known extent, and extents count their records rightly."""
        places = self._records["place"]
        keys = _extent_keys(places)
        unique, counts = np.unique(keys, return_counts=True)
        live = dict(zip(unique.tolist(), counts.tolist(), strict=True))
        for key in live.keys() | self._extents.keys():
            row = self._extents.get(key)
            if self._is_garbage(key >> 32):
                if key in live:
                    yield f"{live[key]} records lie in a segment that is dead or gone"
                elif not self._floors:
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
            if self._is_garbage(segment) and self._floors:
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
                    yield f"segment {segment} is dead, and nobody gives it back"
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
        places = self._records["place"]
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
        """Return what is charged for a living segment beside what it holds and gives back."""
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
        payload = self._records["place"]["payload_bytes"].sum(dtype=np.int64)
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
            ("records", self._state.record_count, len(self._records)),
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


def _extent_keys(places: RowArray) -> npt.NDArray[np.uint64]:
    high = places["segment"].astype(np.uint64) << np.uint64(32)
    keys: npt.NDArray[np.uint64] = high | places["header_page"].astype(np.uint64)
    return keys
