"""What one write transaction of the catalog can do; nothing outside changes before it commits."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress

import numpy as np

from tierstore.errors import CatalogDamagedError
from tierstore.geometry import SpaceGeometry
from tierstore.key import NAMESPACE_BYTES, Namespace, OffloadKey
from tierstore.lmdb_env import Transaction
from tierstore.tier.catalog_schema import (
    ORDER_PAGES_BYTES,
    OWNER_BYTES,
    RECORD_DTYPE,
    Databases,
    PendingRow,
    RowArray,
    decode_records,
    split,
    wide_key,
)
from tierstore.tier.space import Space

__all__ = ["EVICT_COUNT_MAX", "CatalogTxn", "Ticket"]

EVICT_COUNT_MAX = 512
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
    is_doomed: bool = False
    """Its namespace was forgotten meanwhile: its records must not appear."""

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
        self.evicted: list[OffloadKey] = []

    def record_count(self) -> int:
        """Return how many records there are."""
        return int(self._txn.stat(db=self._databases.records)["entries"])

    def missing(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the keys that have no record, in order, each once."""
        unique = list(dict.fromkeys(keys))
        found = map(partial(self._txn.get, db=self._databases.records), unique)
        return [key for key, value in zip(unique, found, strict=True) if value is None]

    def reserve(self, keys: Sequence[OffloadKey], payload_bytes: int) -> Ticket:
        """Allocate one place per key; the caller has made sure that there is room."""
        stride_pages = self._geometry.stride_pages(payload_bytes)
        extents = self.space.allocate(len(keys), stride_pages)
        records = np.zeros(len(keys), RECORD_DTYPE)
        places = records["place"]
        counts = extents["count"]
        places["segment"] = np.repeat(extents["segment"], counts)
        places["header_page"] = np.repeat(extents["header_page"], counts)
        firsts = np.repeat(np.cumsum(counts) - counts, counts)
        places["index"] = np.arange(len(keys)) - firsts
        places["stride_pages"] = stride_pages
        places["payload_bytes"] = payload_bytes
        pending_id = self.space.add_pending(PendingRow(self.space.owner, extents=extents))
        return Ticket(tuple(keys), records, extents, pending_id)

    def commit(self, ticket: Ticket, failed: Collection[int]) -> None:
        """Publish a ticket's records but the failed ones and those that another process has.

        The last key becomes the oldest, so that a prefix loses its tail first.
        """
        self.space.remove_pending(ticket.pending_id)
        for extent in ticket.extents:
            self.space.add_extent(extent)
        good = np.ones(len(ticket.keys), bool)
        good[[index for index in failed if index < len(good)]] = False
        good &= not ticket.is_doomed
        kept: list[int] = np.flatnonzero(good).tolist()
        present = set(self._present([ticket.keys[index] for index in kept]))
        if present:
            kept = [index for index in kept if ticket.keys[index] not in present]
            good[:] = False
            good[kept] = True
        if kept:
            kept.reverse()
            self._publish([ticket.keys[index] for index in kept], ticket.records[kept])
            payload = ticket.records["place"]["payload_bytes"][kept]
            self.space.state.payload_bytes += int(payload.sum(dtype=np.int64))
            for segment in np.unique(ticket.records["place"]["segment"][kept]).tolist():
                self.space.trim_segment(segment)
        if len(kept) < len(good):
            self.space.free_places(ticket.records["place"][~good])

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Make recorded keys the youngest, in order; count one use each."""
        ordered = list(dict.fromkeys(reversed(keys)))[::-1]
        values = list(map(partial(self._txn.get, db=self._databases.records), ordered))
        found = [value for value in values if value is not None]
        if not found:
            return
        records = decode_records(found)
        self._delete_order(records)
        records["uses"] += 1
        self._publish([key for key, value in zip(ordered, values, strict=True) if value], records)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget records and free their places; unknown keys are skipped."""
        pop = partial(self._txn.pop, db=self._databases.records)
        found = [value for value in map(pop, dict.fromkeys(keys)) if value is not None]
        if found:
            records = decode_records(found)
            self._delete_order(records)
            self._free(records)

    def evict(self, page_count: int, record_count: int = 1) -> int:
        """Evict the oldest unpinned records until both counts are reached; return how many went.

        `page_count` is of one rank. At most `EVICT_COUNT_MAX` records per transaction.
        """
        sequences: list[bytes] = []
        keys: list[bytes] = []
        pages = 0
        budget = EVICT_COUNT_MAX - len(self.evicted)
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
        if not keys:
            return 0
        values = list(map(partial(self._txn.pop, db=self._databases.records), keys))
        if None in values:
            raise CatalogDamagedError("order names a key without a record")
        for _ in map(partial(self._txn.delete, db=self._databases.order), sequences):
            pass
        self._free(decode_records(values))  # type: ignore[arg-type]
        self.evicted.extend(map(OffloadKey, keys))
        self.space.state.evicted_count += len(keys)
        return len(keys)

    def begin_epoch(self, namespace: Namespace, manifest_json: bytes) -> None:
        """Enter a namespace that only this owner asks for."""
        self._txn.put(namespace, manifest_json, db=self._databases.namespaces)
        owner = self.space.owner.to_bytes(OWNER_BYTES, "little")
        self._txn.put(namespace, owner, db=self._databases.epochs)

    def dead_epochs(self, is_dead: Callable[[int], bool]) -> list[Namespace]:
        """Return the namespaces whose only owner is dead."""
        with self._txn.cursor(db=self._databases.epochs) as cursor:
            return [
                Namespace(bytes(namespace))
                for namespace, owner in cursor
                if is_dead(int.from_bytes(owner, "little"))
            ]

    def forget_namespace(self, namespace: Namespace, count_max: int) -> bool:
        """Remove up to `count_max` records of a namespace; say whether there may be more.

        An epoch without records is over.
        """
        keys: list[OffloadKey] = []
        with self._txn.cursor(db=self._databases.records) as cursor:
            if cursor.set_range(namespace):
                for key in cursor.iternext(keys=True, values=False):
                    if key[:NAMESPACE_BYTES] != namespace or len(keys) == count_max:
                        break
                    keys.append(OffloadKey(key))
        self.remove(keys)
        has_more = len(keys) == count_max
        if not has_more and self._txn.delete(namespace, db=self._databases.epochs):
            self._txn.delete(namespace, db=self._databases.namespaces)
        return has_more

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
        verdicts: dict[int, bool] = {}

        def judge(owner: int) -> bool:
            if owner not in verdicts:
                verdicts[owner] = owner != self.space.owner and is_dead(owner)
            return verdicts[owner]

        releases = []
        for pending_id, row in self.space.all_pending():
            if len(row.extents):
                if judge(row.owner):
                    self.space.remove_pending(pending_id)
                    self.space.free_extents(row.extents)
            elif judge(row.owner) or (with_idle_releases and row.owner != self.space.owner):
                row.owner = self.space.owner
                self.space.put_pending(pending_id, row)
                releases.append((pending_id, row))
        for segment, segment_row in self.space.all_segments():
            if segment_row.is_active and judge(segment_row.owner):
                # Never appended to: its file may be missing, and would be preallocated anew
                # although pages of it were given back.
                self.space.close_segment(segment)
                self.space.trim_segment(segment)
        return releases

    def _present(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        values = map(partial(self._txn.get, db=self._databases.records), keys)
        return list(compress(keys, values))

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
        self.space.free_places(places)
        self.space.state.payload_bytes -= int(places["payload_bytes"].sum(dtype=np.int64))
