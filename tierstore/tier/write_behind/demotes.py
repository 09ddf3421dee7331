"""The demotes of one tier that are under way, by how far they have come."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from tierstore.key import OffloadKey

if TYPE_CHECKING:
    from tierstore.transfer import JobId

__all__ = ["Demotes", "WaitingDemote", "WritingDemote"]

_TICKET_BYTES = 8 << 20
_TICKET_KEYS_MAX = 512
"""Longer requests are placed, written and recorded in parts, so that the first write need not wait
for the catalog to place the last, and what one transaction of it changes is bounded."""


@dataclass(frozen=True, slots=True)
class WaitingDemote:
    """Keys of one group that wait for their places."""

    group_idx: int
    keys: tuple[OffloadKey, ...]


@dataclass(frozen=True, slots=True)
class WritingDemote:
    """A demote on its way, by its catalog ticket."""

    ticket: int
    group_idx: int
    keys: tuple[OffloadKey, ...]
    written: tuple[OffloadKey, ...] = ()
    """Those that the device took, once it has answered."""


class Demotes:
    """What is asked of the catalog and of the device, and not answered."""

    def __init__(self) -> None:
        self.newest_ticket = 0
        """The last one that was asked for; they are numbered."""
        self.waiting: dict[int, WaitingDemote] = {}
        """For places, by ticket."""
        self.writing: dict[JobId, WritingDemote] = {}
        """For the device."""
        self.committing: dict[int, WritingDemote] = {}
        """To be published, by ticket."""
        self.cancelled_tickets: set[int] = set()
        self.cancelled_jobs: dict[JobId, WritingDemote] = {}

    def __bool__(self) -> bool:
        return bool(
            self.waiting
            or self.writing
            or self.committing
            or self.cancelled_tickets
            or self.cancelled_jobs
        )

    @property
    def is_writing(self) -> bool:
        """Whether the device was told to write, and has not answered."""
        return bool(self.writing or self.cancelled_jobs)

    @property
    def is_waiting(self) -> bool:
        """Whether the catalog was asked for something, and has not answered."""
        return bool(self.waiting or self.committing)

    def begin(
        self, group_idx: int, keys: Sequence[OffloadKey], chunk_bytes: int
    ) -> Iterator[tuple[int, tuple[OffloadKey, ...]]]:
        """Give tickets to keys, head first; yield each with its part, tail first.

        What is recorded first is evicted first.
        """
        per_ticket = max(1, min(_TICKET_BYTES // chunk_bytes, _TICKET_KEYS_MAX))
        for stop in range(len(keys), 0, -per_ticket):
            part = tuple(keys[max(0, stop - per_ticket) : stop])
            self.newest_ticket += 1
            self.waiting[self.newest_ticket] = WaitingDemote(group_idx, part)
            yield self.newest_ticket, part

    def oldest_ticket(self) -> float:
        """Return the first of their tickets; without any, infinity. O(tickets)."""
        writing = (demote.ticket for demote in self.writing.values())
        return min((*self.waiting, *writing, *self.committing), default=math.inf)

    def held(self) -> Iterable[WaitingDemote | WritingDemote]:
        """Return those that pin their chunks."""
        return chain(self.waiting.values(), self.writing.values(), self.committing.values())

    def held_keys(self) -> set[OffloadKey]:
        """Return the chunks that are pinned."""
        return {key for demote in self.held() for key in demote.keys}

    def cancel(self) -> list[WaitingDemote | WritingDemote]:
        """Give all of them up; return those that have pinned their chunks until now."""
        held = list(self.held())
        self.cancelled_tickets.update(self.waiting)
        self.cancelled_jobs.update(self.writing)
        self.waiting.clear()
        self.writing.clear()
        self.committing.clear()
        return held
