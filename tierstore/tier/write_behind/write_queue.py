"""The demotes of one tier that are under way: their tickets, their pins and their bytes.

add             pinned and charged; places are asked of the catalog, by ticket
begin_write     placed: the data plane writes, by job
begin_commit    written: the catalog is to publish the records
end, refuse     published or refused: unpinned, no longer charged
cancel          (reset) unpinned at once; what is written is never published
"""

import math
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import chain

import numpy as np

from tierstore.key import OffloadKey
from tierstore.layout import GroupSpec
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.tier.memory.primary import PrimaryTier
from tierstore.tier.secondary import SecondaryTier
from tierstore.tier_events import Placed
from tierstore.transfer import Demote, IntArray, JobId, TransferDone, place_array

__all__ = ["WaitingDemote", "WriteQueue", "WritingDemote"]

# One ticket per request lost: nothing would be written before the catalog has placed all of it, and
# one transaction at the end would record all of it. Head first lost: the parts that are recorded
# first are evicted first.
_TICKET_BYTES = 8 << 20
_TICKET_KEYS_MAX = 512
"""Longer requests are placed, written and recorded in parts of this size, the tail first."""


@dataclass(frozen=True, slots=True)
class WaitingDemote:
    """Keys of one group that wait for their places."""

    group_idx: int
    keys: tuple[OffloadKey, ...]
    slots: IntArray
    """Of each key, in order; a pin holds a chunk in its slot."""

    def slots_of(self, placed: tuple[OffloadKey, ...]) -> IntArray:
        """Return the slots of some of the keys, in their order."""
        if placed == self.keys:
            return self.slots
        slots = dict(zip(self.keys, self.slots.tolist(), strict=True))
        return np.array([slots[key] for key in placed], np.int64)


@dataclass(frozen=True, slots=True)
class WritingDemote:
    """A demote on its way, by its catalog ticket."""

    ticket: int
    group_idx: int
    keys: tuple[OffloadKey, ...]
    written: tuple[OffloadKey, ...] = ()
    """Those that the device took, once it has answered."""


