"""The demotes of one tier that are under way, by how far they have come."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from tierstore.key import OffloadKey

if TYPE_CHECKING:
    from tierstore.transfer import JobId

__all__ = ["Demotes", "WaitingDemote", "WritingDemote"]


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
