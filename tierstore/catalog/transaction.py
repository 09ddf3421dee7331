"""What one write transaction of the catalog can do; nothing outside changes before it commits."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tierstore.catalog.garbage import Floors, Sweep
from tierstore.catalog.namespaces import Namespaces
from tierstore.catalog.pages.space import Space
from tierstore.catalog.pages.unreferenced import release_unreferenced
from tierstore.catalog.rows import (
    ORDER_PAGES_BYTES,
    RECORD_DTYPE,
    Databases,
    PendingRow,
    RowArray,
    SegmentState,
    decode_records,
    split,
    wide_key,
)
from tierstore.errors import CatalogDamagedError
from tierstore.geometry import SpaceGeometry
from tierstore.key import NAMESPACE_BYTES, OffloadKey
from tierstore.lmdb_env.library import Transaction
from tierstore.tier_events import Evicted, Freed, SecondaryEvent

__all__ = ["CatalogTxn", "Ticket"]

_EVICT_COUNT_MAX = 512
"""Records that one transaction evicts at most, so that other processes get their turn, and what a
transaction needs of the map is bounded."""


@dataclass(slots=True)
class Ticket:
    """Places that were reserved and not yet committed, in the process that reserved them."""

    keys: tuple[OffloadKey, ...]
    records: RowArray
    """`RECORD_DTYPE`, without sequences."""
    extents: RowArray
    pending_id: int

    def places(self) -> list[bytes]:
        """Return the place of each key."""
        places = np.ascontiguousarray(self.records["place"])
        return split(places.tobytes(), places.dtype.itemsize)


class CatalogTxn:
    """Operations on records and their order; the pages below them are `space`'s."""

    def __init__(
        self,
        txn: Transaction,
        databases: Databases,
        geometry: SpaceGeometry,
        space: Space,
        pins: Mapping[OffloadKey, int],
    ) -> None:
        self._txn = txn
        self._databases = databases
        self._geometry = geometry
        self._pins = pins
        self.space = space
        self.floors = Floors(txn, databases)
        self.namespaces = Namespaces(txn, databases, space, self.floors)
        self.evicted: list[OffloadKey] = []
        self.relied_on: set[int] = set()
        """Segments of the records that were found instead of being written."""
        self.freed: tuple[int, PendingRow] | None = None
        """The release, by id, of what this transaction freed; None: nothing, or it goes on."""
        self._dropped_count = 0

    def events(self, adopted: Iterable[tuple[int, PendingRow]] = ()) -> list[SecondaryEvent]:
        """Return what this transaction evicted, and what has to be given back when it is over."""
        events: list[SecondaryEvent] = [Freed.of(*release) for release in adopted]
        if self.evicted:
            events.append(Evicted(tuple(self.evicted)))
        if self.freed:
            events.append(Freed.of(*self.freed))
        return events

    def may_evict(self) -> bool:
        """Return whether this transaction may drop further records."""
        return self._dropped_count < _EVICT_COUNT_MAX

    def recorded(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the keys that have a record, in order, each once."""
        found, records = self._find(list(dict.fromkeys(keys)))
        self.relied_on.update(records["place"]["segment"].tolist())
        return found

    def reserve(self, keys: Sequence[OffloadKey], payload_bytes: int) -> Ticket:
        """Allocate one place per key, all of one namespace; the caller has made room."""
        namespace = keys[0][:NAMESPACE_BYTES]
        stride_pages = self._geometry.stride_pages(payload_bytes)
        extents = self.space.allocate(namespace, len(keys), stride_pages)
        records = np.zeros(len(keys), RECORD_DTYPE)
        places = records["place"]
        counts = extents["count"]
        places["segment"] = np.repeat(extents["segment"], counts)
        places["header_page"] = np.repeat(extents["header_page"], counts)
        firsts = np.repeat(np.cumsum(counts) - counts, counts)
        places["index"] = np.arange(len(keys)) - firsts
        places["stride_pages"] = stride_pages
        places["payload_bytes"] = payload_bytes
        places["segment_pages"] = np.repeat(self._file_pages(extents), counts)
        pending_id = self.space.pending.add(PendingRow(self.space.owner, extents=extents))
        return Ticket(tuple(keys), records, extents, pending_id)

    def commit(self, ticket: Ticket, failed: Collection[int]) -> bool:
        """Publish a ticket's records, except the failed ones and those that another process has.

        The last key becomes the oldest, so that a prefix loses its tail first. False: another
        process took this owner for dead, and its places for free.
        """
        if self.space.pending.find(ticket.pending_id) is None:
            return False
        self.space.pending.remove(ticket.pending_id)
        living = self.space.end_writing(ticket.extents)
        self.space.extents.add(living)
        places = ticket.records["place"]
        written = np.ones(len(places), bool)
        if len(living) < len(ticket.extents):
            written = np.isin(places["segment"], living["segment"])
        good = written.copy()
        good[[index for index in failed if index < len(good)]] = False
        kept = self._without_records(ticket.keys, np.flatnonzero(good).tolist())
        good[:] = False
        good[kept] = True
        if kept:
            kept.reverse()
            self._publish([ticket.keys[index] for index in kept], ticket.records[kept])
            self.space.segments.count_in(places[kept])
            for segment in np.unique(places["segment"][kept]).tolist():
                self.space.trim_segment(segment)
        failed_places = places[written & ~good]
        if len(failed_places):
            self.space.free_places(failed_places)
        return True

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Make recorded keys the youngest, in order.

        Except records that leave in the order in which they were written.
        """
        ordered = list(dict.fromkeys(reversed(keys)))[::-1]
        found, records = self._find(ordered)
        if found and self._geometry.unit_pages != 1:
            # Records that share a unit of the file system leave together. By LRU, units would stay
            # half empty, and charged.
            strides = records["place"]["stride_pages"].tolist()
            moving = [i for i, pages in enumerate(strides) if not self._geometry.keeps_order(pages)]
            found, records = [found[index] for index in moving], records[moving]
        if found:
            self._delete_order(records)
            self._publish(found, records)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget records and free their places; unknown keys are skipped."""
        found, records = self._find(list(dict.fromkeys(keys)))
        if found:
            for _ in map(partial(self._txn.delete, db=self._databases.records), found):
                pass
            self._delete_order(records)
            self._free(records)

    def remove_before(self, keys: Sequence[OffloadKey], ends: Mapping[int, int]) -> None:
        """Forget those of the records that lie before these pages, by segment."""
        found, records = self._find(list(dict.fromkeys(keys)))
        segments = records["place"]["segment"].tolist()
        pages = records["place"]["header_page"].tolist()
        self.remove(
            [
                key
                for key, segment, page in zip(found, segments, pages, strict=True)
                if page < ends.get(segment, 0)
            ]
        )

    def evict(self, page_count: int, record_count: int = 1) -> int:
        """Evict the oldest unpinned records until both counts are reached; return how many went.

        `page_count` is of one rank. At most `_EVICT_COUNT_MAX` records per transaction. Garbage on
        the way goes, too, and frees nothing: a caller that needs pages asks again.
        """
        sequences, keys = self._oldest(page_count, record_count)
        if not keys:
            return 0
        # In the order of the keys: a page of rows is searched for and changed while it is at hand.
        keys_sorted = sorted(keys)
        pop = partial(self._txn.pop, db=self._databases.records)
        rows = dict(zip(keys_sorted, map(pop, keys_sorted), strict=True))
        values = [row for key in keys if (row := rows[key]) is not None]
        if len(values) < len(keys):
            raise CatalogDamagedError("order names a key without a record")
        for _ in map(partial(self._txn.delete, db=self._databases.order), sequences):
            pass
        self._dropped_count += len(keys)
        records = decode_records(values)
        if self.floors:
            living = self.floors.living(keys, records)
            keys = [keys[index] for index in np.flatnonzero(living).tolist()]
            records = records[living]
        if keys:
            self._free(records)
            self.evicted.extend(map(OffloadKey, keys))
            self.space.state.evicted_count += len(keys)
        return len(sequences)

    def _oldest(self, page_count: int, record_count: int) -> tuple[list[bytes], list[bytes]]:
        """Return sequences and keys of the oldest unpinned records, until both counts are reached.

        Raises:
            CatalogDamagedError: the order names a key twice.
        """
        sequences: list[bytes] = []
        keys: list[bytes] = []
        pages = 0
        budget = _EVICT_COUNT_MAX - self._dropped_count
        pins = self._pins
        with self._txn.cursor(db=self._databases.order) as cursor:
            for sequence, value in cursor.iternext():
                if len(keys) >= budget or (pages >= page_count and len(keys) >= record_count):
                    break
                key = value[ORDER_PAGES_BYTES:]
                if key in pins:
                    continue
                sequences.append(sequence)
                keys.append(key)
                pages += int.from_bytes(value[:ORDER_PAGES_BYTES], "little")
        if len(set(keys)) < len(keys):
            raise CatalogDamagedError("the order names a key twice")
        return sequences, keys

    def adopt_dead(
        self, is_dead: Callable[[int], bool], *, with_idle_releases: bool = False
    ) -> list[tuple[int, PendingRow]]:
        """Take over what dead owners left: abort their writes, release their evictions again.

        `with_idle_releases` takes over the releases of living owners too: one that is idle may not
        look at them for hours. Giving the same pages back twice does no harm, since pages are never
        used twice, and whoever confirms first ends the release.

        Returns:
            The releases that have to be repeated, by id.
        """
        verdicts: dict[int, bool] = {self.space.owner: False}

        def judge(owner: int) -> bool:
            if owner not in verdicts:
                verdicts[owner] = is_dead(owner)
            return verdicts[owner]

        self.namespaces.leave_dead(judge)
        releases = []
        for pending_id, row in self.space.pending.all():
            if len(row.extents):
                if judge(row.owner):
                    self.space.pending.remove(pending_id)
                    self.space.free_extents(self.space.end_writing(row.extents))
            elif judge(row.owner) or (with_idle_releases and row.owner != self.space.owner):
                row.owner = self.space.owner
                self.space.pending.put(pending_id, row)
                releases.append((pending_id, row))
        for segment, segment_row in self.space.segments.all():
            if segment_row.state == SegmentState.ACTIVE and judge(segment_row.owner):
                # Never appended to: its file may be missing, and would be preallocated again
                # although pages of it were given back.
                self.space.close_segment(segment)
                self.space.trim_segment(segment)
        return releases

    def charge_unreferenced(self, segments: Mapping[int, int]) -> bool:
        """Charge the segments without a row; the next `adopt_dead` releases them."""
        return release_unreferenced(self._txn, self._databases, self.space.state, segments)

    def sweep(self, sweep: Sweep) -> Sweep:
        """Remove some garbage; return how far the pass has come once this is committed."""
        return sweep.step(self._txn, self._databases, self.floors)

    def _file_pages(self, extents: RowArray) -> RowArray:
        """Return how long the file of each extent has to be."""
        header_pages = self._geometry.header_pages
        ends = extents["header_page"] + header_pages + extents["count"] * extents["stride_pages"]
        pages = [
            self._geometry.file_pages(end, self.space.segments.row(segment).page_count)
            for segment, end in zip(extents["segment"].tolist(), ends.tolist(), strict=True)
        ]
        return np.array(pages, "<u4")

    def _find(self, keys: Sequence[OffloadKey]) -> tuple[list[OffloadKey], RowArray]:
        """Return the keys that have a record, and the records."""
        values = list(map(partial(self._txn.get, db=self._databases.records), keys))
        found = [key for key, value in zip(keys, values, strict=True) if value is not None]
        records = decode_records([value for value in values if value is not None])
        if found and self.floors:
            living = self.floors.living(found, records)
            return [found[i] for i in np.flatnonzero(living).tolist()], records[living]
        return found, records

    def _without_records(self, keys: Sequence[OffloadKey], indices: list[int]) -> list[int]:
        """Leave out what another process has recorded; remove garbage under the other keys."""
        get = partial(self._txn.get, db=self._databases.records)
        values = {index: value for index in indices if (value := get(keys[index])) is not None}
        if not values:
            return indices
        garbage = {i: v for i, v in values.items() if self.floors and self.floors.hide(keys[i], v)}
        if garbage:
            self._delete_order(decode_records(list(garbage.values())))
        return [index for index in indices if index not in values or index in garbage]

    def _publish(self, keys: Sequence[bytes], records: RowArray) -> None:
        """Write records at the young end, the first becoming the oldest of them."""
        state = self.space.state
        count = len(keys)
        records["sequence"] = np.arange(state.next_sequence, state.next_sequence + count)
        state.next_sequence += count
        sequences = split(records["sequence"].astype(">u8").tobytes(), 8)
        pages = split(
            np.ascontiguousarray(records["place"]["stride_pages"]).tobytes(), ORDER_PAGES_BYTES
        )
        rows = split(records.tobytes(), RECORD_DTYPE.itemsize)
        with self._txn.cursor(db=self._databases.records) as cursor:
            cursor.putmulti(zip(keys, rows, strict=True))
        with self._txn.cursor(db=self._databases.order) as cursor:
            cursor.putmulti(
                zip(sequences, map(bytes.__add__, pages, keys), strict=True), append=True
            )

    def _delete_order(self, records: RowArray) -> None:
        delete = partial(self._txn.delete, db=self._databases.order)
        if not all(map(delete, map(wide_key, records["sequence"].tolist()))):
            raise CatalogDamagedError("a record is missing in the order")

    def _free(self, records: RowArray) -> None:
        places = records["place"]
        self.space.segments.count_out(places)
        self.space.free_places(places)