class WriteQueue:
    """What is asked of the catalog and of the device, and not answered. One thread.

    Pins keep the bytes of its chunks in their slots; its limit bounds pins and memory.
    """

    def __init__(
        self,
        *,
        tier_idx: int,
        groups: Sequence[GroupSpec],
        primary: PrimaryTier,
        secondary: SecondaryTier,
        bytes_max: int,
    ) -> None:
        """Share the tiers; `bytes_max` bounds what this tier pins in the primary tier."""
        self._tier_idx = tier_idx
        self._groups = groups
        self._primary = primary
        self._secondary = secondary
        self._bytes_max = bytes_max
        self._queued_bytes = 0
        self._in_flight: set[OffloadKey] = set()
        self.newest_ticket = 0
        """The last one that was asked for; they are numbered."""
        self._waiting: dict[int, WaitingDemote] = {}
        """For places, by ticket."""
        self._writing: dict[JobId, WritingDemote] = {}
        """For the device."""
        self._committing: dict[int, WritingDemote] = {}
        """To be published, by ticket."""
        self._cancelled_tickets: set[int] = set()
        self._cancelled_jobs: dict[JobId, WritingDemote] = {}

    def __bool__(self) -> bool:
        return bool(
            self._waiting
            or self._writing
            or self._committing
            or self._cancelled_tickets
            or self._cancelled_jobs
        )

    @property
    def is_writing(self) -> bool:
        """Whether the device was told to write, and has not answered."""
        return bool(self._writing or self._cancelled_jobs)

    @property
    def is_waiting(self) -> bool:
        """Whether the catalog was asked for something, and has not answered."""
        return bool(self._waiting or self._committing)

    @property
    def in_flight(self) -> AbstractSet[OffloadKey]:
        """The chunks that are on their way (a live view)."""
        return self._in_flight

    @property
    def writing_jobs(self) -> Sequence[JobId]:
        """The jobs that the device has not answered, but for cancelled ones."""
        return tuple(self._writing)

    @property
    def queued_bytes(self) -> int:
        """The bytes of the chunks that are pinned for this tier."""
        return self._queued_bytes

    @property
    def room_bytes(self) -> int:
        """How much more may be added."""
        return self._bytes_max - self._queued_bytes

    def add(
        self, group_idx: int, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE
    ) -> None:
        """Pin resident chunks of one group, head first, and ask the catalog for their places.

        The tail is asked for first: what is recorded first is evicted first.
        """
        chunk_bytes = self._groups[group_idx].chunk_bytes
        slots = np.array(self._primary.pin(keys), np.int64)
        self._queued_bytes += len(keys) * chunk_bytes
        self._in_flight.update(keys)
        per_ticket = max(1, min(_TICKET_BYTES // chunk_bytes, _TICKET_KEYS_MAX))
        for stop in range(len(keys), 0, -per_ticket):
            start = max(0, stop - per_ticket)
            part = tuple(keys[start:stop])
            self.newest_ticket += 1
            waiting = WaitingDemote(group_idx, part, slots[start:stop])
            self._waiting[self.newest_ticket] = waiting
            self._secondary.request_places(self.newest_ticket, part, chunk_bytes, use)

    def end_cancelled_ticket(self, ticket: int) -> bool:
        """Return whether the catalog has answered a ticket that was cancelled, once."""
        if ticket not in self._cancelled_tickets:
            return False
        self._cancelled_tickets.remove(ticket)
        return True

    def end_cancelled_write(self, done: TransferDone) -> bool:
        """Give the places of a cancelled demote back; False: the job is not one of them."""
        cancelled = self._cancelled_jobs.pop(done.job_id, None)
        if cancelled is None:
            return False
        self._secondary.commit(cancelled.ticket, range(len(cancelled.keys)))
        return True

    def refuse(self, ticket: int) -> tuple[OffloadKey, ...]:
        """Unpin the chunks of a ticket that got no places; return them."""
        waiting = self._waiting.pop(ticket)
        self._release(waiting.group_idx, waiting.keys)
        return waiting.keys

    def drop_recorded(self, placed: Placed) -> tuple[OffloadKey, ...]:
        """Unpin the chunks of a ticket that got no places because they are recorded; return them.

        The ticket is over if it has no others.
        """
        waiting = self._waiting[placed.ticket]
        recorded: tuple[OffloadKey, ...] = ()
        if len(placed.keys) < len(waiting.keys):
            chosen = set(placed.keys)
            recorded = tuple(key for key in waiting.keys if key not in chosen)
            self._release(waiting.group_idx, recorded)
        if not placed.keys:
            del self._waiting[placed.ticket]
        return recorded

    def begin_write(self, placed: Placed, job_id: JobId) -> Demote:
        """Return the command that writes chunks to their places."""
        waiting = self._waiting.pop(placed.ticket)
        self._writing[job_id] = WritingDemote(placed.ticket, waiting.group_idx, placed.keys)
        return Demote(
            job_id=job_id,
            tier_idx=self._tier_idx,
            group_idx=waiting.group_idx,
            keys=placed.keys,
            places=place_array(placed.places),
            slots=waiting.slots_of(placed.keys),
            owner=self._secondary.owner,
        )

    def begin_commit(self, done: TransferDone) -> WritingDemote | None:
        """Publish the records that the device took; None: the job is not of this queue.

        The chunks stay pinned until the records can be located, so that no moment finds one of
        them nowhere.
        """
        writing = self._writing.pop(done.job_id, None)
        if writing is None:
            return None
        written = writing.keys
        if done.failed:
            written = tuple(key for i, key in enumerate(written) if i not in done.failed)
        writing = WritingDemote(writing.ticket, writing.group_idx, writing.keys, written)
        self._committing[writing.ticket] = writing
        self._secondary.commit(writing.ticket, tuple(done.failed))
        return writing

    def committing(self, ticket: int) -> WritingDemote | None:
        """Return what the catalog has answered about; None: it was cancelled."""
        return self._committing.get(ticket)

    def end(self, writing: WritingDemote) -> None:
        """Unpin the chunks of a demote that the catalog has published or refused."""
        del self._committing[writing.ticket]
        self._release(writing.group_idx, writing.keys)

    def cancel(self) -> None:
        """Give all demotes up and unpin their chunks (reset).

        A demote that is being written goes on reading its slots, which may be given to others
        meanwhile; that is safe, because its records are never published. Waiting for it would stop
        the engine on a slow disk.
        """
        for demote in list(self._held()):
            self._release(demote.group_idx, demote.keys)
        self._cancelled_tickets.update(self._waiting)
        self._cancelled_jobs.update(self._writing)
        self._waiting.clear()
        self._writing.clear()
        self._committing.clear()

    def oldest_ticket(self) -> float:
        """Return the first ticket on its way; without any, infinity. O(tickets)."""
        writing = (demote.ticket for demote in self._writing.values())
        return min((*self._waiting, *writing, *self._committing), default=math.inf)

    def held_count(self) -> int:
        """Return how many chunks are pinned, each as often as it is. O(tickets)."""
        return sum(len(demote.keys) for demote in self._held())

    def held_keys(self) -> set[OffloadKey]:
        """Return the chunks that are pinned. O(chunks)."""
        return {key for demote in self._held() for key in demote.keys}

    def _held(self) -> Iterable[WaitingDemote | WritingDemote]:
        return chain(self._waiting.values(), self._writing.values(), self._committing.values())

    def _release(self, group_idx: int, keys: Sequence[OffloadKey]) -> None:
        self._primary.unpin(keys)
        self._in_flight.difference_update(keys)
        self._queued_bytes -= len(keys) * self._groups[group_idx].chunk_bytes
