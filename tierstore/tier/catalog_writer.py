"""The writer of one catalog: applies queued operations in batches, keeps room ahead of need.

Synchronous: `SecondaryTier` calls it in its mailbox's thread, tests call it directly. A batch is
one transaction; tickets, waiting requests and events change only after it committed.
"""

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

from tierstore.clock import Clock
from tierstore.errors import (
    BackendCorruptError,
    BackendError,
    BackendFullError,
    BackendMapFullError,
    CatalogDamagedError,
    CatalogError,
)
from tierstore.key import Namespace, OffloadKey
from tierstore.tier.catalog import Catalog
from tierstore.tier.catalog_messages import (
    BeginEpoch,
    Committed,
    CommitTicket,
    Evict,
    ForgetNamespace,
    Freed,
    Operation,
    Placed,
    Refused,
    ReleaseDone,
    RemoveKeys,
    RequestPlaces,
    SecondaryEvent,
    TouchKeys,
)
from tierstore.tier.catalog_schema import PendingRow
from tierstore.tier.catalog_txn import EVICT_COUNT_MAX, CatalogTxn, Ticket
from tierstore.transfer import FailureReason, PageRun, Place

__all__ = ["CatalogWriter"]

_logger = logging.getLogger(__name__)

_BATCH_KEYS_MAX = 512
_WAITING_MAX = 1024
_SYNC_SECONDS = 5.0
_STARVATION_SECONDS = 1.0
"""A request that waits longer takes over the releases of other processes, which may be idle."""
_RELIEF_STEP = 4


