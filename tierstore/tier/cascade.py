"""When chunks go down into one secondary tier, and what came of it.

    on_resident / on_touched / record_victims      the rule says: demote these keys
        -> pin, request_places                     the catalog's writer makes room
    Placed -> Demote command -> TransferDone       the data plane writes
        -> commit -> Committed                     the record is visible: unpin

Pins keep the slots' bytes in place meanwhile; the write queue's limit bounds pins and memory.
"""

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from tierstore.config import SecondaryConfig
from tierstore.key import OffloadKey, get_offload_group_idx
from tierstore.layout import GroupSpec
from tierstore.metrics import Counters, Metric
from tierstore.tier.catalog_messages import Committed, Freed, Placed, Refused
from tierstore.tier.failed_demotes import FailedDemotes
from tierstore.tier.primary import PrimaryTier
from tierstore.tier.residency import ResidencyLog
from tierstore.tier.secondary import SecondaryTier
from tierstore.transfer import Command, Demote, FailureReason, JobId, Release, TransferDone

__all__ = ["Cascade"]

_RETRY_CALLS_MAX = 1 << 8
"""A release that keeps failing is tried again after at most so many calls of `commands`."""

_TICKET_BYTES = 8 << 20
_TICKET_KEYS_MAX = 512
"""Longer requests are placed, written and recorded in parts, so that the first write need not wait
for the catalog to place the last, and what one transaction of it changes is bounded."""

_ONCE_SEEN_MAX = 1 << 16
"""Chunks that left the primary tier after one use and are remembered for `second_touch`."""


_CROWDED_ROUNDS_MAX = 8
"""A tier without room in one piece evicts this often for what it could not write, each time twice
as much; then the chunks wait for the next flush."""

_CROWDED_CALLS_MAX = 256
"""Calls of `commands` after which what was evicted for them is waited for no longer."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Keys of one group that wait for their places."""

    group_idx: int
    keys: tuple[OffloadKey, ...]


@dataclass(frozen=True, slots=True)
class _Writing:
    """A demote on its way, by its catalog ticket."""

    ticket: int
    group_idx: int
    keys: tuple[OffloadKey, ...]


