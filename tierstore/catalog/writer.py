"""The writer of one catalog: applies queued operations in batches, keeps room ahead of need.

Synchronous: `CatalogDispatcher` calls it in its mailbox's thread, tests call it directly. A batch
is one transaction; tickets, waiting requests and events change only after it committed.
"""

import logging
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from tierstore.bounded_log import bounded
from tierstore.catalog.catalog import Catalog
from tierstore.catalog.garbage import Sweep
from tierstore.catalog.lost_payload import LostPayload
from tierstore.catalog.messages import (
    BeginEpoch,
    CommitTicket,
    Evict,
    ForgetNamespace,
    Leave,
    LosePayload,
    Operation,
    ReleaseDone,
    RemoveKeys,
    RequestPlaces,
    SweepGarbage,
    TouchKeys,
    batches,
    joined_touches,
)
from tierstore.catalog.placement import Placement, Round
from tierstore.catalog.tickets import Tickets
from tierstore.catalog.transaction import CatalogTxn
from tierstore.clock import Clock
from tierstore.errors import (
    BackendCorruptError,
    BackendError,
    BackendFullError,
    CatalogDamagedError,
    CatalogError,
)
from tierstore.key import OffloadKey
from tierstore.tier_events import Committed, Freed, Placed, Refused, SecondaryEvent
from tierstore.transfer import FailureReason

__all__ = ["CatalogWriter"]

_logger = bounded(logging.getLogger(__name__))

_SYNC_SECONDS = 5.0
_RETRY_SECONDS = 1.0
"""Until what a failing catalog could not do is tried again, if nothing else comes before."""


