"""What one write transaction of the catalog can do; nothing outside changes before it commits."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from tierstore.catalog.garbage import Floors, Sweep
from tierstore.catalog.index.cache import IndexCache
from tierstore.catalog.index.index import Index
from tierstore.catalog.namespaces import Namespaces
from tierstore.catalog.pages.cluster_row import ClusterRow, bits_of, indices_of, names_of
from tierstore.catalog.pages.extents import adjacent
from tierstore.catalog.pages.order import Spot, Victims
from tierstore.catalog.pages.space import Space
from tierstore.catalog.pages.state import LastWrite
from tierstore.catalog.pages.unreferenced import release_unreferenced
from tierstore.catalog.records import Records
from tierstore.catalog.rows import (
    Databases,
    PendingRow,
    RowArray,
    SegmentState,
    extent_key,
)
from tierstore.catalog.tickets import Ticket, TicketCluster
from tierstore.geometry import SpaceGeometry
from tierstore.key import NAMESPACE_BYTES, OffloadKey
from tierstore.lmdb_env.library import Transaction
from tierstore.tier_events import Evicted, Freed, SecondaryEvent

__all__ = ["CatalogTxn"]

_EVICT_COUNT_MAX = 512
"""Records that one transaction evicts at most, so that other processes get their turn, and what a
transaction needs of the map is bounded."""


class CatalogTxn:
    """Operations on records and their order; the pages below them are `space`'s."""

    def __init__(
        self,
        txn: Transaction,
        databases: Databases,
        geometry: SpaceGeometry,
        space: Space,
        *,
        pins: Mapping[OffloadKey, int],
        cache: IndexCache,
        last: LastWrite | None = None,
    ) -> None:
        """`last` has the rows that need not be read again."""
        self._txn = txn
        self._databases = databases
        self._geometry = geometry
        self._pins = pins
        self.space = space
        self.floors = Floors(txn, databases, None if last is None else last.floors)
        self.namespaces = Namespaces(txn, databases, space, self.floors)
        self._index = Index(txn, databases, cache)
        self._records = Records(self._index, self.floors, space.clusters.find)
        self.evicted: list[OffloadKey] = []
        self.relied_on: set[int] = set()
        """Segments of the records that were found instead of being written."""
        self.freed: tuple[int, PendingRow] | None = None
        """The release, by id, of what this transaction freed; None: nothing, or it goes on."""
        self._dropped_count = 0

    def flush(self) -> LastWrite | None:
        """Write all that has changed into the transaction.

        Returns:
            The rows as they are then; None: they have to be read again.
        """
        self.freed = self.space.emit()
        self._index.flush()
        self.space.flush()
        state = self.space.written_state
        # With the state as it was, perhaps nothing is written, and the number is used again.
        if state is None or self.namespaces.has_other_owners:
            return None
        return LastWrite(
            int(self._txn.id()),
            state,
            self.space.owners,
            {bytes(namespace): floor for namespace, floor in self.floors.all().items()},
            self.space.segments.stored,
        )

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
        unique = list(dict.fromkeys(keys))
        found = []
        for key, spot in zip(unique, self._records.find(unique), strict=True):
            if spot is not None:
                found.append(key)
                self.relied_on.add(spot[0] >> 32)
        return found

    def reserve(self, keys: Sequence[OffloadKey], payload_bytes: int) -> Ticket:
        """Allocate one place per key, all of one namespace; the caller has made room."""
        namespace = keys[0][:NAMESPACE_BYTES]
        stride_pages = self._geometry.stride_pages(payload_bytes)
        extents = self.space.allocate(namespace, len(keys), stride_pages)
        clusters = tuple(self._clusters_of(keys, extents, payload_bytes))
        pending_id = self.space.pending.add(PendingRow(self.space.owner, extents=extents))
        return Ticket(tuple(keys), extents, clusters, pending_id, self._records.log_number)

    def commit(self, ticket: Ticket, failed: Collection[int]) -> bool:
        """Publish a ticket's records, except the failed ones and those that another process has.

        The last key becomes the oldest, so that a prefix loses its tail first. False: another
        process took this owner for dead, and its places for free.
        """
        if not self.space.pending.remove(ticket.pending_id):
            return False
        living = set(self.space.end_writing(ticket.extents)["segment"].tolist())
        for part in reversed(ticket.clusters):
            if part.cluster >> 32 in living:
                self._publish(ticket, part, failed)
        return True

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Make recorded keys the youngest, in order.

        Except records that leave in the order in which they were written.
        """
        ordered = list(dict.fromkeys(reversed(keys)))[::-1]
        spots = [spot for spot in self._records.find(ordered) if spot is not None]
        if self._geometry.unit_pages != 1:
            # Records that share a unit of the file system leave together. By LRU, units would stay
            # half empty, and charged.
            row_of, keeps_order = self.space.clusters.row, self._geometry.keeps_order
            spots = [spot for spot in spots if not keeps_order(row_of(spot[0]).stride_pages)]
        self.space.order.touch(spots)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget records and free their places; unknown keys are skipped."""
        spots = self._records.find(keys)
        self._remove({spot for spot in spots if spot is not None})

    def remove_before(self, keys: Sequence[OffloadKey], ends: Mapping[int, int]) -> None:
        """Forget those of the records that lie before these pages, by segment."""
        spots = {spot for spot in self._records.find(keys) if spot is not None}
        # A cluster is given out at once: none has pages on both sides.
        self._remove(s for s in spots if s[0] & 0xFFFFFFFF < ends.get(s[0] >> 32, 0))

    def evict(self, page_count: int, record_count: int = 1) -> int:
        """Evict the oldest unpinned records until both counts are reached; return how many went.

        `page_count` is of one rank. At most `_EVICT_COUNT_MAX` records per transaction. Garbage on
        the way goes, too, and frees nothing: a caller that needs pages asks again.
        """
        count = 0
        for group in self._oldest(page_count, record_count):
            count += len(group.keys)
            bits = bits_of(group.indices)
            if self.floors and self.floors.hides(group.keys[0], group.cluster >> 32):
                self.space.order.take_out(group.cluster, bits)
                self._records.remove(group.cluster, group.keys)
                continue
            self._take_out(group.cluster, bits, group.keys)
            self.evicted.extend(map(OffloadKey, group.keys))
            self.space.state.evicted_count += len(group.keys)
        self._dropped_count += count
        return count

    def _oldest(self, page_count: int, record_count: int) -> list[Victims]:
        """Return the oldest unpinned records, until both counts are reached."""
        found: list[Victims] = []
        pages = count = 0
        budget = _EVICT_COUNT_MAX - self._dropped_count
        for group in self.space.order.oldest(self._pins):
            stride_pages = group.row.stride_pages
            pages_short = -(-(page_count - pages) // stride_pages)
            wanted = min(budget - count, max(pages_short, record_count - count))
            if wanted <= 0:
                break
            if not group.keys:
                continue
            del group.indices[wanted:]
            del group.keys[wanted:]
            found.append(group)
            count += len(group.keys)
            pages += len(group.keys) * stride_pages
        return found

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
        return sweep.step(
            self._txn, self._databases, self.floors, self.space.order, self._records.remove
        )

    def _clusters_of(
        self, keys: Sequence[OffloadKey], extents: RowArray, payload_bytes: int
    ) -> Iterable[TicketCluster]:
        """Join the extents that were given out for keys, as far as they are adjacent."""
        header_pages = self._geometry.header_pages
        laid_out = extents.tolist()
        first = at = 0
        for extent_count in adjacent(laid_out, header_pages):
            part = laid_out[at : at + extent_count]
            segment, first_page, stride_pages, extent_records = part[0]
            end = first + sum(count for *_, count in part)
            row = ClusterRow(
                record_count=end - first,
                stride_pages=stride_pages,
                payload_bytes=payload_bytes,
                segment_pages=0,
                extent_records=extent_records,
                groups={},
                names=names_of(keys[first:end]),
            )
            row.segment_pages = self._geometry.file_pages(
                first_page + row.page_count(header_pages),
                self.space.segments.row(segment).page_count,
            )
            yield TicketCluster(extent_key(segment, first_page), first, row)
            first = end
            at += extent_count

    def _publish(self, ticket: Ticket, part: TicketCluster, failed: Collection[int]) -> None:
        """Enter the records of a cluster that were written; free the places of the others."""
        row = replace(part.row, groups={})
        keys = ticket.keys[part.first : part.first + row.record_count]
        good = [index for index in range(len(keys)) if index + part.first not in failed]
        taken = self._records.add(part.cluster, [keys[index] for index in good], ticket.log_number)
        if taken:
            good = [index for index in good if keys[index] not in taken]
        bits = bits_of(good)
        if bits != row.all_bits:
            self.space.free_records(part.cluster, row, row.all_bits & ~bits, bits)
        if bits:
            self.space.order.enter(part.cluster, row, bits)
            segment = part.cluster >> 32
            self.space.segments.count_in(segment, len(good), row.payload_bytes)
            self.space.trim_segment(segment)

    def _remove(self, spots: Iterable[Spot]) -> None:
        bits_by_cluster: dict[int, int] = {}
        for cluster, index in spots:
            bits_by_cluster[cluster] = bits_by_cluster.get(cluster, 0) | 1 << index
        for cluster, bits in sorted(bits_by_cluster.items()):
            keys = self.space.clusters.row(cluster).keys()
            self._take_out(cluster, bits, [keys[index] for index in indices_of(bits)])

    def _take_out(self, cluster: int, bits: int, keys: Sequence[bytes]) -> None:
        """Remove records of one cluster, and free their places."""
        row = self.space.order.take_out(cluster, bits)
        self._records.remove(cluster, keys)
        self.space.segments.count_out(cluster >> 32, len(keys), row.payload_bytes)
        self.space.free_records(cluster, row, bits, row.live_bits)
