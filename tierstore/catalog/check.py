"""Verification of a catalog: every row searched for, every sum and reference recomputed."""

import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from operator import ne

import numpy as np

from tierstore.catalog.garbage import Floors
from tierstore.catalog.index.check import check_index
from tierstore.catalog.index.hashes import Numbers, hash_keys
from tierstore.catalog.pages.check import PageCheck
from tierstore.catalog.pages.cluster_row import ClusterRow, indices_of
from tierstore.catalog.pages.said_clusters import CLUSTERS_AT_ONCE
from tierstore.catalog.pages.state import find_state
from tierstore.catalog.rows import (
    Databases,
    SegmentRow,
    SegmentState,
    StateRow,
    segment_key,
    wide_key,
)
from tierstore.errors import CatalogDamagedError
from tierstore.geometry import SpaceGeometry
from tierstore.lmdb_env.library import Transaction
from tierstore.lmdb_env.pace import UNHURRIED, VerifyPace
from tierstore.manifest import namespace_of

__all__ = ["check_catalog", "numbers_in_range", "verify_sums"]

_PROBLEMS_MAX = 100
_ROWS_AT_ONCE = 1024
_SEARCHED_APART = {"clusters", "order"}
"""The databases whose rows are searched for while they are compared."""
_NUMBER_END = 1 << 31
"""Segments and owners have 31 bits. A larger number could be given out, but not stored."""
_WIDE_NUMBER_END = 1 << 62
"""No counter gets so far. One that is larger is damaged, and would soon exceed 63 bits."""


def check_catalog(
    txn: Transaction, databases: Databases, geometry: SpaceGeometry, pace: VerifyPace = UNHURRIED
) -> list[str]:
    """Return at most a hundred violations in words; empty when the catalog is sound.

    O(records), about 3 us each, in steps of `pace`; 60 bytes of memory per record.

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
        self._hashes: list[Numbers] = []
        self._named: list[Numbers] = []
        """Of each living record, garbage included: the hash of its key, and its cluster."""
        self._lost: dict[str, int] = {}
        """By database the rows that were not found under their keys."""

    def run(self) -> Iterator[str]:
        yield from self._manifest_problems()
        yield from self._floor_problems()
        yield from self._order_problems()
        yield from self._index_problems()
        yield from self._page_problems()
        yield from self._search_problems()

    def _rows(self, name: str) -> Iterator[tuple[tuple[bytes, ...], tuple[bytes, ...]]]:
        """Return keys and values of some rows, and of the next ones; search for each row.

        A damaged key, of a row or of a branch above, leads searches astray. A row beyond it is
        found by reading all rows, but no search will ever change or remove it.
        """
        database = vars(self._databases)[name]
        row_count = CLUSTERS_AT_ONCE if name == "clusters" else _ROWS_AT_ONCE
        get = partial(self._txn.get, db=database)
        lost = 0
        with self._txn.cursor(db=database) as cursor:
            rows = iter(cursor)
            while block := list(islice(rows, row_count)):
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
        """Groups of records and the order name each other, one to one."""
        get = partial(self._txn.get, db=self._databases.clusters)
        for sequences, clusters in self._rows("order"):
            for sequence, cluster in zip(sequences, clusters, strict=True):
                value = get(cluster) if cluster else None
                number = int.from_bytes(sequence, "big")
                if value is None or number not in ClusterRow.unpack(value).groups:
                    yield f"order names records of cluster {cluster.hex()} at {number}, in vain"
        group_count = 0
        for clusters, values in self._rows("clusters"):
            rows = list(map(ClusterRow.unpack, values))
            group_count += sum(len(row.groups) for row in rows)
            if any(max(row.groups) >= self._state.next_sequence for row in rows):
                yield "a record is younger than the next sequence"
            self._note_names(clusters, rows)
        order_count = self._txn.stat(db=self._databases.order)["entries"]
        if order_count != group_count:
            yield f"{group_count} groups of records, but {order_count} in the order"

    def _note_names(self, clusters: Iterable[bytes], rows: Iterable[ClusterRow]) -> None:
        for cluster, row in zip(clusters, rows, strict=True):
            keys = row.keys()
            hashes = hash_keys([keys[index] for index in indices_of(row.live_bits)])
            self._hashes.append(hashes)
            self._named.append(np.full(len(hashes), int.from_bytes(cluster[:8], "big"), np.uint64))

    def _index_problems(self) -> Iterator[str]:
        """Living records are found by their keys, and each key has one of them."""
        none = np.empty(0, np.uint64)
        hashes = np.concatenate([none, *self._hashes])
        clusters = np.concatenate([none, *self._named])
        self._hashes.clear()
        self._named.clear()
        yield from check_index(self._txn, self._databases, hashes, clusters, self._pace)
        order = hashes.argsort(kind="stable")
        is_again = np.zeros(len(order), bool)
        is_again[1:] = hashes[order[1:]] == hashes[order[:-1]]
        twice = np.unique(hashes[order[is_again]])
        seen: set[bytes] = set()
        for cluster in np.unique(clusters[np.isin(hashes, twice)]).tolist():
            self._pace.step()
            value = self._txn.get(wide_key(cluster), db=self._databases.clusters)
            if value is None or self._is_garbage(segment_key(cluster >> 32)):
                continue
            row = ClusterRow.unpack(value)
            keys = row.keys()
            for index in indices_of(row.live_bits):
                if keys[index] in seen:
                    yield f"there is more than one record of {keys[index].hex()}"
                seen.add(keys[index])

    def _is_garbage(self, segment: bytes) -> bool:
        value = self._txn.get(segment, db=self._databases.segments) if segment else None
        return value is None or SegmentRow.unpack(value).state == SegmentState.DEAD

    def _page_problems(self) -> Iterator[str]:
        """Segments and sums are those of the clusters. Nothing refers to garbage."""
        pages = PageCheck(
            self._txn,
            self._databases,
            self._geometry,
            self._state,
            has_garbage=bool(self._floors),
            pace=self._pace,
        )
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