class CatalogWriter:
    """Applies operations; one thread at a time calls `handle`."""

    def __init__(self, catalog: Catalog, pins: Mapping[OffloadKey, int], clock: Clock) -> None:
        """`pins` is a live view: records in it are not evicted."""
        self._catalog = catalog
        self._pins = pins
        self._clock = clock
        self.events: deque[SecondaryEvent] = deque()
        """Answers in order; the reader pops from the left, in any thread."""
        self.forgotten_count = 0
        """How many `ForgetNamespace` were done."""
        self.failure_count = 0
        """How many transactions failed."""
        self._retained: list[Operation] = []
        self._retained_at = 0.0
        self.lost = LostPayload()
        """Records whose payload is gone: the next requests for their keys replace them."""
        self._tickets = Tickets()
        self._placement = Placement(
            catalog, pins, clock, writing=self._tickets.writing, lost=self.lost
        )
        self._sweep: Sweep | None = None
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
                self._placement.end_hold()
                self._apply_batch(batch)
        if self._needs_sync and self._clock.seconds() - self._synced_at >= _SYNC_SECONDS:
            self.sync()

    @property
    def waiting(self) -> Collection[RequestPlaces]:
        """Requests that wait for bytes to be given back, in order."""
        return self._placement.waiting

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
        """Give everything up: the catalog is lost.

        Returns:
            Answers to all questions whose answer was not given or not yet taken; the tickets of
            which a commit will come; and what has to be done in any later catalog.
        """
        events: list[SecondaryEvent] = []
        while True:
            try:
                event = self.events.popleft()
            except IndexError:  # the reader was faster
                break
            if isinstance(event, Placed):
                self._tickets.forget(event.ticket)
                events.append(Refused(event.ticket, FailureReason.IO_ERROR))
            elif isinstance(event, Committed):
                events.append(Committed(event.ticket, FailureReason.IO_ERROR))
            elif not isinstance(event, Freed):
                events.append(event)
        events += self._placement.refuse_all(FailureReason.IO_ERROR)
        owed: list[Operation] = [
            op for op in self._retained if isinstance(op, ForgetNamespace | BeginEpoch)
        ]
        self._retained.clear()
        return events, self._tickets.unanswered(), owed

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
            ticket = self._tickets.find(operation.ticket)
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
        """Do what cannot wait of a batch: each transaction makes the file larger, and it stays so.

        Uses of records are dropped. Requests wait, and are refused if that takes long: evicting
        would not make the file smaller.
        """
        self._placement.hold(op for op in batch if isinstance(op, RequestPlaces))
        necessary = [op for op in batch if not isinstance(op, RequestPlaces | TouchKeys | Evict)]
        if necessary:
            try:
                self._transact(necessary, is_held_back=True)
            except (BackendError, CatalogError) as error:
                self._log("catalog write failed", error)
                self._give_up(necessary, error)
        self.events.extend(self._placement.refuse_held())

    def _transact(self, batch: Sequence[Operation], *, is_held_back: bool = False) -> bool:
        """Apply a batch, place what waits, evict ahead; return whether more must be evicted."""
        closed: dict[int, FailureReason | None] = {}
        requests: list[RequestPlaces] = []
        events: list[SecondaryEvent] = []
        placed: Round | None = None
        sweep = self._sweep
        with self._catalog.transaction(self._pins) as work:
            for operation in joined_touches(batch):
                if isinstance(operation, RequestPlaces):
                    requests.append(operation)
                else:
                    self._apply(work, operation, closed)
            if not is_held_back:
                events.extend(self._placement.adopt_in_time(work))
                placed = self._placement.place(work, requests, self._tickets.keys_of(closed))
                events.extend(placed.events)
                sweep = self._placement.make_room_ahead(work, placed, sweep)
            has_more = not (is_held_back or work.may_evict())
        self.failure = ""
        answers = self._tickets.close(closed)
        if placed is not None:
            self._tickets.open(placed.opened)
            self._placement.keep(placed)
        self.lost.rely_on(work.relied_on)
        self._sweep = None if sweep is None or sweep.is_over else sweep
        self.events.extend([*answers, *events, *work.events()])
        self._needs_sync = True
        return has_more

    def _apply(
        self, work: CatalogTxn, operation: Operation, closed: dict[int, FailureReason | None]
    ) -> None:
        match operation:
            case CommitTicket(ticket_id, failed):
                ticket = self._tickets.find(ticket_id)
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

    def _forget(self, operation: ForgetNamespace) -> Exception | None:
        """Forget a namespace in one transaction, however many records it has.

        Returns why not.
        """
        namespace = operation.namespace
        self.events.extend(self._placement.refuse_namespace(namespace))
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
            self._sweep = None  # the next opener of the path goes on
            return
        self._sweep = None if sweep.is_over else sweep
        self._needs_sync = True

    def _give_up(self, batch: Sequence[Operation], error: Exception) -> None:
        """Answer requests with a refusal; keep what must not be lost for the next batch.

        What meets damage is dropped: it would meet it again, together with what comes after it.
        """
        self.failure_count += 1
        self.failure = str(error)
        # A full device is not a full map: nothing is evicted for it. Else a file of another program
        # would empty the tier.
        full = isinstance(error, BackendFullError)
        is_damage = isinstance(error, BackendCorruptError | CatalogDamagedError)
        reason = FailureReason.FULL if full else FailureReason.IO_ERROR
        self._retained_at = self._clock.seconds()
        self.events.extend(self._placement.refuse_all(reason))
        for operation in batch:
            match operation:
                case RequestPlaces(ticket_id):
                    self.events.append(Refused(ticket_id, reason))
                case CommitTicket(ticket_id) if is_damage:
                    self.events.extend(self._tickets.close({ticket_id: reason}))
                case CommitTicket(ticket_id):
                    self.events.extend(self._tickets.fail(ticket_id, reason))
                    self._retained.append(CommitTicket(ticket_id, None))
                case ForgetNamespace() | BeginEpoch():
                    self._retained.append(operation)
                case ReleaseDone() | LosePayload() if not is_damage:
                    self._retained.append(operation)
                case _:
                    pass

    def _log(self, event: str, error: Exception) -> None:
        cause = f"{event} {type(error).__name__}"
        if cause not in self._logged:
            self._logged.add(cause)
            _logger.warning("%s: cause=%s", event, error)
