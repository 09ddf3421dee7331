"""Hands the operations in a tier's mailbox to its catalog, or answers them while it has none.

In the mailbox's thread. Without a catalog every request is refused and every commit fails. Resets
are kept for the catalog that is opened next, which does them before anything is found in it.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from tierstore.bounded_log import bounded
from tierstore.catalog.messages import (
    BeginEpoch,
    CommitTicket,
    Evict,
    ForgetNamespace,
    Leave,
    Operation,
    RequestPlaces,
)
from tierstore.errors import BackendError, CatalogError, ClosedError
from tierstore.tier.disk.catalog_keeper import (
    CatalogLost,
    CatalogNews,
    CatalogOpened,
    OpenCatalog,
    SegmentsFound,
)
from tierstore.tier.disk.catalog_reads import CatalogReads
from tierstore.tier_events import Committed, Refused, SecondaryEvent
from tierstore.transfer import FailureReason

if TYPE_CHECKING:
    import threading

__all__ = ["CatalogDispatcher", "CatalogEnd", "DispatcherItem"]

_logger = bounded(logging.getLogger(__name__))


@dataclass(frozen=True, slots=True)
class CatalogEnd:
    """The tier closes, and nothing reads the catalog any more: leave, flush and close it."""


DispatcherItem: TypeAlias = Operation | CatalogNews | CatalogEnd


class CatalogDispatcher:
    """One thread calls `handle`; what is public may be read in any."""

    def __init__(self, name: str, reads: CatalogReads, look: Callable[[], None]) -> None:
        """`look` is called when a catalog fails: it may be lost."""
        self._name = name
        self._reads = reads
        self._look = look
        self.opened: OpenCatalog | None = None
        """The catalog in use; None: there is none now."""
        self.answers: deque[SecondaryEvent] = deque()
        """Of lost catalogs, and while there was none; `poll` pops from the left."""
        self.forgotten_count = 0
        """How many `ForgetNamespace` were done."""
        self._forgotten_before = 0
        self._owed: list[Operation] = []
        self._epoch: BeginEpoch | None = None
        self._lost_tickets: set[int] = set()
        self._is_over = False
        self._given_up: threading.Event | None = None

    def handle(self, items: Sequence[DispatcherItem]) -> None:
        """Handle what has gathered in the mailbox, in order."""
        operations: list[Operation] = []
        for item in items:
            if isinstance(item, CatalogOpened | CatalogLost | SegmentsFound | CatalogEnd):
                self._apply(operations)
                operations = []
                self._take(item)
            else:
                if isinstance(item, BeginEpoch):
                    self._epoch = item
                operations.append(item)
        self._apply(operations)

    def _take(self, news: CatalogNews | CatalogEnd) -> None:
        match news:
            case CatalogOpened(opened):
                self._begin(opened)
            case CatalogLost(opened, is_given_up):
                self._lose(opened)
                self._given_up = is_given_up
                self._give_up()
            case SegmentsFound(opened, segments):
                if opened is self.opened:
                    opened.writer.release_unreferenced(segments)
                    opened.writer.handle([Evict()])
            case CatalogEnd():
                self._end()

    def _begin(self, opened: OpenCatalog) -> None:
        if self._is_over:
            opened.catalog.close()
            return
        owed, self._owed = self._owed, []
        self._forgotten_before = self.forgotten_count
        opened.writer.handle(owed)
        self._count_forgotten(opened)
        self.opened = opened

    def _lose(self, opened: OpenCatalog) -> None:
        if opened is not self.opened:
            return
        opened.catalog.abandon()
        events, tickets, owed = opened.writer.abandon()
        if self._epoch is not None and self._epoch not in owed:
            owed.append(self._epoch)
        self._owed = owed
        self._lost_tickets |= tickets
        self.answers.extend(events)
        self.opened = None
        try:
            # In the thread that reads it: no read is under way when this has its turn.
            self._reads.ask(opened.catalog.close)
        except ClosedError:
            opened.catalog.close()

    def _end(self) -> None:
        self._is_over = True
        opened, self.opened = self.opened, None
        if opened is None:
            if self._owed:
                _logger.error(
                    "closed before its catalog has recorded a reset: forgotten records will be "
                    "found again unless the path is removed: tier=%s",
                    self._name,
                )
            return
        opened.writer.handle([Leave()])
        try:
            opened.catalog.sync()
        except (BackendError, CatalogError) as error:
            _logger.warning("catalog sync failed: tier=%s cause=%s", self._name, error)
        opened.catalog.close()

    def _apply(self, operations: Sequence[Operation]) -> None:
        if not operations:
            return
        opened = self.opened
        if opened is None:
            for operation in operations:
                self._refuse(operation)
            self._give_up()
            return
        if self._lost_tickets:
            operations = [op for op in operations if not self._is_lost(op)]
        failure_count = opened.writer.failure_count
        opened.writer.handle(operations)
        self._count_forgotten(opened)
        if opened.writer.failure_count != failure_count:
            self._look()

    def _count_forgotten(self, opened: OpenCatalog) -> None:
        self.forgotten_count = self._forgotten_before + opened.writer.forgotten_count

    def _is_lost(self, operation: Operation) -> bool:
        """Answer the commit of a ticket of a lost catalog."""
        if not isinstance(operation, CommitTicket) or operation.ticket not in self._lost_tickets:
            return False
        self._refuse(operation)
        return True

    def _refuse(self, operation: Operation) -> None:
        match operation:
            case RequestPlaces(ticket):
                self.answers.append(Refused(ticket, FailureReason.IO_ERROR))
            case CommitTicket(ticket):
                self._lost_tickets.discard(ticket)
                self.answers.append(Committed(ticket, FailureReason.IO_ERROR))
            case ForgetNamespace() | BeginEpoch():
                self._owed.append(operation)
            case _:
                pass

    def _give_up(self) -> None:
        """Tell the keeper when all that is being written for a lost catalog has ended."""
        if self._given_up is not None and not self._lost_tickets:
            self._given_up.set()
