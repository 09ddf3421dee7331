"""The writer of one catalog: applies queued operations in batches, keeps room ahead of need.

Synchronous: `SecondaryTier` calls it in its mailbox's thread, tests call it directly. A batch is
one transaction; tickets, waiting requests and events change only after it committed.
"""

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tierstore.bounded_log import bounded
from tierstore.catalog.batches import batches, joined_touches
from tierstore.catalog.catalog import Catalog
from tierstore.catalog.garbage import Sweep
from tierstore.catalog.lost_payload import LostPayload
from tierstore.catalog.messages import (
    BeginEpoch,
    Committed,
    CommitTicket,
    Evict,
    ForgetNamespace,
    Freed,
    Leave,
    LosePayload,
    Operation,
    Placed,
    Refused,
    ReleaseDone,
    RemoveKeys,
    RequestPlaces,
    SecondaryEvent,
    SweepGarbage,
    TouchKeys,
)
from tierstore.catalog.transaction import CatalogTxn, Ticket
from tierstore.clock import Clock
from tierstore.errors import (
    BackendCorruptError,
    BackendError,
    BackendFullError,
    CatalogDamagedError,
    CatalogError,
)
from tierstore.key import NAMESPACE_BYTES, OffloadKey
from tierstore.transfer import FailureReason, Place

__all__ = ["CatalogWriter"]

_logger = bounded(logging.getLogger(__name__))

