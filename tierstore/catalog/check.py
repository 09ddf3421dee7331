"""Verification of a catalog: every row searched for, every sum and reference recomputed."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager

from tierstore.catalog.garbage import Floors
from tierstore.catalog.pages.check import PageCheck
from tierstore.catalog.pages.extent_row import ExtentRow
from tierstore.catalog.pages.order import extent_keys
from tierstore.catalog.pages.state import find_state
from tierstore.catalog.rows import (
    Databases,
    SegmentRow,
    StateRow,
    decode_records,
)
from tierstore.errors import CatalogDamagedError
from tierstore.geometry import SpaceGeometry
from tierstore.lmdb_env.library import Transaction
from tierstore.manifest import namespace_of

__all__ = ["check_catalog", "numbers_in_range", "verify_sums"]

_PROBLEMS_MAX = 100
_NUMBER_END = 1 << 31
"""Segments and owners have 31 bits. A larger number could be given out, but not stored."""
_WIDE_NUMBER_END = 1 << 62
"""No counter gets so far. One that is larger is damaged, and would soon exceed 63 bits."""


def check_catalog(txn: Transaction, databases: Databases, geometry: SpaceGeometry) -> list[str]:
    """Return at most a hundred violations in words; empty when the catalog is sound.

    O(records) time and memory; meant for tests and offline tools.

    Raises:
        CatalogError: a row cannot even be decoded.
    """
    state = find_state(txn, databases)
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
        self._floors = Floors(txn, databases)
        with txn.cursor(db=databases.records) as cursor:
            rows = [(key, value) for key, value in cursor]
        records = decode_records([value for _, value in rows])
        living = self._floors.living([key for key, _ in rows], records)
        self._records = records[living]
        """The places of those that count. Garbage has rows, which nothing else refers to."""
        self._keys = [key for (key, _), lives in zip(rows, living.tolist(), strict=True) if lives]

    def run(self) -> list[str]:
        return [
            *self._search_problems(),
            *self._manifest_problems(),
            *self._floor_problems(),
            *self._order_problems(),
            *self._page_problems(),
        ]

    def _search_problems(self) -> Iterator[str]:
        """Every row is found under its key.

        A damaged key, of a row or of a branch above, leads searches astray. A row beyond it is
        found by reading all rows, but no search will ever change or remove it.
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
        """Groups of records and the order name each other, one to one."""
        with self._txn.cursor(db=self._databases.order) as cursor:
            rows = [(int.from_bytes(k, "big"), int.from_bytes(v, "big")) for k, v in cursor]
        with self._txn.cursor(db=self._databases.extents) as cursor:
            extents = {int.from_bytes(k, "big"): ExtentRow.unpack(v) for k, v in cursor}
        groups = {(s, extent) for extent, row in extents.items() for s in row.groups}
        for sequence, extent in set(rows) - groups:
            yield f"order names records of extent {extent:#x} at {sequence}, which has none"
        for sequence, extent in groups - set(rows):
            yield f"records of extent {extent:#x} are missing in the order at {sequence}"
        if any(sequence >= self._state.next_sequence for sequence, _ in groups):
            yield "a record is younger than the next sequence"
        yield from self._name_problems(extents)

    def _name_problems(self, extents: dict[int, ExtentRow]) -> Iterator[str]:
        """An extent has the keys of its records, which live in it.

        That it has no others is what `PageCheck` counts.
        """
        names = {extent: (row.keys(), row.live_bits) for extent, row in extents.items()}
        keys, records = self._keys, self._records
        living = zip(keys, extent_keys(records).tolist(), records["index"].tolist(), strict=True)
        for key, extent, index in living:
            known, live_bits = names.get(extent, ((), 0))
            if extent in names and not (live_bits >> index & 1 and known[index] == key):
                yield f"record {key.hex()} and its extent {extent:#x} disagree"

    def _page_problems(self) -> list[str]:
        """Return what is wrong with extents, segments and their sums."""
        return PageCheck(
            self._txn,
            self._databases,
            self._geometry,
            self._state,
            self._records,
            has_garbage=bool(self._floors),
        ).problems()


@contextmanager
def numbers_in_range() -> Iterator[None]:
    """Take a number that no row has room for as damage of the row that it was read from.

    Raises:
        CatalogDamagedError: a number within the block was out of range.
    """
    try:
        yield
    except (struct.error, OverflowError) as error:
        raise CatalogDamagedError(f"a number is out of range ({error})") from error
