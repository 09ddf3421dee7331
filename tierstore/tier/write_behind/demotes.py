"""Demotes of one secondary tier: asked for, written, recorded, and tried again.

request         pinned, places asked for          the catalog's writer makes room
Placed          -> Demote command                 the data plane writes
TransferDone    -> commit                         the catalog publishes the records
Committed       unpinned                          the records can be found
Refused, failed -> Retries                        asked for again later
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

from tierstore.key import OffloadKey, get_offload_group_idx, offload_group_indices
from tierstore.layout import GroupSpec
from tierstore.metrics import Counters, Metric
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.tier.admission.protocol import Admission
from tierstore.tier.health.tier_health import TierHealth, worst_reason
from tierstore.tier.memory.primary import PrimaryTier
from tierstore.tier.movement_log import MovementLog
from tierstore.tier.secondary import SecondaryTier
from tierstore.tier.write_behind.releases import Releases
from tierstore.tier.write_behind.retries import Retries
from tierstore.tier.write_behind.write_queue import WriteQueue
from tierstore.tier_events import Committed, Evicted, Placed, Refused
from tierstore.transfer import Command, Demote, FailureReason, JobId, TransferDone

__all__ = ["Demotes"]


class Demotes:
    """The write-behind of one tier: what its admission lets through goes down. One thread."""

    def __init__(
        self,
        *,
        tier_idx: int,
        name: str,
        admission: Admission,
        groups: Sequence[GroupSpec],
        primary: PrimaryTier,
        secondary: SecondaryTier,
        health: TierHealth,
        counters: Counters,
        queue_bytes_max: int,
        movements: MovementLog | None = None,
    ) -> None:
        """Share the tiers; the admission is told what was asked for, and what is to be again.

        `queue_bytes_max` bounds what this tier pins in the primary tier.
        """
        self._name = name
        self._admission = admission
        self._groups = groups
        self._primary = primary
        self._secondary = secondary
        self._health = health
        self._counters = counters
        self._movements = movements
        self.queue = WriteQueue(
            tier_idx=tier_idx,
            groups=groups,
            primary=primary,
            secondary=secondary,
            bytes_max=queue_bytes_max,
        )
        """What is on its way; to be asked, not changed."""
        self._releases = Releases(tier_idx, secondary, health)
        self._retries = Retries(secondary, health)
        self._failed = self._retries.failed
        self._trial_ticket = 0
        """The first of the last trial: what began before says nothing of the tier now."""
        self.retried_ticket = 0
        """The last one that asked again for chunks whose demote had failed."""

    @property
    def is_retrying(self) -> bool:
        """Whether chunks whose demote failed are asked for again, or will be by themselves soon."""
        return self._retries.is_under_way

    @property
    def is_healing(self) -> bool:
        """Whether something waits until the tier is in use again, or is tried again."""
        is_sound = self._health.is_writable and not self._health.is_write_doubted
        return not is_sound and bool(self._failed or self._releases.is_due)

    def request(
        self, group_idx: int, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE
    ) -> int:
        """Ask the tier to record chunks; return how many found no room in the queue."""
        limit = self._health.write_count_max()
        if limit < len(keys):
            self._park(keys[limit:])
            keys = keys[:limit]
        room = max(0, self.queue.room_bytes) // self._groups[group_idx].chunk_bytes
        unqueued = keys[room:]
        if unqueued and not self._admission.admits_victims:
            # Victims are asked for again until they are recorded; others by the next flush.
            self._drop(len(unqueued), "queue_full")
            self._failed.note_unasked(unqueued, "queue_full")
        keys = keys[:room]
        if keys:
            if self._health.begin_write_trial():
                self._trial_ticket = self.queue.newest_ticket + 1
            self._failed.drop(keys)
            self._admission.on_admitted(keys)
            self.queue.add(group_idx, keys, use)
        return len(unqueued)

    def request_groups(self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE) -> int:
        """Ask for chunks of any groups; return how many found no room in the queue."""
        groups = offload_group_indices(keys)
        if len(groups) == 1:
            return self.request(groups.pop(), keys, use)
        by_group: defaultdict[int, list[OffloadKey]] = defaultdict(list)
        for key in keys:
            by_group[get_offload_group_idx(key)].append(key)
        return sum(self.request(group_idx, part, use) for group_idx, part in by_group.items())

    def begin_retry(self) -> None:
        """Ask again, as room comes (`commands`), for chunks in memory whose demote failed.

        A tier that is out of use is tried at once.
        """
        self._retries.begin()

    def commands(self, new_job_id: Callable[[], JobId]) -> list[Command]:
        """Turn the catalog's answers into commands for the data plane."""
        commands: list[Command] = []
        self._retries.begin_if_back()
        for event in self._secondary.poll():
            if isinstance(event, Placed):
                demote = self._start_write(event, new_job_id)
                if demote is not None:
                    commands.append(demote)
            elif isinstance(event, Refused):
                self._refuse(event)
            elif isinstance(event, Committed):
                self._finish_commit(event)
            elif isinstance(event, Evicted):
                self._counters.add(Metric.EVICTED_CHUNKS, len(event.keys), label=self._name)
                if self._movements is not None:
                    self._movements.erased(self._name, event.keys)
            else:
                self._releases.add(event)
        # Before what waits for their bytes is asked for again.
        commands += self._releases.commands(new_job_id)
        self._retries.begin_if_due(is_queue_empty=not self.queue)
        self._retry_failed()
        self._health.look(
            is_writing=self.queue.is_writing or self._releases.is_under_way,
            is_waiting=self.queue.is_waiting,
        )
        return commands

    def complete(self, done: TransferDone) -> bool:
        """Take the data plane's answer; False: the job is not of this tier."""
        if self._finish_write(done):
            return True
        if self.queue.end_cancelled_write(done):
            self._health.note_moved()
            return True
        if not self._releases.complete(done):
            return False
        if done.ok:
            was_doubted = self._health.is_write_doubted
            self._health.note_released()
            if was_doubted and not self._health.is_write_doubted:
                # A write may have failed, too, and would be tried again only while in doubt.
                self._failed.begin_retry()
        else:
            self._health.note_unreleased()
        return True

    def has_work(self) -> bool:
        """Return whether demotes or releases are on their way.

        What a tier that is out of use has not done is no work: nothing can be done for it now.
        """
        if not self._health.may_write_soon:
            # A device that refuses answers all the same.
            return self.queue.is_writing and not self._health.is_standing_still
        if self._retries.is_due:
            return True
        return bool(self.queue or self._releases.is_under_way or self._failed.is_retrying)

    def has_demotes(self, ticket_max: int) -> bool:
        """Return whether demotes up to a ticket are on their way. O(tickets)."""
        return self.queue.oldest_ticket() <= ticket_max

    def cancel(self) -> None:
        """Give all of them up (reset): none of their chunks is to be found."""
        self.queue.cancel()

    def forget(self, keys: Collection[OffloadKey]) -> None:
        """Take note of chunks that left memory: nothing of them can be tried again."""
        self._failed.forget(keys)

    def forget_failures(self) -> None:
        """Try nothing again that has failed until now (reset)."""
        self._failed.clear()

    def request_lost_records(self, keys: Sequence[OffloadKey]) -> None:
        """Ask again, at the next flush, for chunks in memory whose records are gone.

        What is on its way now is refused, and asked for again then.
        """
        held = self.queue.held_keys()
        self._failed.note_unasked([key for key in keys if key not in held], "catalog_lost")

    def request_lost_payload(self, keys: Sequence[OffloadKey]) -> None:
        """Ask again, at the next flush, for chunks in memory whose payload may be gone.

        What is on its way now may be written there: it is asked for again once it is recorded.
        """
        newest = self.queue.newest_ticket
        self._failed.note_lost(keys, held=self.queue.held_keys(), ticket=newest)

    def complaints(self) -> list[str]:
        """Return how many chunks in memory this tier should have and has not, and why, in words."""
        failed = self._failed.keys()
        slots = self._primary.locate(failed)
        self._failed.forget([k for k, slot in zip(failed, slots, strict=True) if slot is None])
        counts = self._failed.count_by_reason()
        if not self._health.is_writable:
            held = self.queue.held_keys().difference(failed)
            counts[self._health.write_cause.value] += len(held)
        complaints = [
            f"{count} chunks could not be written ({reason})"
            for reason, count in sorted(counts.items())
            if count
        ]
        if complaints and not self._health.is_writable:
            complaints.append(f"it {self._health.trouble}, and is out of use")
        return complaints

    def _park(self, keys: Sequence[OffloadKey]) -> None:
        """Remember chunks for a tier that is out of use, until it is in use again."""
        self._failed.drop(keys)
        self._note_refused(keys, self._health.write_cause)
        self._admission.on_admitted(keys)

    def _refuse(self, refused: Refused) -> None:
        if self.queue.end_cancelled_ticket(refused.ticket):
            return
        self._note_refused(self.queue.refuse(refused.ticket), refused.reason)
        # `FULL` says that the tier's capacity is too small for what lives in it now.
        is_failing = refused.reason is not FailureReason.FULL
        reason = refused.reason if is_failing else FailureReason.CLOSED
        self._health.note_refused(reason, is_trial=refused.ticket >= self._trial_ticket)

    def _start_write(self, placed: Placed, new_job_id: Callable[[], JobId]) -> Demote | None:
        if self.queue.end_cancelled_ticket(placed.ticket):
            self._secondary.commit(placed.ticket, range(len(placed.keys)))
            return None
        recorded = self.queue.drop_recorded(placed)
        if recorded:
            self._withdraw(self._failed.on_recorded(recorded, placed.ticket))
        return self.queue.begin_write(placed, new_job_id()) if placed.keys else None

    def _finish_write(self, done: TransferDone) -> bool:
        writing = self.queue.begin_commit(done)
        if writing is None:
            return False
        written = len(writing.written)
        self._health.note_moved()
        chunk_bytes = self._groups[writing.group_idx].chunk_bytes
        self._counters.add(Metric.DEMOTED_CHUNKS, written, label=self._name)
        self._counters.add(Metric.DEMOTED_BYTES, written * chunk_bytes, label=self._name)
        for index, reason in done.failed.items():
            self._note_refused([writing.keys[index]], reason)
        crowded = [i for i, reason in done.failed.items() if reason is FailureReason.CROWDED]
        if written:
            self._retries.crowding.end()
        else:  # what was written counts once it is published
            is_trial = writing.ticket >= self._trial_ticket
            self._health.note_refused(worst_reason(done.failed.values()), is_trial=is_trial)
        if crowded:
            if self._retries.crowding.make_way(len(crowded), chunk_bytes):
                self._failed.retry([writing.keys[i] for i in crowded])
        elif not done.failed:
            self._failed.on_written()
        return True

    def _finish_commit(self, committed: Committed) -> None:
        writing = self.queue.committing(committed.ticket)
        if writing is None:  # it was cancelled
            return
        written = writing.written
        if committed.reason is None:
            self._withdraw(self._failed.on_recorded(written, committed.ticket))
            self._tell_of_recorded(written)
            if written:
                self._health.note_written()
        else:
            self._note_refused(written, committed.reason)
            is_trial = writing.ticket >= self._trial_ticket
            self._health.note_refused(committed.reason, is_trial=is_trial)
        self.queue.end(writing)

    def _withdraw(self, keys: Collection[OffloadKey]) -> None:
        if keys:
            self._admission.on_withdrawn(keys)

    def _tell_of_recorded(self, keys: Sequence[OffloadKey]) -> None:
        if self._movements is not None:
            # Another process may have recorded some of them before, and evicted them since.
            places = self._secondary.locate(keys)
            found = [key for key, place in zip(keys, places, strict=True) if place is not None]
            self._movements.recorded(self._name, found)

    def _note_refused(self, keys: Sequence[OffloadKey], reason: FailureReason) -> None:
        """Remember chunks that were not written; each counts once, however often it is tried."""
        self._drop(self._failed.note_refused(keys, reason.value), reason.value)

    def _retry_failed(self) -> None:
        """Ask again for chunks in memory whose demote failed, as far as the queue has room."""
        if not self._failed.is_retrying:
            return
        chunk_bytes_max = max(group.chunk_bytes for group in self._groups)
        room = self.queue.room_bytes // chunk_bytes_max
        keys = self._retries.take(room, is_releasing=self._releases.is_under_way)
        if keys is None:
            return
        slots = self._primary.locate(keys)
        self.request_groups([k for k, slot in zip(keys, slots, strict=True) if slot is not None])
        self.retried_ticket = self.queue.newest_ticket

    def _drop(self, count: int, reason: str) -> None:
        self._counters.add(Metric.DROPPED_DEMOTES, count, label=reason)
