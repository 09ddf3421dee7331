"""What one write transaction of the catalog can do; nothing outside changes before it commits."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from tierstore.catalog.garbage import Floors, Sweep, drop_garbage
from tierstore.catalog.namespaces import Namespaces
from tierstore.catalog.pages.extent_row import ExtentRow, bits_of
from tierstore.catalog.pages.order import Victims, extent_keys
from tierstore.catalog.pages.space import Space
from tierstore.catalog.pages.unreferenced import release_unreferenced
from tierstore.catalog.rows import (
    Databases,
    PendingRow,
    RowArray,
    SegmentState,
    decode_records,
    split,
)
from tierstore.catalog.tickets import Ticket, TicketExtent
from tierstore.codec.record import EXTENT_RECORDS_MAX, PLACE_BYTES, PLACE_DTYPE
from tierstore.errors import CatalogDamagedError
from tierstore.geometry import SpaceGeometry
from tierstore.key import NAMESPACE_BYTES, OffloadKey
from tierstore.lmdb_env.library import Transaction
from tierstore.tier_events import Evicted, Freed, SecondaryEvent

__all__ = ["CatalogTxn"]

_EVICT_COUNT_MAX = 512
"""Records that one transaction evicts at most, so that other processes get their turn, and what a
transaction needs of the map is bounded."""

_INDICES = np.arange(EXTENT_RECORDS_MAX, dtype="<u4")


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
        self.relied_on.update(records["segment"].tolist())
        return found

    def reserve(self, keys: Sequence[OffloadKey], payload_bytes: int) -> Ticket:
        """Allocate one place per key, all of one namespace; the caller has made room."""
        namespace = keys[0][:NAMESPACE_BYTES]
        stride_pages = self._geometry.stride_pages(payload_bytes)
        extents = self.space.allocate(namespace, len(keys), stride_pages)
        places = np.empty(len(keys), PLACE_DTYPE)
        first = 0
        for extent, file_pages in zip(extents.tolist(), self._file_pages(extents), strict=True):
            segment, header_page, _, count = extent
            part = places[first : first + count]
            part["segment"] = segment
            part["header_page"] = header_page
            part["index"] = _INDICES[:count]
            part["segment_pages"] = file_pages
            first += count
        places["stride_pages"] = stride_pages
        places["payload_bytes"] = payload_bytes
        pending_id = self.space.pending.add(PendingRow(self.space.owner, extents=extents))
        return Ticket(tuple(keys), payload_bytes, places, extents, pending_id)

    def commit(self, ticket: Ticket, failed: Collection[int]) -> bool:
        """Publish a ticket's records, except the failed ones and those that another process has.

        The last key becomes the oldest, so that a prefix loses its tail first. False: another
        process took this owner for dead, and its places for free.
        """
        if not self.space.pending.remove(ticket.pending_id):
            return False
        living = set(extent_keys(self.space.end_writing(ticket.extents)).tolist())
        good = [True] * len(ticket.keys)
        for index in failed:
            if index < len(good):
                good[index] = False
        extents = ticket.laid_out()
        written = [part for part in extents if part.extent in living]
        if len(written) < len(extents):
            kept = [i for part in written for i in range(part.first, part.end) if good[i]]
        else:
            kept = [index for index, is_good in enumerate(good) if is_good]
        kept = self._put_records(ticket, kept)
        self._enter(ticket, written, kept)
        return True

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Make recorded keys the youngest, in order.

        Except records that leave in the order in which they were written.
        """
        ordered = list(dict.fromkeys(reversed(keys)))[::-1]
        found, places = self._find(ordered)
        if found and self._geometry.unit_pages != 1:
            # Records that share a unit of the file system leave together. By LRU, units would stay
            # half empty, and charged.
            strides = places["stride_pages"].tolist()
            moving = [i for i, pages in enumerate(strides) if not self._geometry.keeps_order(pages)]
            places = places[moving]
        if len(places):
            self.space.order.touch(places)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget records and free their places; unknown keys are skipped."""
        found, places = self._find(sorted(set(keys)))
        if found:
            for _ in map(partial(self._txn.delete, db=self._databases.records), found):
                pass
            self._free(places, self.space.order.remove(places))

    def remove_before(self, keys: Sequence[OffloadKey], ends: Mapping[int, int]) -> None:
        """Forget those of the records that lie before these pages, by segment."""
        found, records = self._find(list(dict.fromkeys(keys)))
        segments = records["segment"].tolist()
        pages = records["header_page"].tolist()
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
        victims = self._oldest(page_count, record_count)
        garbage, living, emptied = 0, [], []
        for group in victims:
            is_emptied = self.space.order.take_out(group.extent, bits_of(group.indices))
            if self.floors and self.floors.hides(group.keys[0], group.extent >> 32):
                garbage += len(group.keys)
                drop_garbage(self._txn, self._databases, group)
                continue
            living.append(group)
            if is_emptied:
                emptied.append(group.extent)
        keys = [key for group in living for key in group.keys]
        count = garbage + len(keys)
        self._dropped_count += count
        if keys:
            self._free(self._pop_records(living), emptied)
            self.evicted.extend(map(OffloadKey, keys))
            self.space.state.evicted_count += len(keys)
        return count

    def _oldest(self, page_count: int, record_count: int) -> list[Victims]:
        """Return the oldest unpinned records, until both counts are reached."""
        found: list[Victims] = []
        pages = count = 0
        budget = _EVICT_COUNT_MAX - self._dropped_count
        for row, group in self.space.order.oldest(self._pins):
            pages_short = -(-(page_count - pages) // max(1, row.stride_pages))
            wanted = min(budget - count, max(pages_short, record_count - count))
            if wanted <= 0:
                break
            if not group.keys:
                continue
            del group.indices[wanted:]
            del group.keys[wanted:]
            found.append(group)
            count += len(group.keys)
            pages += len(group.keys) * row.stride_pages
        return found

    def _pop_records(self, victims: Sequence[Victims]) -> RowArray:
        """Remove the rows of records; return their places.

        Raises:
            CatalogDamagedError: a record is missing, or lies elsewhere.
        """
        keys = [key for group in victims for key in group.keys]
        # In the order of the keys: a page of rows is searched for and changed while it is at hand.
        turns = sorted(range(len(keys)), key=keys.__getitem__)
        pop = partial(self._txn.pop, db=self._databases.records)
        values = list(map(pop, [keys[turn] for turn in turns]))
        if None in values:
            raise CatalogDamagedError("the order names a key without a record")
        places = decode_records(values)  # type: ignore[arg-type]
        counts = [len(group.keys) for group in victims]
        extents = np.repeat(np.array([group.extent for group in victims], np.uint64), counts)
        indices = np.array([index for group in victims for index in group.indices])
        if (extent_keys(places) != extents[turns]).any() or (
            places["index"] != indices[turns]
        ).any():
            raise CatalogDamagedError("a record lies elsewhere than the order says")
        return places

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
        return sweep.step(self._txn, self._databases, self.floors, self.space.order)

    def _file_pages(self, extents: RowArray) -> list[int]:
        """Return how long the file of each extent has to be."""
        header_pages = self._geometry.header_pages
        return [
            self._geometry.file_pages(
                first + header_pages + count * stride, self.space.segments.row(segment).page_count
            )
            for segment, first, stride, count in extents.tolist()
        ]

    def _find(self, keys: Sequence[OffloadKey]) -> tuple[list[OffloadKey], RowArray]:
        """Return the keys that have a record, and the records."""
        values = list(map(partial(self._txn.get, db=self._databases.records), keys))
        found = [key for key, value in zip(keys, values, strict=True) if value is not None]
        records = decode_records([value for value in values if value is not None])
        if found and self.floors:
            living = self.floors.living(found, records)
            return [found[i] for i in np.flatnonzero(living).tolist()], records[living]
        return found, records

    def _put_records(self, ticket: Ticket, indices: list[int]) -> list[int]:
        """Write rows of records; return the indices of those that had none, garbage apart."""
        rows = split(ticket.records.tobytes(), PLACE_BYTES)
        # In the order of the keys, see `_pop_records`.
        items = sorted([(ticket.keys[index], rows[index]) for index in indices])
        records = self._databases.records
        with self._txn.cursor(db=records) as cursor:
            consumed_count, added_count = cursor.putmulti(items, overwrite=False)
        if added_count == consumed_count:
            return indices
        ours = []
        for index in indices:
            key, row = ticket.keys[index], rows[index]
            stored = self._txn.get(key, db=records)
            if stored is not None and self.floors and self.floors.hide(key, stored):
                self._txn.put(key, row, db=records)
                stored = row
            if stored == row:
                ours.append(index)
        return ours

    def _enter(self, ticket: Ticket, extents: Sequence[TicketExtent], kept: list[int]) -> None:
        """Enter the records that were written into their extents; free the places of the others."""
        kept_set = set(kept)
        emptied: list[int] = []
        unused: list[int] = []
        for part in reversed(extents):
            places = range(part.first, part.end)
            here = [index - part.first for index in places if index in kept_set]
            if len(here) < len(places):
                unused += [index for index in places if index not in kept_set]
            if not here:
                emptied.append(part.extent)
                continue
            row = ExtentRow.of(part.stride_pages, ticket.keys[part.first : part.end])
            self.space.order.enter(part.extent, row, bits_of(here))
            segment = part.extent >> 32
            self.space.segments.count_in(segment, len(here), ticket.payload_bytes)
            self.space.trim_segment(segment)
        if unused:
            self.space.free_places(ticket.records[unused], emptied)

    def _free(self, places: RowArray, emptied: Sequence[int]) -> None:
        self.space.segments.count_out(places)
        self.space.free_places(places, emptied)
