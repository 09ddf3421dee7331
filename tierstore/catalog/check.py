"""Verification of a catalog: every row searched for, every sum and reference recomputed."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from operator import ne

import numpy as np

from tierstore.catalog.garbage import Floors
from tierstore.catalog.pages.check import PageCheck
from tierstore.catalog.pages.said_extents import ROWS_AT_ONCE
from tierstore.catalog.pages.state import find_state
from tierstore.catalog.rows import (
    ORDER_PAGES_BYTES,
    Databases,
    SegmentRow,
    StateRow,
    decode_records,
)
from tierstore.errors import CatalogDamagedError
from tierstore.geometry import SpaceGeometry
from tierstore.lmdb_env.library import Transaction
from tierstore.lmdb_env.pace import UNHURRIED, VerifyPace
from tierstore.manifest import namespace_of

__all__ = ["check_catalog", "numbers_in_range", "verify_sums"]

_PROBLEMS_MAX = 100
_SEARCHED_APART = {"order", "records"}
"""The databases whose rows are searched for while they are compared."""
_NUMBER_END = 1 << 31
"""Segments and owners have 31 bits. A larger number could be given out, but not stored."""
_WIDE_NUMBER_END = 1 << 62
"""No counter gets so far. One that is larger is damaged, and would soon exceed 63 bits."""


def check_catalog(
    txn: Transaction, databases: Databases, geometry: SpaceGeometry, pace: VerifyPace = UNHURRIED
) -> list[str]:
    """Return at most a hundred violations in words; empty when the catalog is sound.

    O(records), about 3 us each, in steps of `pace`; 40 bytes of memory per extent.

    Raises:
        CatalogError: a row cannot even be decoded.
        ClosedError: see `VerifyPace.step`.
    """
    state = find_state(txn, databases)
    if state is None:
        return ["the state row is missing"]
    return list(islice(_Check(txn, databases, geometry, state, pace).run(), _PROBLEMS_MAX))


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
        self,
        txn: Transaction,
        databases: Databases,
        geometry: SpaceGeometry,
        state: StateRow,
        pace: VerifyPace,
    ) -> None:
        self._txn = txn
        self._databases = databases
        self._geometry = geometry
        self._state = state
        self._pace = pace
        self._floors = Floors(txn, databases)
        self._lost: dict[str, int] = {}
        """By database the rows that were not found under their keys."""

    def run(self) -> Iterator[str]:
        yield from self._manifest_problems()
        yield from self._floor_problems()
        yield from self._order_problems()
        yield from self._record_problems()
        yield from self._search_problems()

    def _rows(self, name: str) -> Iterator[tuple[tuple[bytes, ...], tuple[bytes, ...]]]:
        """Return keys and values of some rows, and of the next ones; search for each row.

        A damaged key, of a row or of a branch above, leads searches astray. A row beyond it is
        found by reading all rows, but no search will ever change or remove it.
        """
        database = vars(self._databases)[name]
        get = partial(self._txn.get, db=database)
        lost = 0
        with self._txn.cursor(db=database) as cursor:
            rows = iter(cursor)
            while block := list(islice(rows, ROWS_AT_ONCE)):
                keys, values = zip(*block, strict=True)
                found = tuple(map(get, keys))
                if found != values:
                    lost += sum(map(ne, values, found))
                yield keys, values
                self._pace.step()
        if lost:
            self._lost[name] = lost

    def _search_problems(self) -> Iterator[str]:
        """Every row is found under its key."""
        for name in vars(self._databases).keys() - _SEARCHED_APART:
            for _ in self._rows(name):
                pass
        for name, lost in self._lost.items():
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
        """Each row of the order names a record, which names it."""
        get = partial(self._txn.get, db=self._databases.records)
        for sequences, values in self._rows("order"):
            keys = [value[ORDER_PAGES_BYTES:] for value in values]
            found = [get(key) if key else None for key in keys]
            for key, value in zip(keys, found, strict=True):
                if value is None:
                    yield f"order names {key.hex()}, which has no record"
            known = np.array([value is not None for value in found])
            named = decode_records([value for value in found if value is not None])
            ages = np.frombuffer(b"".join([s.rjust(8, b"\0")[:8] for s in sequences]), ">u8")
            pages = np.frombuffer(b"".join([v[:4].ljust(4, b"\0") for v in values]), "<u4")
            at = np.flatnonzero(known)
            for i in at[named["sequence"] != ages[known]].tolist():
                yield f"record {keys[i].hex()} and the order disagree about its age"
            for i in at[named["place"]["stride_pages"] != pages[known]].tolist():
                yield f"record {keys[i].hex()} and the order disagree about its pages"

    def _record_problems(self) -> Iterator[str]:
        """Records are as many as in the order, and are what extents and segments sum up."""
        pages = PageCheck(
            self._txn,
            self._databases,
            self._geometry,
            self._state,
            has_garbage=bool(self._floors),
            pace=self._pace,
        )
        row_count = 0
        for keys, values in self._rows("records"):
            row_count += len(keys)
            records = decode_records(list(values))
            if int(records["sequence"].max()) >= self._state.next_sequence:
                yield "a record is younger than the next sequence"
            if self._floors:  # garbage has a place in the order, and nothing else
                records = records[self._floors.living(keys, records)]
            pages.add(records["place"])
        order_count = self._txn.stat(db=self._databases.order)["entries"]
        if order_count != row_count:
            yield f"{row_count} records, but {order_count} in the order"
        yield from pages.problems()


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
