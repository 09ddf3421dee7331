"""Placement: which requests for places wait, and how room is made for them.

Requests are placed in order, so that a large one is not overtaken for ever. Room comes from
evictions, and is there when every rank has given back the evicted pages: until then a request
waits. What owners leave that died, or only sleep, is taken over if a request has to wait for it.
"""

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from tierstore.bounded_log import bounded
from tierstore.catalog.catalog import Catalog
from tierstore.catalog.garbage import Sweep
from tierstore.catalog.lost_payload import LostPayload
from tierstore.catalog.messages import RequestPlaces
from tierstore.catalog.tickets import Ticket
from tierstore.catalog.transaction import CatalogTxn
from tierstore.clock import Clock
from tierstore.key import NAMESPACE_BYTES, Namespace, OffloadKey
from tierstore.tier_events import Freed, Placed, Refused, SecondaryEvent
from tierstore.transfer import FailureReason

__all__ = ["Placement", "Round"]

_logger = bounded(logging.getLogger(__name__))

_WAITING_MAX = 1024
_TAKE_OVER_SECONDS = 1.0
"""A request that waits longer takes over the releases of other processes, which may be idle."""
_ADOPT_SECONDS = 5.0
"""Between two checks whether owners that share the path, and its capacity, have died."""
_HOLD_SECONDS = 2.0
"""Requests wait so long for a stopped reader. After that they are refused until it goes on."""
_OVER_EVICT_MIN = 8


@dataclass(slots=True)
class Round:
    """What one transaction does for requests; nothing of it holds before that is committed."""

    waiting: deque[RequestPlaces]
    """Requests that still wait afterwards."""
    done: AbstractSet[OffloadKey]
    """Keys that are no longer being written once it is committed."""
    opened: dict[int, Ticket] = field(default_factory=dict)
    events: list[SecondaryEvent] = field(default_factory=list)
    fresh: set[OffloadKey] = field(default_factory=set)
    """Keys that were given places in this round."""
    has_adopted: bool = False


