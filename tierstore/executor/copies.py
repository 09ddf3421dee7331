"""The copies between the engine's blocks and slots: submitted by any thread, ended by `settle`."""

import itertools
import logging
from collections.abc import Collection, Iterable, Sequence

from tierstore.bounded_log import Causes, bounded
from tierstore.dma.protocol import ComputeMark, CopyEngine, CopyId
from tierstore.errors import DeviceError, LayoutError
from tierstore.executor.job import Copy, Job
from tierstore.executor.jobs import OpenJobs
from tierstore.metrics import Counters, Metric
from tierstore.transfer import FailureReason, JobId, LoadPart, Offload

__all__ = ["Copies"]

_logger = bounded(logging.getLogger(__name__))


class Copies:
    """Copies under way, each with the job that it is a part of."""

    def __init__(
        self, engine: CopyEngine, jobs: OpenJobs, counters: Counters, chunk_bytes: Sequence[int]
    ) -> None:
        """Submit to `engine`, which stays the caller's; `chunk_bytes` is indexed by group."""
        self._engine = engine
        self._jobs = jobs
        self._counters = counters
        self._chunk_bytes = chunk_bytes
        self._causes = Causes()
        self._copy_ids = itertools.count(1)
        # The lock of the jobs guards what follows.
        self._copies: dict[CopyId, Copy] = {}
        self._submitting_count = 0

    def are_under_way(self) -> bool:
        """Return whether any copy has not ended; the lock is held."""
        return bool(self._copies)

    def mark_compute(self) -> ComputeMark:
        """Return the engine's work so far, for loads that come after it."""
        return self._engine.mark_compute()

    def fence(self, job_ids: Collection[JobId]) -> None:
        """Keep the engine's next step from writing before the copies of these jobs have ended."""
        with self._jobs.lock:
            copy_ids = [c for c, copy in self._copies.items() if copy.job.job_id in job_ids]
        self._engine.fence(tuple(copy_ids))

    def start(self, job: Job, part: Offload | LoadPart, *, urgent: bool = False) -> None:
        """Submit one copy; may run in an I/O thread. A refused one fails its job."""
        copy_id = CopyId(next(self._copy_ids))
        offload_count = len(part.slots) if isinstance(part, Offload) else 0
        with self._jobs.lock:
            self._copies[copy_id] = Copy(job, offload_count)
            job.copies_left += 1
        where = (part.group_idx, part.block_ids, part.slots)
        reason: FailureReason | None = FailureReason.IO_ERROR
        try:
            if isinstance(part, Offload):
                self._engine.submit_offload(copy_id, *where)
            else:
                self._engine.submit_load(copy_id, *where, after=job.after, urgent=urgent)
            reason = None
        except (LayoutError, DeviceError) as error:
            if self._causes.is_new(type(error).__name__):
                _logger.error(
                    "copy refused (others are counted): job=%d cause=%s", job.job_id, error
                )
            reason = FailureReason.LAYOUT if isinstance(error, LayoutError) else reason
        finally:
            if reason is not None:  # a bug, too, ends the copy: its job has to be answered
                with self._jobs.lock:
                    self._end_refused(copy_id, reason)
        if reason is None and isinstance(part, LoadPart):
            count = len(part.slots)
            self._counters.add(Metric.LOADED_CHUNKS, count)
            self._counters.add(Metric.LOADED_BYTES, count * self._chunk_bytes[part.group_idx])

    def send_on(self, job: Job, parts: Iterable[LoadPart]) -> None:
        """Submit copies of slots that an I/O thread has filled, unless the job was abandoned."""
        for part in parts:
            with self._jobs.lock:
                if job.abandoned:
                    return
                # Counted before the lock is dropped: a job with a copy on its way cannot be
                # abandoned, so no copy ever writes to blocks that the engine took back.
                job.copies_left += 1
                self._submitting_count += 1
            try:
                self.start(job, part)
            finally:
                with self._jobs.lock:
                    job.copies_left -= 1
                    self._submitting_count -= 1
                    self._jobs.tell_changed()

    def settle(self) -> None:
        """Take note of the copies that have ended since the last call; never blocks."""
        arrived = self._engine.poll()
        refused = self._engine.take_failed()
        with self._jobs.lock:
            for copy_id in arrived:
                self._copies.pop(copy_id).job.copies_left -= 1
            for copy_id in refused:
                self._end_refused(copy_id, FailureReason.IO_ERROR)

    def wait_until_submitted(self, timeout_seconds: float) -> None:
        """Wait for I/O threads that are submitting a copy right now."""
        with self._jobs.lock:
            self._jobs.wait_until(lambda: not self._submitting_count, timeout_seconds)

    def _end_refused(self, copy_id: CopyId, reason: FailureReason) -> None:
        """Fail what a copy was for; the lock is held."""
        copy = self._copies.pop(copy_id)
        copy.job.copies_left -= 1
        copy.job.ok = False
        copy.job.failed.update(dict.fromkeys(range(copy.offload_count), reason))