class CatalogWriter:
    """Applies operations; one thread at a time calls `handle`."""

    def __init__(self, catalog: Catalog, pins: Mapping[OffloadKey, int], clock: Clock) -> None:
        """`pins` is a live view: records in it are not evicted."""
        self._catalog = catalog
        self._pins = pins
        self._clock = clock
        self.events: deque[SecondaryEvent] = deque()
        """Answers in order; the reader pops from the left, in any thread."""
        self.waiting: deque[RequestPlaces] = deque()
        """Requests that wait for bytes to be given back, in order."""
        self.forgotten_count = 0
        """How many `ForgetNamespace` were done."""
        self._tickets: dict[int, Ticket] = {}
        self._writing: set[OffloadKey] = set()
        self._retained: list[Operation] = []
        self._record_count_max = catalog.geometry.record_count_max
        self._first_waiting: int | None = None
        self._waits_since = 0.0
        self._needs_sync = False
        self._synced_at = clock.seconds()
        self._logged: set[str] = set()

    def handle(self, operations: Iterable[Operation]) -> None:
        """Apply operations in order; never raises for a failing catalog."""
        retained, self._retained = self._retained, []
        for batch in _batches([*retained, *operations]):
            if isinstance(batch[0], ForgetNamespace):
                self._forget(batch[0])
            else:
                self._apply_batch(batch)
        if self._needs_sync and self._clock.seconds() - self._synced_at >= _SYNC_SECONDS:
            self.sync()

    def recover(self) -> list[Namespace]:
        """Adopt what dead owners left, and make room if the capacity shrank.

        Returns:
            Namespaces to forget: epochs of dead owners, whose records nobody will ever ask for.
        """
        epochs: list[Namespace] = []
        try:
            with self._catalog.transaction(self._pins) as work:
                epochs = work.dead_epochs(self._catalog.is_owner_dead)
                releases = work.adopt_dead(self._catalog.is_owner_dead)
                freed = work.space.emit()
        except (BackendError, CatalogError) as error:
            self._log("recovery failed", error)
        else:
            self.events.extend(_freed(release) for release in [*releases, freed] if release)
        self.handle([Evict()])
        return epochs

    def sync(self) -> None:
        """Flush what was committed to the device."""
        try:
            self._catalog.sync()
        except BackendError as error:
            self._log("sync failed", error)
        self._needs_sync = False
        self._synced_at = self._clock.seconds()

    def _apply_batch(self, batch: Sequence[Operation]) -> None:
        try:
            try:
                has_more = self._transact(batch)
            except BackendMapFullError as error:
                self._log("catalog full, evicting", error)
                self._relieve()
                has_more = self._transact(batch)
            while has_more:
                has_more = self._transact(())
        except (BackendError, CatalogError) as error:
            self._log("catalog write failed", error)
            self._give_up(batch, error)

    def _transact(self, batch: Sequence[Operation]) -> bool:
        """Apply a batch, place what waits, evict ahead; say whether more must be evicted."""
        closed: list[int] = []
        opened: dict[int, Ticket] = {}
        waiting = self.waiting.copy()
        events: list[SecondaryEvent] = []
        with self._catalog.transaction(self._pins) as work:
            for operation in _joined_touches(batch):
                if isinstance(operation, RequestPlaces):
                    waiting.append(operation)
                else:
                    self._apply(work, operation, closed)
            self._place_waiting(work, waiting, closed, opened, events)
            self._make_room(work, work.space.ahead_pages())
            has_more = len(work.evicted) >= EVICT_COUNT_MAX
            freed = work.space.emit()
        for ticket_id in closed:
            self._writing.difference_update(self._tickets.pop(ticket_id).keys)
        self._tickets.update(opened)
        for ticket in opened.values():
            self._writing.update(ticket.keys)
        self.waiting = waiting
        if freed:
            events.append(_freed(freed, work.evicted))
        self.events.extend([*map(Committed, closed), *events])
        self._needs_sync = True
        return has_more

    def _apply(self, work: CatalogTxn, operation: Operation, closed: list[int]) -> None:
        match operation:
            case CommitTicket(ticket_id, failed):
                ticket = self._tickets.get(ticket_id)
                if ticket is not None and ticket_id not in closed:
                    work.commit(ticket, range(len(ticket.keys)) if failed is None else failed)
                    closed.append(ticket_id)
            case TouchKeys(keys):
                work.touch(keys)
            case RemoveKeys(keys):
                work.remove(keys)
            case ReleaseDone(release_id):
                work.space.release(release_id)
            case BeginEpoch(namespace, manifest_json):
                work.begin_epoch(namespace, manifest_json)
            case _:
                pass

    def _place_waiting(
        self,
        work: CatalogTxn,
        waiting: deque[RequestPlaces],
        closed: Sequence[int],
        opened: dict[int, Ticket],
        events: list[SecondaryEvent],
    ) -> None:
        """Place requests in order until one has to wait."""
        # All that is being written may be much: it is asked, not copied, for each transaction.
        done = {key for ticket_id in closed for key in self._tickets[ticket_id].keys}
        fresh: set[OffloadKey] = set()
        adopted = False
        while waiting:
            request = waiting[0]
            missing = work.missing(request.keys)
            keys = [k for k in missing if k not in fresh and (k in done or k not in self._writing)]
            writing_count = len(self._writing) - len(done) + len(fresh)
            stride_pages = self._catalog.geometry.stride_pages(request.payload_bytes)
            pages = work.space.charge_of(len(keys), stride_pages)
            if pages is None or pages > self._catalog.space_pages():
                waiting.popleft()
                events.append(Refused(request.ticket, FailureReason.FULL))
                continue
            self._make_record_room(work, len(keys) + writing_count)
            self._make_room(work, pages)
            if self._free_pages(work) < pages:
                starves = self._starves(request.ticket)
                if not adopted and (starves or work.space.state.pending_pages == 0):
                    adopted = True
                    releases = work.adopt_dead(
                        self._catalog.is_owner_dead, with_idle_releases=starves
                    )
                    events.extend(map(_freed, releases))
                    continue
                if self._can_wait(work, writing_count) and len(waiting) <= _WAITING_MAX:
                    return
                waiting.popleft()
                events.append(Refused(request.ticket, FailureReason.FULL))
                continue
            waiting.popleft()
            if not keys:
                events.append(Placed(request.ticket, (), ()))
                continue
            ticket = opened[request.ticket] = work.reserve(keys, request.payload_bytes)
            fresh.update(keys)
            places = tuple(map(Place, ticket.places()))
            events.append(Placed(request.ticket, ticket.keys, places))

    def _starves(self, ticket: int) -> bool:
        """Say whether the first waiting request has waited long for others' releases."""
        now = self._clock.seconds()
        if self._first_waiting != ticket:
            self._first_waiting, self._waits_since = ticket, now
        if now - self._waits_since < _STARVATION_SECONDS:
            return False
        self._waits_since = now
        return True

    def _can_wait(self, work: CatalogTxn, writing_count: int) -> bool:
        """Say whether something may still free pages: a release, a write, an unpin."""
        return bool(
            work.space.state.pending_pages
            or writing_count
            or len(work.evicted) >= EVICT_COUNT_MAX
            or (self._pins and work.record_count())
        )

    def _free_pages(self, work: CatalogTxn) -> int:
        return self._catalog.space_pages() - work.space.state.charged_pages

    def _make_room(self, work: CatalogTxn, pages: int) -> None:
        """Evict until `pages` of all ranks are free or will be when the releases are done."""
        rank_count = self._catalog.geometry.rank_count
        while True:
            short = pages - self._free_pages(work) - work.space.state.pending_pages
            if short <= 0 or not work.evict(-(-short // rank_count)):
                return

    def _make_record_room(self, work: CatalogTxn, count: int) -> None:
        excess = work.record_count() + count - self._record_count_max
        if excess > 0:
            work.evict(0, excess)

    def _relieve(self) -> None:
        """Evict an eighth of a catalog whose map is full.

        The catalog is kept below the size that failed from now on. A full device is no reason:
        what fills it may go again, and records with it would not make room for the catalog.
        """
        self._catalog.forget_dead_readers()
        evicted_count, wanted_count = 0, 1

        def evict(work: CatalogTxn) -> bool:
            nonlocal evicted_count, wanted_count
            if not evicted_count:
                wanted_count = work.record_count() // 8
            step_count = work.evict(0, _RELIEF_STEP)
            evicted_count += step_count
            self._record_count_max = max(1, min(self._record_count_max, work.record_count()))
            return step_count > 0 and evicted_count < wanted_count

        self._shrink(evict)

    def _shrink(self, step: Callable[[CatalogTxn], bool]) -> None:
        """Repeat a small step while it answers True, in transactions that need few pages."""
        has_more = True
        while has_more:
            with self._catalog.transaction(self._pins, spares_pages=False) as work:
                has_more = step(work)
                freed = work.space.emit()
            if freed:
                self.events.append(_freed(freed, work.evicted))
            # What a transaction frees can be used from the next but one on.
            for _ in range(2):
                with self._catalog.transaction(spares_pages=False):
                    pass

    def _forget(self, operation: ForgetNamespace) -> None:
        for ticket in self._tickets.values():
            ticket.is_doomed = True
        while self.waiting:
            self.events.append(Refused(self.waiting.popleft().ticket, FailureReason.CLOSED))
        try:
            try:
                self._remove_namespace(operation)
            except BackendMapFullError as error:
                self._log("catalog full, evicting", error)
                self._catalog.forget_dead_readers()
                namespace = operation.namespace
                self._shrink(lambda work: work.forget_namespace(namespace, _RELIEF_STEP))
        except (BackendError, CatalogError) as error:
            self._log("catalog write failed", error)
            self._give_up([operation], error)
        else:
            self.forgotten_count += 1

    def _remove_namespace(self, operation: ForgetNamespace) -> None:
        has_more = True
        while has_more:
            with self._catalog.transaction() as work:
                has_more = work.forget_namespace(operation.namespace, EVICT_COUNT_MAX)
                freed = work.space.emit()
            if freed:
                self.events.append(_freed(freed))

    def _give_up(self, batch: Sequence[Operation], error: Exception) -> None:
        """Answer requests with a refusal; keep what must not be lost for the next batch.

        What meets damage is lost, for it would meet it again, together with what comes after it.
        """
        full = isinstance(error, BackendFullError)
        is_damage = isinstance(error, BackendCorruptError | CatalogDamagedError)
        reason = FailureReason.FULL if full else FailureReason.IO_ERROR
        requests = [operation for operation in batch if isinstance(operation, RequestPlaces)]
        for request in [*self.waiting, *requests]:
            self.events.append(Refused(request.ticket, reason))
        self.waiting.clear()
        for operation in batch:
            match operation:
                case CommitTicket(ticket_id):
                    self.events.append(Committed(ticket_id, reason))
                    if not is_damage:
                        self._retained.append(CommitTicket(ticket_id, None))
                    elif ticket := self._tickets.pop(ticket_id, None):
                        self._writing.difference_update(ticket.keys)
                case ForgetNamespace() | BeginEpoch():
                    self._retained.append(operation)
                case ReleaseDone() if not is_damage:
                    self._retained.append(operation)
                case _:
                    pass

    def _log(self, event: str, error: Exception) -> None:
        cause = f"{event} {type(error).__name__}"
        if cause not in self._logged:
            self._logged.add(cause)
            _logger.warning("%s: cause=%s", event, error)


def _batches(operations: Iterable[Operation]) -> Iterable[list[Operation]]:
    """Cut operations into transactions of bounded size; a `ForgetNamespace` stands alone."""
    batch: list[Operation] = []
    key_count = 0
    for operation in operations:
        if isinstance(operation, ForgetNamespace):
            if batch:
                yield batch
            yield [operation]
            batch, key_count = [], 0
            continue
        batch.append(operation)
        key_count += len(getattr(operation, "keys", ()))
        if key_count >= _BATCH_KEYS_MAX:
            yield batch
            batch, key_count = [], 0
    if batch:
        yield batch


def _joined_touches(batch: Sequence[Operation]) -> Iterable[Operation]:
    """Join touches that follow each other, with the same outcome.

    Each touch of all records there are would cost a page of the map until the transaction ends, and
    what gathers behind a slow transaction is hundreds of them.
    """
    for kind, operations in itertools.groupby(batch, type):
        if kind is TouchKeys:
            touches = (cast("TouchKeys", operation).keys for operation in operations)
            yield TouchKeys(tuple(itertools.chain.from_iterable(touches)))
        else:
            yield from operations


def _freed(release: tuple[int, PendingRow], evicted: Sequence[OffloadKey] = ()) -> Freed:
    release_id, row = release
    runs = tuple(
        PageRun(segment=segment, first_page=first_page, page_count=page_count)
        for segment, first_page, page_count in row.runs.tolist()
    )
    return Freed(release_id, runs, tuple(row.empty_segments), tuple(evicted))