class Placement:
    """The requests of one writer that wait, in order."""

    def __init__(
        self,
        catalog: Catalog,
        pins: Mapping[OffloadKey, int],
        clock: Clock,
        *,
        writing: AbstractSet[OffloadKey],
        lost: LostPayload,
    ) -> None:
        """`pins` and `writing` are live views: keys that must stay, keys that have tickets."""
        self._catalog = catalog
        self._pins = pins
        self._clock = clock
        self._writing = writing
        self._lost = lost
        self.waiting: deque[RequestPlaces] = deque()
        """Requests that wait for bytes to be given back."""
        self._first_ticket: int | None = None
        self._first_since = 0.0
        self._held_since: float | None = None
        self._has_warned = False
        self._adopted_at = clock.seconds()

    def place(
        self, work: CatalogTxn, requests: Iterable[RequestPlaces], done: AbstractSet[OffloadKey]
    ) -> Round:
        """Place what waits and then `requests`, until one has to wait.

        `done` are keys of tickets that the same transaction closes.
        """
        run = Round(deque(self.waiting), done)
        run.waiting.extend(requests)
        while run.waiting and self._place_first(work, run):
            pass
        return run

    def make_room_ahead(self, work: CatalogTxn, run: Round, sweep: Sweep | None) -> Sweep | None:
        """Make room for what comes after a round; return how far the sweep has come.

        While the rows take more than a catalog may have, more of them go than come: unused
        manifests first, then garbage, then records. Not all at once: a page of rows is free only
        when all rows on it have gone.
        """
        if work.space.budget.is_catalog_over and not work.namespaces.forget_unused():
            if sweep is not None:
                sweep = work.sweep(sweep)
            else:
                coming_count = sum(len(ticket.keys) for ticket in run.opened.values())
                work.evict(0, max(_OVER_EVICT_MIN, 2 * coming_count))
        self._make_room(work, work.space.ahead_pages())
        return sweep

    def keep(self, run: Round) -> None:
        """Wait with what waits after a round whose transaction was committed."""
        self.waiting = run.waiting

    def hold(self, requests: Iterable[RequestPlaces]) -> None:
        """Let requests wait, unplaced, for a reader that has stopped."""
        if self._held_since is None:
            self._held_since = self._clock.seconds()
            if not self._has_warned:
                self._has_warned = True
                _logger.warning(
                    "a process that reads the catalog has stopped: nothing more is stored until "
                    "it goes on, or ends"
                )
        self.waiting.extend(requests)

    def refuse_held(self) -> list[Refused]:
        """Refuse all that waits if it was held for long, or if it is too much."""
        assert self._held_since is not None, "nothing is held"
        waited_seconds = self._clock.seconds() - self._held_since
        if waited_seconds < _HOLD_SECONDS and len(self.waiting) <= _WAITING_MAX:
            return []
        return self.refuse_all(FailureReason.FULL)

    def end_hold(self) -> None:
        """Place requests again: no reader has stopped."""
        self._held_since = None

    def refuse_all(self, reason: FailureReason) -> list[Refused]:
        """Refuse all that waits."""
        refused = [Refused(request.ticket, reason) for request in self.waiting]
        self.waiting.clear()
        return refused

    def refuse_namespace(self, namespace: Namespace) -> list[Refused]:
        """Refuse what waits for places of a namespace that is forgotten."""
        refused = [r for r in self.waiting if r.keys and r.keys[0].startswith(namespace)]
        self.waiting = deque(request for request in self.waiting if request not in refused)
        return [Refused(request.ticket, FailureReason.CLOSED) for request in refused]

    def adopt_in_time(self, work: CatalogTxn) -> list[SecondaryEvent]:
        """Adopt, now and then, what dead owners left: their promised capacity holds no longer."""
        now = self._clock.seconds()
        is_alone = work.space.budget.owner_count <= 1
        if is_alone or now - self._adopted_at < _ADOPT_SECONDS:
            return []
        self._adopted_at = now
        releases = work.adopt_dead(self._catalog.is_owner_dead)
        return [Freed.of(*release) for release in releases]

    def _place_first(self, work: CatalogTxn, run: Round) -> bool:
        """Place or refuse the first request of a round, or free pages for it; False: it waits."""
        request, keys = self._without_known(work, run)
        stride_pages = self._catalog.geometry.stride_pages(request.payload_bytes)
        namespace = request.keys[0][:NAMESPACE_BYTES] if request.keys else b""
        pages = work.space.charge_of(namespace, len(keys), stride_pages)
        if pages > work.space.budget.space_pages:
            run.waiting.popleft()
            run.events.append(Refused(request.ticket, FailureReason.FULL))
            return True
        self._make_room(work, pages)
        if work.space.free_pages() < pages:
            return self._wait_or_refuse(work, run, request)
        run.waiting.popleft()
        if not keys:
            run.events.append(Placed(request.ticket, (), ()))
            return True
        ticket = run.opened[request.ticket] = work.reserve(keys, request.payload_bytes)
        run.fresh.update(keys)
        places = ticket.places(self._catalog.geometry.header_pages)
        run.events.append(Placed(request.ticket, ticket.keys, places))
        return True

    def _without_known(
        self, work: CatalogTxn, run: Round
    ) -> tuple[RequestPlaces, Sequence[OffloadKey]]:
        """Return the first request, and those of its keys that need a place."""
        request = run.waiting[0]
        if not request.is_noted:
            self._lost.remove_records(work, request.keys)
        recorded = work.recorded(request.keys)
        if recorded and not request.is_noted:
            # Storing a chunk once more is a use of it, head last: before anything is evicted.
            work.touch(recorded[::-1])
            run.waiting[0] = replace(request, is_noted=True)
        known = run.fresh.union(recorded)
        keys = [
            key
            for key in dict.fromkeys(request.keys)
            if key not in known and (key in run.done or key not in self._writing)
        ]
        return request, keys

    def _wait_or_refuse(self, work: CatalogTxn, run: Round, request: RequestPlaces) -> bool:
        """Return False if a request waits; else it was refused, or may find more room now."""
        is_overdue = self._is_overdue(request.ticket)
        if not run.has_adopted and (is_overdue or work.space.state.pending_pages == 0):
            run.has_adopted = True
            releases = work.adopt_dead(self._catalog.is_owner_dead, with_idle_releases=is_overdue)
            run.events.extend(Freed.of(*release) for release in releases)
            return True
        writing_count = len(self._writing) - len(run.done) + len(run.fresh)
        if self._can_wait(work, writing_count) and len(run.waiting) <= _WAITING_MAX:
            return False
        run.waiting.popleft()
        run.events.append(Refused(request.ticket, FailureReason.FULL))
        return True

    def _is_overdue(self, ticket: int) -> bool:
        """Return, once per `_TAKE_OVER_SECONDS`, whether the first request has waited so long."""
        now = self._clock.seconds()
        if self._first_ticket != ticket:
            self._first_ticket, self._first_since = ticket, now
        if now - self._first_since < _TAKE_OVER_SECONDS:
            return False
        self._first_since = now
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
        """Evict until `pages` of all ranks are free, or will be when the releases are done."""
        rank_count = self._catalog.geometry.rank_count
        while True:
            short = pages - work.space.free_pages() - work.space.state.pending_pages
            if short <= 0 or not work.evict(-(-short // rank_count)):
                return
