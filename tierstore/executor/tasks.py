"""The I/O tasks of all tiers: queued by the executor, run by the threads of their tier."""

from collections.abc import Sequence
from functools import partial

from tierstore.backend.failure import take_cause
from tierstore.backend.protocol import Backend
from tierstore.clock import Clock
from tierstore.errors import BackendError
from tierstore.executor.copies import Copies
from tierstore.executor.job import Job, PartIndex, RecordSpan
from tierstore.executor.jobs import OpenJobs
from tierstore.executor.progress import SpanRead
from tierstore.executor.syncing import AfterSync, PendingSync
from tierstore.executor.tier_io import TierIo
from tierstore.host_pool import HostPool
from tierstore.transfer import Demote, FailureReason, Promote, Release

__all__ = ["IoTasks"]


class IoTasks:
    """Splits commands into tasks, and reports what became of each to its job.

    A task that has filled slots submits their copies to the GPU itself, so that the copy of one
    batch overlaps the read of the next.
    """

    def __init__(
        self,
        pool: HostPool,
        copies: Copies | None,
        jobs: OpenJobs,
        clock: Clock,
        *,
        chunk_bytes: Sequence[int],
        slot_bytes: Sequence[int],
    ) -> None:
        """Move bytes of `pool`; the sizes of chunks and slots are indexed by group.

        `copies` is None where there is no engine: slots are filled and nothing more.
        """
        self._pool = pool
        self._copies = copies
        self._jobs = jobs
        self._clock = clock
        self._chunk_bytes = chunk_bytes
        self._slot_bytes = slot_bytes

    def queue_promote(
        self, job: Job, tier: TierIo, promote: Promote, first: int, index: PartIndex
    ) -> None:
        """Queue the reads of a promote; its keys have the indices from `first` in the job."""
        chunk_bytes = self._chunk_bytes[promote.group_idx]
        has_others = tier.progress.has_task_for_all
        spans = tier.splitter.split(promote, first, chunk_bytes, has_others=has_others)
        with self._jobs.lock:
            now = self._clock.seconds()
            if tier.progress.is_stalled(now):
                # Not queued: a device that never answers must not gather the tasks of every load.
                stalled = dict.fromkeys(
                    range(first, first + len(promote.keys)), FailureReason.STALLED
                )
                job.failed.update(stalled)
                return
            for span in spans:
                job.reads[span.indices.start] = SpanRead(span.indices, tier.progress, now)
            self._accept(job, tier, len(spans))
            for span in spans:
                task = partial(self._read, job, tier, span, index)
                if tier.gate.admit(task, self._held_bytes(span)):
                    tier.pool.submit_urgent(task)

    def queue_demote(self, job: Job, tier: TierIo, demote: Demote) -> None:
        """Queue the writes of a demote."""
        chunk_bytes = self._chunk_bytes[demote.group_idx]
        has_others = tier.progress.has_task_for_all
        spans = tier.splitter.split(demote, 0, chunk_bytes, has_others=has_others)
        with self._jobs.lock:
            self._accept(job, tier, len(spans))
        for span in spans:
            tier.pool.submit_deferred(partial(self._write, job, tier, demote.owner, span))

    def queue_release(self, job: Job, tier: TierIo, release: Release) -> None:
        """Queue the giving back of places."""
        with self._jobs.lock:
            self._accept(job, tier, 1)
        tier.pool.submit_deferred(partial(self._release, job, tier, release))

    def queue_sync(self, tier: TierIo, also: AfterSync) -> PendingSync:
        """Queue a flush of the tier's payload to its device; `also` is called after it."""
        sync = PendingSync()
        tier.pool.submit_deferred(partial(self._sync, tier.backend, also, sync))
        return sync

    def _accept(self, job: Job, tier: TierIo, task_count: int) -> None:
        """Count tasks that are about to be queued; the lock is held."""
        job.tasks_left += task_count
        now = self._clock.seconds()
        for _ in range(task_count):
            tier.progress.accept(now)

    def _read(self, job: Job, tier: TierIo, span: RecordSpan, index: PartIndex) -> None:
        """Fill slots and send them on to the GPU."""
        if not self._begin_read(job, tier, span):
            return
        failed: dict[int, FailureReason] | None = None
        try:
            failed = tier.backend.read(span.records(self._pool.array.data, self._slot_bytes))
            if self._copies is not None:
                self._copies.send_on(job, index.parts_of(span.arrived(failed)))
        finally:
            with self._jobs.lock:
                self._end(job, tier, span, failed)
                self._leave_gate(tier, span)

    def _begin_read(self, job: Job, tier: TierIo, span: RecordSpan) -> bool:
        """Note that a read has its turn; False: it was given up and no longer owns its slots."""
        with self._jobs.lock:
            now = self._clock.seconds()
            read = job.reads.get(span.indices.start)
            if read is None:
                tier.progress.end(now)
                self._leave_gate(tier, span)
                return False
            tier.progress.begin(now)
            read.began_at = now
            return True

    def _leave_gate(self, tier: TierIo, span: RecordSpan) -> None:
        """Let the next reads begin, as the last step of one; the lock is held."""
        admitted = tier.gate.end(self._held_bytes(span))
        if admitted:
            tier.pool.submit_next(admitted)

    def _held_bytes(self, span: RecordSpan) -> int:
        return span.record_count * self._slot_bytes[span.command.group_idx]

    def _write(self, job: Job, tier: TierIo, owner: int, span: RecordSpan) -> None:
        """Write slots to records."""
        failed: dict[int, FailureReason] | None = None
        self._begin_write(tier)
        try:
            failed = tier.write(owner, span.records(self._pool.array.data, self._slot_bytes))
        finally:
            if failed != {}:
                job.cause = take_cause() or job.cause
            with self._jobs.lock:
                self._end(job, tier, span, failed)

    def _release(self, job: Job, tier: TierIo, release: Release) -> None:
        """Give places back."""
        reason: FailureReason | None = FailureReason.IO_ERROR
        self._begin_write(tier)
        try:
            reason = tier.backend.release(release.runs, release.empty_segments)
        finally:
            with self._jobs.lock:
                job.ok = reason is None
                job.cause = "" if job.ok else take_cause()
                job.tasks_left -= 1
                tier.progress.end(self._clock.seconds())
                self._jobs.tell_changed()

    def _sync(self, backend: Backend, also: AfterSync, sync: PendingSync) -> None:
        """Flush one tier to its device."""
        why = "the flush failed"
        try:
            try:
                backend.sync()
            finally:
                also(backend.lost_segments)
            why = ""
        except BackendError as error:
            why = str(error)
        finally:
            with self._jobs.lock:
                sync.why = why
                sync.is_done = True
                self._jobs.tell_changed()

    def _begin_write(self, tier: TierIo) -> None:
        take_cause()  # of something that came before
        with self._jobs.lock:
            tier.progress.begin(self._clock.seconds())

    def _end(
        self, job: Job, tier: TierIo, span: RecordSpan, failed: dict[int, FailureReason] | None
    ) -> None:
        """Report a task to its job; None: an error has ended it, and all of its records failed.

        The lock is held.
        """
        failed = span.all_failed() if failed is None else failed
        indices = span.indices
        if failed:
            job.failed.update({indices[i]: reason for i, reason in failed.items()})
        job.reads.pop(indices.start, None)  # a demote has none
        job.tasks_left -= 1
        tier.progress.end(self._clock.seconds())
        if job.is_settled():  # whoever waits has nothing to do before
            self._jobs.tell_changed()
