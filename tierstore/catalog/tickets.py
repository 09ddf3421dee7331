"""Tickets of one writer, from the reservation of their places to the commit of their records."""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from tierstore.catalog.pages.cluster_row import ClusterRow
from tierstore.catalog.rows import RowArray
from tierstore.key import OffloadKey
from tierstore.tier_events import Committed
from tierstore.transfer import FailureReason, Place

__all__ = ["Ticket", "TicketCluster", "Tickets"]


@dataclass(slots=True)
class Ticket:
    """Places that were reserved and not yet committed, in the process that reserved them."""

    keys: tuple[OffloadKey, ...]
    extents: RowArray
    """`EXTENT_DTYPE`, in the order of the keys."""
    clusters: tuple["TicketCluster", ...]
    """In the order of the keys."""
    pending_id: int
    log_number: int
    """Of the index when none of the keys had a record."""

    def places(self, header_pages: int) -> tuple[Place, ...]:
        """Return the place of each key."""
        return tuple(
            place
            for part in self.clusters
            for place in part.row.places(part.cluster, range(part.row.record_count), header_pages)
        )


@dataclass(frozen=True, slots=True)
class TicketCluster:
    """One cluster of a ticket; its records are those of the keys from `first` on."""

    cluster: int
    first: int
    row: ClusterRow
    """As it will be, without a group: each transaction has to make a copy of its own."""


class Tickets:
    """The open tickets by id. Each commit is answered exactly once."""

    def __init__(self) -> None:
        self._open: dict[int, Ticket] = {}
        self._writing: set[OffloadKey] = set()
        self._answered: set[int] = set()
        """Tickets whose commit was answered when it failed, and will be tried again."""

    @property
    def writing(self) -> AbstractSet[OffloadKey]:
        """The keys of all open tickets, a live view: copying it would cost each transaction."""
        return self._writing

    def find(self, ticket_id: int) -> Ticket | None:
        """Return an open ticket; None: it was closed, or never opened."""
        return self._open.get(ticket_id)

    def keys_of(self, ticket_ids: Iterable[int]) -> set[OffloadKey]:
        """Return the keys of open tickets."""
        return {key for ticket_id in ticket_ids for key in self._open[ticket_id].keys}

    def open(self, tickets: Mapping[int, Ticket]) -> None:
        """Add tickets whose reservation was committed."""
        self._open.update(tickets)
        for ticket in tickets.values():
            self._writing.update(ticket.keys)

    def close(self, reasons: Mapping[int, FailureReason | None]) -> list[Committed]:
        """Remove tickets; return the answers that were not given before, by `fail`.

        A reason says why no record of a ticket can be located; None: they can.
        """
        for ticket_id in reasons:
            self.forget(ticket_id)
        answers = [
            Committed(ticket_id, reason)
            for ticket_id, reason in reasons.items()
            if ticket_id not in self._answered
        ]
        self._answered.difference_update(reasons)
        return answers

    def fail(self, ticket_id: int, reason: FailureReason) -> list[Committed]:
        """Answer a commit that failed and will be tried again; return the answer, once."""
        if ticket_id in self._answered:
            return []
        self._answered.add(ticket_id)
        return [Committed(ticket_id, reason)]

    def forget(self, ticket_id: int) -> None:
        """Remove a ticket without an answer; an unknown one is skipped."""
        ticket = self._open.pop(ticket_id, None)
        if ticket is not None:
            self._writing.difference_update(ticket.keys)

    def unanswered(self) -> set[int]:
        """Return the open tickets whose commit was not answered."""
        return set(self._open) - self._answered
