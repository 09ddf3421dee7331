"""What becomes of the operations in a tier's mailbox: with its catalog, or while it has none.

In the mailbox's thread. Without a catalog every request is refused and every commit fails; what a
reset demands is owed to the catalog that comes, before anybody finds anything in it.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from tierstore.bounded_log import bounded
from tierstore.catalog.messages import (
    BeginEpoch,
    Committed,
    CommitTicket,
    Evict,
    ForgetNamespace,
    Leave,
    Operation,
    Refused,
    RequestPlaces,
    SecondaryEvent,
)
from tierstore.errors import BackendError, CatalogError, ClosedError
from tierstore.tier.disk.keeper import (
    CatalogFound,
    CatalogLost,
    CatalogNews,
    CatalogOpened,
    OpenCatalog,
)
from tierstore.tier.disk.reads import CatalogReads
from tierstore.transfer import FailureReason

if TYPE_CHECKING:
    import threading

__all__ = ["CatalogDesk", "CatalogEnd", "DeskItem"]

_logger = bounded(logging.getLogger(__name__))


@dataclass(frozen=True, slots=True)
class CatalogEnd:
    """Over: leave the catalog, flush and close it. Nothing of it is being read any more."""


DeskItem: TypeAlias = Operation | CatalogNews | CatalogEnd


class CatalogDesk:
    """One thread calls `handle`; what is public may be read in any."""

    def __init__(self, name: str, reads: CatalogReads, look: Callable[[], None]) -> None:
        """`look` is called when a catalog fails: it may be lost."""
        self._name = name
        self._reads = reads
        self._look = look
        self.opened: OpenCatalog | None = None
        """The catalog in use; None: there is none now."""
        self.answers: deque[SecondaryEvent] = deque()
        """Those of catalogs that were lost, and of none; the reader pops from the left."""
        self.forgotten_count = 0
        """How many `ForgetNamespace` were done."""
        self._forgotten_before = 0
        self._owed: list[Operation] = []
        self._epoch: BeginEpoch | None = None
        self._lost_tickets: set[int] = set()
        self._is_over = False
        self._given_up: threading.Event | None = None

    def handle(self, items: Sequence[DeskItem]) -> None:
        """Handle what has gathered in the mailbox, in order."""
        operations: list[Operation] = []
        for item in items:
            if isinstance(item, CatalogOpened | CatalogLost | CatalogFound | CatalogEnd):
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
            case CatalogFound(opened, segments):
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
            # Nobody reads it when this has its turn.
            self._reads.ask(opened.catalog.close)
        except ClosedError:
            opened.catalog.close()

    def _end(self) -> None:
        self._is_over = True
        opened, self.opened = self.opened, None
        if opened is None:
            if self._owed:
                _logger.error(
                    "closed without its catalog, which has not recorded a reset: what it forgot "
                    "will be found again, unless the path is removed: tier=%s",
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
        """Say so when all that is being written for a lost catalog has ended."""
        if self._given_up is not None and not self._lost_tickets:
            self._given_up.set()