_WAITING_MAX = 1024
_SYNC_SECONDS = 5.0
_STARVATION_SECONDS = 1.0
"""A request that waits longer takes over the releases of other processes, which may be idle."""
_ADOPT_SECONDS = 5.0
"""Between two looks whether others who share the path, and its capacity, are dead."""
_HOLD_SECONDS = 2.0
"""Requests wait so long for a reader that has stopped, and are refused as long as it stays so."""
_RETRY_SECONDS = 1.0
"""Until what a failing catalog could not do is tried again, if nothing else comes before."""
_OVER_EVICT_MIN = 8


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
        self.failure_count = 0
        """How many transactions failed."""
        self._tickets: dict[int, Ticket] = {}
        self._writing: set[OffloadKey] = set()
        self._retained: list[Operation] = []
        self._retained_at = 0.0
        self._answered: set[int] = set()
        """Tickets whose commit is retained, but was answered when it failed."""
        self.lost = LostPayload()
        """What the next requests have to record anew."""
        self._sweep: Sweep | None = None
        self._held_since: float | None = None
        self._adopted_at = clock.seconds()
        self._first_waiting: int | None = None
        self._waits_since = 0.0
        self._needs_sync = False
        self.failure = ""
        """Why the last transaction failed; empty: it did not."""
        self._synced_at = clock.seconds()
        self._logged: set[str] = set()

    def handle(self, operations: Iterable[Operation]) -> None:
        """Apply operations in order; never raises for a failing catalog."""
        retained, self._retained = self._retained, []
        error: Exception | None = None
        for batch in batches([*retained, *operations], self._key_count):
            if error is not None:
                # A reset that is done later must not forget what came after it.
                self._give_up(batch, error)
            elif isinstance(batch[0], ForgetNamespace):
                error = self._forget(batch[0])
            elif isinstance(batch[0], SweepGarbage):
                self._sweep_step()
            elif self._catalog.is_outgrowing():
                self._hold_back(batch)
            else:
                self._held_since = None
                self._apply_batch(batch)
        if self._needs_sync and self._clock.seconds() - self._synced_at >= _SYNC_SECONDS:
            self.sync()

    @property
    def has_garbage(self) -> bool:
        """Whether there are rows of forgotten namespaces to sweep."""
        return self._sweep is not None

    @property
    def is_due(self) -> bool:
        """Whether it is time to try again what a failing catalog could not do."""
        return bool(self._retained) and self._clock.seconds() - self._retained_at >= _RETRY_SECONDS

    def recover(self) -> None:
        """Adopt what dead owners left, and make room if the capacity shrank."""
        try:
            with self._catalog.transaction(self._pins) as work:
                work.namespaces.forget_dead_epochs(self._catalog.is_owner_dead)
                releases = work.adopt_dead(self._catalog.is_owner_dead)
                work.namespaces.forget_unused()
                floors = work.floors.all()
        except (BackendError, CatalogError) as error:
            self._log("recovery failed", error)
        else:
            self._sweep = Sweep(floors) if floors else None
            self.events.extend(work.events(releases))
        self.handle([Evict()])

    def release_unreferenced(self, segments: Mapping[int, int]) -> None:
        """Release the unreferenced of the segments that were listed before, with their pages."""
        try:
            with self._catalog.transaction(self._pins) as work:
                if not work.charge_unreferenced(segments):
                    return
                releases = work.adopt_dead(self._catalog.is_owner_dead)
        except (BackendError, CatalogError) as error:
            self._log("unreferenced segments could not be released", error)
            return
        self._needs_sync = True
        self.events.extend(work.events(releases))

    def abandon(self) -> tuple[list[SecondaryEvent], set[int], list[Operation]]:
        """Give everything up, for the catalog is lost.

        Returns:
            Answers to what was asked and not answered, or was and nobody has taken the answer; the
            tickets of which a commit will come; and what has to be done in any later catalog.
        """
        events: list[SecondaryEvent] = []
        while True:
            try:
                event = self.events.popleft()
            except IndexError:  # the reader was faster
                break
            if isinstance(event, Placed):
                self._tickets.pop(event.ticket, None)
                events.append(Refused(event.ticket, FailureReason.IO_ERROR))
            elif isinstance(event, Committed):
                events.append(Committed(event.ticket, FailureReason.IO_ERROR))
            elif not isinstance(event, Freed):
                events.append(event)
        events += [Refused(request.ticket, FailureReason.IO_ERROR) for request in self.waiting]
        self.waiting.clear()
        owed: list[Operation] = [
            op for op in self._retained if isinstance(op, ForgetNamespace | BeginEpoch)
        ]
        self._retained.clear()
        return events, set(self._tickets) - self._answered, owed

    def sync(self) -> None:
        """Flush what was committed to the device."""
        try:
            self._catalog.sync()
        except BackendError as error:
            self._log("sync failed", error)
        self._needs_sync = False
        self._synced_at = self._clock.seconds()

    def _key_count(self, operation: Operation) -> int:
        if isinstance(operation, CommitTicket):
            ticket = self._tickets.get(operation.ticket)
            return 0 if ticket is None else len(ticket.keys)
        return len(getattr(operation, "keys", ()))

    def _apply_batch(self, batch: Sequence[Operation]) -> None:
        has_more = True
        while has_more:
            try:
                has_more = self._transact(batch)
            except (BackendError, CatalogError) as error:
                self._log("catalog write failed", error)
                self._give_up(batch, error)
                return
            batch = ()  # it was committed and answered: what fails from now on is the eviction

    def _hold_back(self, batch: Sequence[Operation]) -> None:
        """Do what cannot wait of a batch, for each transaction makes the file larger for good.

        Uses of records are dropped. Requests wait, and are refused if that takes long: evicting
        would not make the file smaller.
        """
        now = self._clock.seconds()
        if self._held_since is None:
            self._held_since = now
            if "held back" not in self._logged:
                self._logged.add("held back")
                _logger.warning(
                    "a process that reads the catalog has stopped: nothing more is stored until "
                    "it goes on, or ends"
                )
        self.waiting.extend(op for op in batch if isinstance(op, RequestPlaces))
        necessary = [op for op in batch if not isinstance(op, RequestPlaces | TouchKeys | Evict)]
        if necessary:
            try:
                self._transact(necessary, is_held_back=True)
            except (BackendError, CatalogError) as error:
                self._log("catalog write failed", error)
                self._give_up(necessary, error)
        if now - self._held_since >= _HOLD_SECONDS or len(self.waiting) > _WAITING_MAX:
            while self.waiting:
                self.events.append(Refused(self.waiting.popleft().ticket, FailureReason.FULL))

    def _transact(self, batch: Sequence[Operation], *, is_held_back: bool = False) -> bool:
        """Apply a batch, place what waits, evict ahead; return whether more must be evicted."""
        closed: dict[int, FailureReason | None] = {}
        opened: dict[int, Ticket] = {}
        waiting = self.waiting.copy()
        events: list[SecondaryEvent] = []
        sweep = self._sweep
        with self._catalog.transaction(self._pins) as work:
            for operation in joined_touches(batch):
                if isinstance(operation, RequestPlaces):
                    waiting.append(operation)
                else:
                    self._apply(work, operation, closed)
            if not is_held_back:
                events.extend(self._adopt_in_time(work))
                self._place_waiting(work, waiting, closed, opened, events)
                sweep = self._make_catalog_room(work, opened)
                self._make_room(work, work.space.ahead_pages())
            has_more = not (is_held_back or work.may_evict())
        self.failure = ""
        for ticket_id in closed:
            self._writing.difference_update(self._tickets.pop(ticket_id).keys)
        self._tickets.update(opened)
        for ticket in opened.values():
            self._writing.update(ticket.keys)
        self.waiting = waiting
        self.lost.rely_on(work.relied_on)
        self._sweep = None if sweep is None or sweep.is_over else sweep
        events.extend(work.events())
        for ticket_id, reason in closed.items():
            self._answer_commit(ticket_id, reason)
        self._answered.difference_update(closed)
        self.events.extend(events)
        self._needs_sync = True
        return has_more

    def _apply(
        self, work: CatalogTxn, operation: Operation, closed: dict[int, FailureReason | None]
    ) -> None:
        match operation:
            case CommitTicket(ticket_id, failed):
                ticket = self._tickets.get(ticket_id)
                if ticket is not None and ticket_id not in closed:
                    lost = range(len(ticket.keys)) if failed is None else failed
                    is_ours = work.commit(ticket, lost)
                    closed[ticket_id] = None if is_ours else FailureReason.IO_ERROR
            case TouchKeys(keys):
                work.touch(keys)
            case RemoveKeys(keys):
                work.remove(keys)
            case ReleaseDone(release_id):
                work.space.release(release_id)
            case BeginEpoch(namespace, manifest_json):
                work.namespaces.begin_epoch(namespace, manifest_json)
            case LosePayload(segments):
                self.lost.note(work.space, segments)
            case Evict(page_count) if page_count:
                work.evict(page_count)
            case Leave():
                work.namespaces.leave(work.space.owner)
            case _:
                pass

    def _place_waiting(
        self,
        work: CatalogTxn,
        waiting: deque[RequestPlaces],
        closed: Iterable[int],
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
            if not request.is_noted:
                self.lost.remove_records(work, request.keys)
            recorded = work.recorded(request.keys)
            if recorded and not request.is_noted:
                # Storing a chunk once more is a use of it, head last: before anything is evicted.
                work.touch(recorded[::-1])
                waiting[0] = replace(request, is_noted=True)
            known = fresh.union(recorded)
            keys = [
                key
                for key in dict.fromkeys(request.keys)
                if key not in known and (key in done or key not in self._writing)
            ]
            writing_count = len(self._writing) - len(done) + len(fresh)
            stride_pages = self._catalog.geometry.stride_pages(request.payload_bytes)
            namespace = request.keys[0][:NAMESPACE_BYTES] if request.keys else b""
            pages = work.space.charge_of(namespace, len(keys), stride_pages)
            if pages > work.space.budget.space_pages:
                waiting.popleft()
                events.append(Refused(request.ticket, FailureReason.FULL))
                continue
            self._make_room(work, pages)
            if work.space.free_pages() < pages:
                starves = self._starves(request.ticket)
                if not adopted and (starves or work.space.state.pending_pages == 0):
                    adopted = True
                    releases = work.adopt_dead(
                        self._catalog.is_owner_dead, with_idle_releases=starves
                    )
                    events.extend(Freed.of(*release) for release in releases)
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
        """Return whether the first waiting request has waited long for others' releases."""
        now = self._clock.seconds()
        if self._first_waiting != ticket:
            self._first_waiting, self._waits_since = ticket, now
        if now - self._waits_since < _STARVATION_SECONDS:
            return False
        self._waits_since = now
        return True

    def _can_wait(self, work: CatalogTxn, writing_count: int) -> bool:
        """Return whether something may still free pages: a release, a write, an unpin."""
        return bool(
            work.space.state.pending_pages
            or writing_count
            or not work.may_evict()
            or (self._pins and work.space.state.record_count)
        )

    def _make_room(self, work: CatalogTxn, pages: int) -> None:
        """Evict until `pages` of all ranks are free or will be when the releases are done."""
        rank_count = self._catalog.geometry.rank_count
        while True:
            short = pages - work.space.free_pages() - work.space.state.pending_pages
            if short <= 0 or not work.evict(-(-short // rank_count)):
                return

    def _make_catalog_room(self, work: CatalogTxn, opened: Mapping[int, Ticket]) -> Sweep | None:
        """Remove more rows than come while they take more than a catalog may have.

        Garbage and the manifests of nobody first. No more at once: pages of rows that went are free
        only when all on them have gone. Returns how far the sweep has come.
        """
        if not work.space.budget.is_catalog_over or work.namespaces.forget_unused():
            return self._sweep
        if self._sweep is not None:
            return work.sweep(self._sweep)
        coming = sum(len(ticket.keys) for ticket in opened.values())
        work.evict(0, max(_OVER_EVICT_MIN, 2 * coming))
        return None

    def _adopt_in_time(self, work: CatalogTxn) -> list[SecondaryEvent]:
        """Adopt what owners left who died since the last look: their capacity holds no longer."""
        now = self._clock.seconds()
        is_alone = work.space.budget.owner_count <= 1
        if is_alone or now - self._adopted_at < _ADOPT_SECONDS:
            return []
        self._adopted_at = now
        releases = work.adopt_dead(self._catalog.is_owner_dead)
        return [Freed.of(*release) for release in releases]

    def _forget(self, operation: ForgetNamespace) -> Exception | None:
        """Forget a namespace in one transaction, however many records it has.

        Returns why not.
        """
        namespace = operation.namespace
        refused = [r for r in self.waiting if r.keys and r.keys[0].startswith(namespace)]
        self.waiting = deque(request for request in self.waiting if request not in refused)
        for request in refused:
            self.events.append(Refused(request.ticket, FailureReason.CLOSED))
        try:
            with self._catalog.transaction(self._pins) as work:
                work.namespaces.forget(namespace)
                floors = work.floors.all()
        except (BackendError, CatalogError) as error:
            self._log("catalog write failed", error)
            self._give_up([operation], error)
            return error
        self.forgotten_count += 1
        self._sweep = Sweep(floors)
        self._needs_sync = True
        self.events.extend(work.events())
        return None

    def _sweep_step(self) -> None:
        if self._sweep is None or self._catalog.is_outgrowing():
            return
        try:
            with self._catalog.transaction(self._pins) as work:
                sweep = work.sweep(self._sweep)
        except (BackendError, CatalogError) as error:
            self._log("sweep failed", error)
            self._sweep = None  # the next who opens the path goes on
            return
        self._sweep = None if sweep.is_over else sweep
        self._needs_sync = True

    def _give_up(self, batch: Sequence[Operation], error: Exception) -> None:
        """Answer requests with a refusal; keep what must not be lost for the next batch.

        What meets damage is lost, for it would meet it again, together with what comes after it.
        """
        self.failure_count += 1
        self.failure = str(error)
        full = isinstance(error, BackendFullError)
        is_damage = isinstance(error, BackendCorruptError | CatalogDamagedError)
        reason = FailureReason.FULL if full else FailureReason.IO_ERROR
        self._retained_at = self._clock.seconds()
        requests = [operation for operation in batch if isinstance(operation, RequestPlaces)]
        for request in [*self.waiting, *requests]:
            self.events.append(Refused(request.ticket, reason))
        self.waiting.clear()
        for operation in batch:
            match operation:
                case CommitTicket(ticket_id):
                    self._answer_commit(ticket_id, reason)
                    self._answered.add(ticket_id)
                    if not is_damage:
                        self._retained.append(CommitTicket(ticket_id, None))
                    else:
                        self._answered.discard(ticket_id)
                        if ticket := self._tickets.pop(ticket_id, None):
                            self._writing.difference_update(ticket.keys)
                case ForgetNamespace() | BeginEpoch():
                    self._retained.append(operation)
                case ReleaseDone() | LosePayload() if not is_damage:
                    self._retained.append(operation)
                case _:
                    pass

    def _answer_commit(self, ticket_id: int, reason: FailureReason | None = None) -> None:
        if ticket_id not in self._answered:
            self.events.append(Committed(ticket_id, reason))

    def _log(self, event: str, error: Exception) -> None:
        cause = f"{event} {type(error).__name__}"
        if cause not in self._logged:
            self._logged.add(cause)
            _logger.warning("%s: cause=%s", event, error)