class Cascade:
    """The rule and the write-behind queue of one secondary tier."""

    def __init__(
        self,
        *,
        tier_idx: int,
        config: SecondaryConfig,
        groups: Sequence[GroupSpec],
        primary: PrimaryTier,
        secondary: SecondaryTier,
        counters: Counters,
        queue_bytes_max: int,
        residency: ResidencyLog | None = None,
    ) -> None:
        """Share the tiers with the stack.

        `queue_bytes_max` bounds what this tier pins in the primary tier for its write-behind.
        """
        self._residency = residency
        self._tier_idx = tier_idx
        self._config = config
        self._groups = groups
        self._primary = primary
        self._secondary = secondary
        self._counters = counters
        self._queue_bytes_max = queue_bytes_max
        self._newest_ticket = 0
        self._waiting: dict[int, _Waiting] = {}
        self._writing: dict[JobId, _Writing] = {}
        self._committing: dict[int, _Writing] = {}
        self._releasing: dict[JobId, Freed] = {}
        self._unreleased: list[Freed] = []
        self._release_failures = 0
        self._calls_until_retry = 0
        self._queued_bytes = 0
        self._cancelled_tickets: set[int] = set()
        self._cancelled_jobs: dict[JobId, _Writing] = {}
        # Resident chunks that need no demote: recorded, refused, or being written. Not kept for
        # write_through, whose chunks are asked for once, when they become resident.
        self._settled: set[OffloadKey] = set()
        self._in_flight: set[OffloadKey] = set()
        self._once_seen: OrderedDict[OffloadKey, None] = OrderedDict()
        self._failures = FailedDemotes()
        self._crowded_rounds = 0
        self._crowded_calls = 0
        """0: nothing waits for room in one piece."""

    @property
    def name(self) -> str:
        """The tier's name."""
        return self._config.name

    @property
    def records_victims(self) -> bool:
        """Whether chunks go down when they are about to leave the primary tier."""
        return self._config.cascade == "on_evict"

    @property
    def is_awaited(self) -> bool:
        """Whether calls wait for this tier while it moves."""
        return True

    @property
    def is_retrying(self) -> bool:
        """Whether chunks whose demote failed wait to be asked for again."""
        return self._failures.is_retrying

    @property
    def newest_ticket(self) -> int:
        """The ticket that was asked for last; they are numbered."""
        return self._newest_ticket

    @property
    def in_flight(self) -> AbstractSet[OffloadKey]:
        """The chunks that are being written, but not those of `write_through` (a live view)."""
        return self._in_flight

    def on_resident(self, group_idx: int, keys: Sequence[OffloadKey]) -> None:
        """Take note of chunks of one prefix, head first, that became resident."""
        if self._config.cascade == "write_through":
            self._request(group_idx, keys)
        elif self._config.cascade == "second_touch":
            again = [key for key in keys if key in self._once_seen]
            for key in again:
                del self._once_seen[key]
            self._request(group_idx, again)

    def on_promoted(self, keys: Sequence[OffloadKey]) -> None:
        """Take note of chunks that came from this very tier."""
        if self._config.cascade != "write_through":
            self._settled.update(keys)

    def on_touched(self, keys: Sequence[OffloadKey]) -> None:
        """Take note of a further use of resident chunks, head first."""
        if self._config.cascade == "second_touch":
            self._request_unsettled(keys)

    def on_evicted(self, keys: Sequence[OffloadKey]) -> None:
        """Take note of chunks that left the primary tier."""
        self._failures.drop(keys)
        if self._config.cascade == "write_through":
            return
        unsettled = [key for key in keys if key not in self._settled]
        self._settled.difference_update(keys)
        if self._config.cascade == "second_touch":
            self._once_seen.update(dict.fromkeys(unsettled))
            while len(self._once_seen) > _ONCE_SEEN_MAX:
                self._once_seen.popitem(last=False)
        else:
            self._drop(len(unsettled), "evicted_before_written")

    def on_buried(self, keys: Collection[OffloadKey]) -> None:
        """Take note of chunks that a reset has forgotten and that no transfer holds any more."""
        self._failures.drop(keys)
        self._settled.difference_update(keys)

    def on_erased(self, keys: Sequence[OffloadKey]) -> None:
        """Take note of records that this tier has no more."""
        if self._residency is not None:
            self._residency.erased(self._config.name, keys)

    def record_victims(self, coldest: Sequence[OffloadKey]) -> int:
        """Demote those of the next victims that need it; return how many would be lost now."""
        if not self.records_victims:
            return 0
        self._request_unsettled(coldest)
        return sum(key not in self._settled or key in self._in_flight for key in coldest)

    def room_bytes(self) -> int:
        """Return how much more may be queued before demotes are dropped."""
        if self._config.cascade != "write_through":
            return 1 << 62
        return self._queue_bytes_max - self._queued_bytes

    def begin_retry(self) -> None:
        """Ask again, as room comes (`commands`), for chunks in memory whose demote failed."""
        self._failures.begin_retry()
        self._crowded_rounds = 0

    def complaints(self) -> list[str]:
        """Say how many chunks in memory are not in this tier although its rule wants them, why."""
        failed = self._failures.keys()
        slots = self._primary.locate(failed)
        self._failures.drop([k for k, slot in zip(failed, slots, strict=True) if slot is None])
        return [
            f"{count} chunks could not be written ({reason})"
            for reason, count in sorted(self._failures.count_by_reason().items())
        ]

    def held_count(self) -> int:
        """Return how many chunks are pinned by demotes on their way. O(tickets)."""
        held: tuple[_Waiting | _Writing, ...] = (
            *self._waiting.values(),
            *self._writing.values(),
            *self._committing.values(),
        )
        return sum(len(demote.keys) for demote in held)

    def count_promoted(self, chunk_count: int, chunk_bytes: int) -> None:
        """Count chunks that were read from this tier."""
        name = self._config.name
        self._counters.add(Metric.PROMOTED_CHUNKS, chunk_count, label=name)
        self._counters.add(Metric.PROMOTED_BYTES, chunk_count * chunk_bytes, label=name)
        self._counters.add(Metric.HIT_CHUNKS, chunk_count, label=name)

    def commands(self, new_job_id: Callable[[], JobId]) -> list[Command]:
        """Turn the catalog's answers into commands for the data plane."""
        commands: list[Command] = []
        for event in self._secondary.poll():
            if isinstance(event, Placed):
                demote = self._start_write(event, new_job_id())
                if demote is not None:
                    commands.append(demote)
            elif isinstance(event, Refused):
                self._refuse(event)
            elif isinstance(event, Committed):
                self._finish_commit(event)
            else:
                self._counters.add(
                    Metric.EVICTED_CHUNKS, len(event.evicted), label=self._config.name
                )
                self.on_erased(event.evicted)
                commands.append(self._start_release(event, new_job_id()))
        self._retry_failed()
        if self._unreleased:
            self._calls_until_retry -= 1
            if self._calls_until_retry <= 0:
                commands += [self._start_release(freed, new_job_id()) for freed in self._unreleased]
                self._unreleased.clear()
        return commands

    def complete(self, done: TransferDone) -> bool:
        """Take the data plane's answer; False: the job is not of this tier."""
        writing = self._writing.pop(done.job_id, None)
        if writing is not None:
            self._finish_write(writing, done)
            return True
        cancelled = self._cancelled_jobs.pop(done.job_id, None)
        if cancelled is not None:
            self._secondary.commit(cancelled.ticket, range(len(cancelled.keys)))
            return True
        freed = self._releasing.pop(done.job_id, None)
        if freed is None:
            return False
        if done.ok:
            self._secondary.released(freed.release_id)
            self._release_failures = 0
        else:
            # Tried again until it works: the bytes stay charged until they really are gone.
            self._unreleased.append(freed)
            self._release_failures += 1
            self._calls_until_retry = min(1 << self._release_failures, _RETRY_CALLS_MAX)
        return True

    def has_work(self) -> bool:
        """Say whether demotes or releases are on their way."""
        return bool(
            self._waiting
            or self._writing
            or self._committing
            or self._releasing
            or self._cancelled_tickets
            or self._cancelled_jobs
            or self._failures.is_retrying
        )

    def has_demotes(self, ticket_max: int) -> bool:
        """Return whether demotes up to a ticket are on their way. O(tickets)."""
        writing = (demote.ticket for demote in self._writing.values())
        return min((*self._waiting, *writing, *self._committing), default=math.inf) <= ticket_max

    def cancel(self) -> None:
        """Give up all demotes: their chunks are not to be found (reset).

        A demote that is being written goes on reading its slots, which may be given to others
        meanwhile; that is safe, because its records are never published.
        """
        for waiting in self._waiting.values():
            self._finish_keys(waiting.group_idx, waiting.keys)
        for writing in (*self._writing.values(), *self._committing.values()):
            self._finish_keys(writing.group_idx, writing.keys)
        self._cancelled_tickets.update(self._waiting)
        self._cancelled_jobs.update(self._writing)
        self._waiting.clear()
        self._writing.clear()
        self._committing.clear()
        self._settled.clear()
        self._once_seen.clear()
        self._failures.clear()

    def on_catalog_anew(self) -> None:
        """Take note that the tier has another catalog: what it had recorded is gone.

        The next flush records what is in memory.
        """
        self._settled &= self._in_flight
        if self._config.cascade == "write_through":
            resident = self._primary.coldest(len(self._primary))
            self._failures.note_unasked(resident, "catalog_lost")

    def forget_resident(self) -> None:
        """Forget what was known of chunks in memory; demotes on their way go on (reset)."""
        self._settled &= self._in_flight
        self._once_seen.clear()
        self._failures.clear()

    def _request_unsettled(self, keys: Sequence[OffloadKey]) -> None:
        self._request_groups([key for key in keys if key not in self._settled])

    def _request_groups(self, keys: Sequence[OffloadKey]) -> None:
        by_group: defaultdict[int, list[OffloadKey]] = defaultdict(list)
        for key in keys:
            by_group[get_offload_group_idx(key)].append(key)
        for group_idx, group_keys in by_group.items():
            self._request(group_idx, group_keys)

    def _request(self, group_idx: int, keys: Sequence[OffloadKey]) -> None:
        chunk_bytes = self._groups[group_idx].chunk_bytes
        room = max(0, self._queue_bytes_max - self._queued_bytes) // chunk_bytes
        if not self.records_victims and len(keys) > room:
            # Victims are asked for again until they are recorded; others by the next flush.
            self._drop(len(keys) - room, "queue_full")
            self._failures.note_unasked(keys[room:], "queue_full")
        keys = tuple(keys[:room])
        if not keys:
            return
        self._failures.drop(keys)
        self._primary.pin(keys)
        self._queued_bytes += len(keys) * chunk_bytes
        if self._config.cascade != "write_through":
            self._settled.update(keys)
            self._in_flight.update(keys)
        # Tail first, since what is recorded first is evicted first.
        per_ticket = max(1, min(_TICKET_BYTES // chunk_bytes, _TICKET_KEYS_MAX))
        for stop in range(len(keys), 0, -per_ticket):
            ticket = self._newest_ticket = self._newest_ticket + 1
            part = keys[max(0, stop - per_ticket) : stop]
            self._waiting[ticket] = _Waiting(group_idx, part)
            self._secondary.request_places(ticket, part, chunk_bytes)

    def _refuse(self, refused: Refused) -> None:
        if refused.ticket in self._cancelled_tickets:
            self._cancelled_tickets.remove(refused.ticket)
            return
        waiting = self._waiting.pop(refused.ticket)
        self._finish_keys(waiting.group_idx, waiting.keys)
        self._note_refused(waiting.keys, refused.reason)

    def _start_write(self, placed: Placed, job_id: JobId) -> Demote | None:
        if placed.ticket in self._cancelled_tickets:
            self._cancelled_tickets.remove(placed.ticket)
            self._secondary.commit(placed.ticket, range(len(placed.keys)))
            return None
        waiting = self._waiting.pop(placed.ticket)
        if len(placed.keys) < len(waiting.keys):
            chosen = set(placed.keys)
            recorded = tuple(key for key in waiting.keys if key not in chosen)
            self._finish_keys(waiting.group_idx, recorded)
            self._failures.on_recorded(recorded)
        if not placed.keys:
            return None
        slots = self._primary.locate(placed.keys)
        assert None not in slots, f"pinned chunks left the primary tier: {slots.count(None)}"
        self._writing[job_id] = _Writing(placed.ticket, waiting.group_idx, placed.keys)
        return Demote(
            job_id=job_id,
            tier_idx=self._tier_idx,
            group_idx=waiting.group_idx,
            keys=placed.keys,
            places=placed.places,
            slots=np.array(slots, np.int64),
            owner=self._secondary.owner,
        )

    def _finish_write(self, writing: _Writing, done: TransferDone) -> None:
        # Pinned until the records can be located, so that no moment finds a chunk nowhere.
        self._committing[writing.ticket] = writing
        self._secondary.commit(writing.ticket, tuple(done.failed))
        written = len(writing.keys) - len(done.failed)
        name = self._config.name
        self._counters.add(Metric.DEMOTED_CHUNKS, written, label=name)
        self._counters.add(
            Metric.DEMOTED_BYTES,
            written * self._groups[writing.group_idx].chunk_bytes,
            label=name,
        )
        for index, reason in done.failed.items():
            self._note_refused([writing.keys[index]], reason)
        crowded = [i for i, reason in done.failed.items() if reason is FailureReason.CROWDED]
        if written:
            self._crowded_rounds = 0
        if crowded:
            self._make_way(writing.group_idx, [writing.keys[i] for i in crowded])
        elif not done.failed:
            self._failures.on_written()

    def _make_way(self, group_idx: int, keys: Sequence[OffloadKey]) -> None:
        """Evict for chunks for which there was no room in one piece, and ask again afterwards."""
        if self._crowded_rounds == _CROWDED_ROUNDS_MAX:
            return
        self._crowded_rounds += 1
        self._crowded_calls = 1
        chunk_count = len(keys) << self._crowded_rounds
        self._secondary.make_way(chunk_count, self._groups[group_idx].chunk_bytes)
        self._failures.retry(keys)

    def _is_making_way(self) -> bool:
        """Return whether bytes evicted for a crowded tier are still being given back."""
        if not self._crowded_calls:
            return False
        self._crowded_calls += 1
        is_over = self._secondary.is_settled() and not self._releasing
        if is_over or self._crowded_calls > _CROWDED_CALLS_MAX:
            self._crowded_calls = 0
        return self._crowded_calls > 0

    def _finish_commit(self, committed: Committed) -> None:
        writing = self._committing.pop(committed.ticket, None)
        if writing is None:  # it was cancelled
            return
        written: Sequence[OffloadKey] = writing.keys
        if self._failures:
            written = [key for key in written if key not in self._failures]
        if committed.reason is None:
            self._secondary.on_recorded(written)
            self._failures.on_recorded(written)
            self._tell_of_recorded(written)
        else:
            self._note_refused(written, committed.reason)
        self._finish_keys(writing.group_idx, writing.keys)

    def _tell_of_recorded(self, keys: Sequence[OffloadKey]) -> None:
        if self._residency is not None:
            # Another process may have recorded some of them before, and evicted them since.
            places = self._secondary.locate(keys)
            found = [key for key, place in zip(keys, places, strict=True) if place is not None]
            self._residency.recorded(self._config.name, found)

    def _note_refused(self, keys: Sequence[OffloadKey], reason: FailureReason) -> None:
        """Remember chunks that were not written; each counts once, however often it is tried."""
        self._drop(self._failures.note_refused(keys, reason.value), reason.value)

    def _retry_failed(self) -> None:
        """Ask again for chunks in memory whose demote failed, as far as the queue has room."""
        if not self._failures.is_retrying or self._is_making_way():
            return
        chunk_bytes_max = max(group.chunk_bytes for group in self._groups)
        keys = self._failures.take((self._queue_bytes_max - self._queued_bytes) // chunk_bytes_max)
        slots = self._primary.locate(keys)
        self._request_groups([k for k, slot in zip(keys, slots, strict=True) if slot is not None])

    def _finish_keys(self, group_idx: int, keys: Sequence[OffloadKey]) -> None:
        self._primary.unpin(keys)
        if self._in_flight:
            self._in_flight.difference_update(keys)
        self._queued_bytes -= len(keys) * self._groups[group_idx].chunk_bytes

    def _start_release(self, freed: Freed, job_id: JobId) -> Release:
        self._releasing[job_id] = freed
        return Release(
            job_id=job_id,
            tier_idx=self._tier_idx,
            runs=freed.runs,
            empty_segments=freed.empty_segments,
        )

    def _drop(self, count: int, reason: str) -> None:
        self._counters.add(Metric.DROPPED_DEMOTES, count, label=reason)
