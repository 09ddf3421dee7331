"""When chunks go down into one secondary tier, and what came of it.

    on_resident / on_touched / record_victims      the rule says: demote these keys
        -> pin, request_places                     the catalog's writer makes room
    Placed -> Demote command -> TransferDone       the data plane writes
        -> commit -> Committed                     the record is visible: unpin

Pins keep the slots' bytes in place meanwhile; the write queue's limit bounds pins and memory.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

import numpy as np

from tierstore.config import SecondaryConfig
from tierstore.key import OffloadKey, get_offload_group_idx
from tierstore.layout import GroupSpec
from tierstore.metrics import Counters, Metric
from tierstore.tier.health import TRIAL_CHUNKS, TierHealth, worst_reason
from tierstore.tier.memory.primary import PrimaryTier
from tierstore.tier.residency import ResidencyLog
from tierstore.tier.secondary import SecondaryTier
from tierstore.tier.write_behind.crowding import Crowding
from tierstore.tier.write_behind.demotes import Demotes, WritingDemote
from tierstore.tier.write_behind.failed_demotes import FailedDemotes
from tierstore.tier.write_behind.releases import Releases
from tierstore.tier_events import Committed, Evicted, Placed, Refused
from tierstore.transfer import Command, Demote, FailureReason, JobId, TransferDone

__all__ = ["Cascade"]

_ONCE_SEEN_MAX = 1 << 16
"""Chunks that left the primary tier after one use and are remembered for `second_touch`."""


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
        health: TierHealth,
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
        self.health = health
        """What is known of the tier's device."""
        self._returned = (0, secondary.owner)
        """How often it was in use again, as which owner, when what failed was last asked for."""
        self._counters = counters
        self._queue_bytes_max = queue_bytes_max
        self.retried_ticket = 0
        """The last one that asked again for chunks whose demote had failed."""
        self.loss_count = 0
        """How often payload was found gone."""
        self._demotes = Demotes()
        self._trial_ticket = 0
        """The first of the last trial: what began before says nothing of the tier now."""
        self._releases = Releases(tier_idx, secondary, health)
        self._queued_bytes = 0
        # Resident chunks that need no demote: recorded, refused, or being written. Not kept for
        # write_through, whose chunks are asked for once, when they become resident.
        self._settled: set[OffloadKey] = set()
        self._in_flight: set[OffloadKey] = set()
        self._once_seen: OrderedDict[OffloadKey, None] = OrderedDict()
        self._failures = FailedDemotes()
        self._crowding = Crowding(secondary)

    @property
    def name(self) -> str:
        """The tier's name."""
        return self._config.name

    @property
    def records_victims(self) -> bool:
        """Whether chunks go down when they are about to leave the primary tier."""
        return self._config.cascade == "on_evict"

    @property
    def is_retrying(self) -> bool:
        """Whether chunks whose demote failed are asked for again, or will be by themselves soon."""
        if not self._failures or not self.health.may_write_soon:
            return False
        return self._failures.is_retrying or self._is_back() or not self.health.is_writable

    @property
    def newest_ticket(self) -> int:
        """The ticket that was asked for last; they are numbered."""
        return self._demotes.newest_ticket

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
        self._failures.forget(keys)
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
        self._failures.forget(keys)
        self._settled.difference_update(keys)

    def on_erased(self, keys: Sequence[OffloadKey]) -> None:
        """Take note of records that this tier has no more."""
        if self._residency is not None:
            self._residency.erased(self._config.name, keys)

    def record_victims(self, coldest: Sequence[OffloadKey]) -> int:
        """Demote those of the next victims that need it; return how many would be lost now.

        None, if the tier is out of use: losing them is better than waiting for it.
        """
        if not self.records_victims:
            return 0
        self._request_unsettled(coldest)
        if not self.is_awaited:
            return 0
        return sum(key not in self._settled or key in self._in_flight for key in coldest)

    def room_bytes(self) -> int:
        """Return how much more may be queued before demotes are dropped."""
        if self._config.cascade != "write_through" or not self.is_awaited:
            return 1 << 62
        return self._queue_bytes_max - self._queued_bytes

    @property
    def is_awaited(self) -> bool:
        """Whether to wait until the tier has taken chunks: not while it is out of use."""
        return self.health.is_writable

    @property
    def is_healing(self) -> bool:
        """Whether something waits until the tier is in use again, or is tried again."""
        is_sound = self.health.is_writable and not self.health.is_write_doubted
        return not is_sound and bool(self._failures or self._releases.is_due)

    def begin_retry(self) -> None:
        """Ask again, as room comes (`commands`), for chunks in memory whose demote failed.

        A tier that is out of use is tried at once.
        """
        self.health.retry_now()
        self._failures.begin_retry()
        self._crowding.end()

    def complaints(self) -> list[str]:
        """Say how many chunks in memory are not in this tier although its rule wants them, why."""
        failed = self._failures.keys()
        slots = self._primary.locate(failed)
        self._failures.forget([k for k, slot in zip(failed, slots, strict=True) if slot is None])
        counts = self._failures.count_by_reason()
        if not self.health.is_writable:
            held = self._demotes.held_keys().difference(failed)
            counts[self.health.write_cause.value] += len(held)
        complaints = [
            f"{count} chunks could not be written ({reason})"
            for reason, count in sorted(counts.items())
            if count
        ]
        if complaints and not self.health.is_writable:
            complaints.append(f"it {self.health.trouble}, and is out of use")
        return complaints

    def held_count(self) -> int:
        """Return how many chunks are pinned by demotes on their way. O(tickets)."""
        return sum(len(demote.keys) for demote in self._demotes.held())

    def count_promoted(self, chunk_count: int, chunk_bytes: int) -> None:
        """Count chunks that were read from this tier."""
        name = self._config.name
        self._counters.add(Metric.PROMOTED_CHUNKS, chunk_count, label=name)
        self._counters.add(Metric.PROMOTED_BYTES, chunk_count * chunk_bytes, label=name)
        self._counters.add(Metric.HIT_CHUNKS, chunk_count, label=name)

    def commands(self, new_job_id: Callable[[], JobId]) -> list[Command]:
        """Turn the catalog's answers into commands for the data plane."""
        commands: list[Command] = []
        if self._is_back():
            self._returned = (self.health.write_return_count, self._secondary.owner)
            self._failures.begin_retry()
            self._crowding.end()
        for event in self._secondary.poll():
            if isinstance(event, Placed):
                demote = self._start_write(event, new_job_id())
                if demote is not None:
                    commands.append(demote)
            elif isinstance(event, Refused):
                self._refuse(event)
            elif isinstance(event, Committed):
                self._finish_commit(event)
            elif isinstance(event, Evicted):
                self._counters.add(Metric.EVICTED_CHUNKS, len(event.keys), label=self._config.name)
                self.on_erased(event.keys)
            else:
                self._releases.add(event)
        # Before what waits for their bytes is asked for again.
        commands += self._releases.commands(new_job_id)
        if self.health.allows_write_trial or (self.health.is_write_failing and not self._demotes):
            self._failures.begin_trial(TRIAL_CHUNKS)
        elif self.health.has_stalled and not self._demotes and self.health.is_writable:
            self.health.forget_stall()
            self._failures.retry_unasked()
        self._retry_failed()
        self.health.look(
            is_writing=self._demotes.is_writing or self._releases.is_under_way,
            is_waiting=self._demotes.is_waiting,
        )
        return commands

    def complete(self, done: TransferDone) -> bool:
        """Take the data plane's answer; False: the job is not of this tier."""
        writing = self._demotes.writing.pop(done.job_id, None)
        if writing is not None:
            self._finish_write(writing, done)
            return True
        cancelled = self._demotes.cancelled_jobs.pop(done.job_id, None)
        if cancelled is not None:
            self.health.note_moved()
            self._secondary.commit(cancelled.ticket, range(len(cancelled.keys)))
            return True
        if not self._releases.complete(done):
            return False
        if done.ok:
            self.health.note_released()
        else:
            self.health.note_unreleased()
        return True

    def has_work(self) -> bool:
        """Return whether demotes or releases are on their way.

        What a tier that is out of use has not done is no work: nothing can be done for it now.
        """
        if not self.health.may_write_soon:
            # A device that refuses answers all the same.
            return self._demotes.is_writing and not self.health.is_standing_still
        if self._failures and (self._is_back() or not self.health.is_writable):
            return True  # a trial comes, or is under way, or has just succeeded
        return bool(self._demotes or self._releases.is_under_way or self._failures.is_retrying)

    def has_demotes(self, ticket_max: int) -> bool:
        """Return whether demotes up to a ticket are on their way. O(tickets)."""
        return self._demotes.oldest_ticket() <= ticket_max

    def cancel(self) -> None:
        """Give up all demotes: their chunks are not to be found (reset).

        A demote that is being written goes on reading its slots, which may be given to others
        meanwhile; that is safe, because its records are never published.
        """
        for demote in self._demotes.cancel():
            self._finish_keys(demote.group_idx, demote.keys)
        self._settled.clear()
        self._once_seen.clear()
        self._failures.clear()

    def on_catalog_lost(self) -> None:
        """Take note that the tier's records are gone: what is in memory is to be recorded again."""
        if not self.records_victims:  # the next flush asks such a tier for all of them
            held = self._demotes.held_keys()
            lost = [key for key in self._asked_for() if key not in held]  # they are refused
            self._failures.note_unasked(lost, "catalog_lost")
        self._settled &= self._in_flight

    def hear_losses(self) -> bool:
        """Take note of payload that is gone, with records: return whether there was any.

        What is in memory is to be written again.
        """
        is_lost = self._secondary.take_lost()
        if is_lost:
            self.loss_count += 1
            held, newest = self._demotes.held_keys(), self._demotes.newest_ticket
            self._failures.note_lost(self._asked_for(), held=held, ticket=newest)
            self._settled &= self._in_flight
        return is_lost

    def _asked_for(self) -> list[OffloadKey]:
        """Return the chunks in memory that the tier was asked to record, the hottest first."""
        resident = self._primary.coldest(len(self._primary))[::-1]
        if self._config.cascade == "write_through":
            return resident
        return [key for key in resident if key in self._settled]

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
        limit = self.health.write_count_max()
        if limit < len(keys):
            self._park(keys[limit:])
            keys = keys[:limit]
        chunk_bytes = self._groups[group_idx].chunk_bytes
        room = max(0, self._queue_bytes_max - self._queued_bytes) // chunk_bytes
        if not self.records_victims and len(keys) > room:
            # Victims are asked for again until they are recorded; others by the next flush.
            self._drop(len(keys) - room, "queue_full")
            self._failures.note_unasked(keys[room:], "queue_full")
        keys = tuple(keys[:room])
        if not keys:
            return
        if self.health.begin_write_trial():
            self._trial_ticket = self._demotes.newest_ticket + 1
        self._failures.drop(keys)
        self._primary.pin(keys)
        self._queued_bytes += len(keys) * chunk_bytes
        if self._config.cascade != "write_through":
            self._settled.update(keys)
            self._in_flight.update(keys)
        for ticket, part in self._demotes.begin(group_idx, keys, chunk_bytes):
            self._secondary.request_places(ticket, part, chunk_bytes)

    def _is_back(self) -> bool:
        """Return whether the tier is in use again and what failed was not asked for since."""
        returned = (self.health.write_return_count, self._secondary.owner)
        return returned != self._returned and self.health.is_writable

    def _park(self, keys: Sequence[OffloadKey]) -> None:
        """Remember chunks for a tier that is out of use, until it is in use again."""
        self._failures.drop(keys)
        self._note_refused(keys, self.health.write_cause)
        if self._config.cascade != "write_through":
            self._settled.update(keys)

    def _refuse(self, refused: Refused) -> None:
        if refused.ticket in self._demotes.cancelled_tickets:
            self._demotes.cancelled_tickets.remove(refused.ticket)
            return
        waiting = self._demotes.waiting.pop(refused.ticket)
        self._finish_keys(waiting.group_idx, waiting.keys)
        self._note_refused(waiting.keys, refused.reason)
        # `FULL` says that the tier's capacity is too small for what lives in it now.
        is_failing = refused.reason is not FailureReason.FULL
        reason = refused.reason if is_failing else FailureReason.CLOSED
        self.health.note_refused(reason, is_trial=refused.ticket >= self._trial_ticket)

    def _start_write(self, placed: Placed, job_id: JobId) -> Demote | None:
        if placed.ticket in self._demotes.cancelled_tickets:
            self._demotes.cancelled_tickets.remove(placed.ticket)
            self._secondary.commit(placed.ticket, range(len(placed.keys)))
            return None
        waiting = self._demotes.waiting.pop(placed.ticket)
        if len(placed.keys) < len(waiting.keys):
            chosen = set(placed.keys)
            recorded = tuple(key for key in waiting.keys if key not in chosen)
            self._finish_keys(waiting.group_idx, recorded)
            self._settled -= self._failures.on_recorded(recorded, placed.ticket)
        if not placed.keys:
            return None
        slots = self._primary.locate(placed.keys)
        assert None not in slots, f"pinned chunks left the primary tier: {slots.count(None)}"
        self._demotes.writing[job_id] = WritingDemote(placed.ticket, waiting.group_idx, placed.keys)
        return Demote(
            job_id=job_id,
            tier_idx=self._tier_idx,
            group_idx=waiting.group_idx,
            keys=placed.keys,
            places=placed.places,
            slots=np.array(slots, np.int64),
            owner=self._secondary.owner,
        )

    def _finish_write(self, writing: WritingDemote, done: TransferDone) -> None:
        # Pinned until the records can be located, so that no moment finds a chunk nowhere.
        keys = tuple(key for i, key in enumerate(writing.keys) if i not in done.failed)
        self._demotes.committing[writing.ticket] = replace(writing, written=keys)
        self._secondary.commit(writing.ticket, tuple(done.failed))
        written = len(keys)
        self.health.note_moved()
        chunk_bytes = self._groups[writing.group_idx].chunk_bytes
        self._counters.add(Metric.DEMOTED_CHUNKS, written, label=self.name)
        self._counters.add(Metric.DEMOTED_BYTES, written * chunk_bytes, label=self.name)
        for index, reason in done.failed.items():
            self._note_refused([writing.keys[index]], reason)
        crowded = [i for i, reason in done.failed.items() if reason is FailureReason.CROWDED]
        if written:
            self._crowding.end()
        else:  # what was written counts once it is published
            is_trial = writing.ticket >= self._trial_ticket
            self.health.note_refused(worst_reason(done.failed.values()), is_trial=is_trial)
        if crowded:
            if self._crowding.make_way(len(crowded), chunk_bytes):
                self._failures.retry([writing.keys[i] for i in crowded])
        elif not done.failed:
            self._failures.on_written()

    def _finish_commit(self, committed: Committed) -> None:
        writing = self._demotes.committing.pop(committed.ticket, None)
        if writing is None:  # it was cancelled
            return
        written = writing.written
        if committed.reason is None:
            self._settled -= self._failures.on_recorded(written, committed.ticket)
            self._tell_of_recorded(written)
            if written:
                self.health.note_written()
        else:
            self._note_refused(written, committed.reason)
            is_trial = writing.ticket >= self._trial_ticket
            self.health.note_refused(committed.reason, is_trial=is_trial)
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
        if not self._failures.is_retrying:
            return
        if self._crowding.is_making_way(is_releasing=self._releases.is_under_way):
            return
        chunk_bytes_max = max(group.chunk_bytes for group in self._groups)
        keys = self._failures.take((self._queue_bytes_max - self._queued_bytes) // chunk_bytes_max)
        slots = self._primary.locate(keys)
        self._request_groups([k for k, slot in zip(keys, slots, strict=True) if slot is not None])
        self.retried_ticket = self._demotes.newest_ticket

    def _finish_keys(self, group_idx: int, keys: Sequence[OffloadKey]) -> None:
        self._primary.unpin(keys)
        if self._in_flight:
            self._in_flight.difference_update(keys)
        self._queued_bytes -= len(keys) * self._groups[group_idx].chunk_bytes

    def _drop(self, count: int, reason: str) -> None:
        self._counters.add(Metric.DROPPED_DEMOTES, count, label=reason)
