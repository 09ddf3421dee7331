"""The executor: commands in, copies and I/O tasks out, one answer per command."""

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Self

from tierstore.backend.failure import take_cause
from tierstore.backend.opening import BackendOpener, PoolRegion, open_backend
from tierstore.backend.protocol import Backend
from tierstore.bounded_log import Causes, bounded
from tierstore.clock import Clock, MonotonicClock
from tierstore.config import StoreConfig
from tierstore.dma.gpu.pinning import SPAWN_MAX
from tierstore.dma.opening import open_copy_engine
from tierstore.dma.protocol import CopyEngine, CopyId
from tierstore.errors import BackendError, DeviceError, LayoutError
from tierstore.executor.job import Copy, Job, PartIndex, RecordSpan, split_spans
from tierstore.executor.progress import SpanRead
from tierstore.executor.syncing import AfterSync, PendingSync
from tierstore.executor.tier_io import TierIo
from tierstore.io_pool import IoPool, run_side_by_side
from tierstore.layout import PAGE_BYTES, CanonicalKVCaches
from tierstore.manifest import Manifest
from tierstore.memory import HostPool
from tierstore.metrics import Counters, Metric
from tierstore.transfer import (
    Command,
    Demote,
    FailureReason,
    JobId,
    Load,
    LoadPart,
    Offload,
    Promote,
    Release,
    TransferDone,
)

__all__ = ["TransferExecutor"]

_logger = bounded(logging.getLogger(__name__))

_CLOSE_SECONDS = 15.0
_MOMENT_SHARE = 0.25
_CLOSE_MOMENT_SECONDS = 1.0
"""Of the time of a close, so much is for what comes after the threads of the tiers."""


class TransferExecutor:
    """Owns the pinned pool, the copy engine, the backends and the I/O threads of one rank.

    One thread calls it (the worker's main thread). Every command is answered by `poll` or `drain`,
    whatever happens to its bytes (see `TransferDone`).

    A job's tasks run in I/O threads. A task that has filled slots submits their copies to the GPU
    itself, so that the copy of one batch overlaps the read of the next.
    """

    def __init__(
        self,
        *,
        manifest: Manifest,
        pool: HostPool,
        engine: CopyEngine | None,
        background: IoPool | None,
        tiers: list[TierIo],
        counters: Counters,
        clock: Clock,
    ) -> None:
        """Take over the parts; use `open`."""
        self._chunk_bytes = [manifest.chunk_bytes(i) for i in range(len(manifest.groups))]
        self._slot_bytes = [group.slot_bytes for group in manifest.group_specs()]
        self._pool = pool
        self._engine = engine
        self._background = background
        self._tiers = tiers
        self._counters = counters
        self._clock = clock
        self._copy_ids = itertools.count(1)
        self._causes = Causes()
        # Guards what follows: tasks report from their threads. An interruption cannot keep a lock
        # from being left, as it can a condition, which is left by a function in Python.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._jobs: dict[JobId, Job] = {}
        self._copies: dict[CopyId, Copy] = {}
        self._submitting_count = 0  # I/O threads that are submitting a copy right now
        self._closed = False

    @classmethod
    def open(
        cls,
        config: StoreConfig,
        manifest: Manifest,
        *,
        rank: int,
        rank_count: int,
        caches: CanonicalKVCaches | None,
        counters: Counters,
        compute_stream: Callable[[], int] | None = None,
        open_backend: BackendOpener = open_backend,
        clock: Clock | None = None,
    ) -> Self:
        """Allocate the pool, open the backends, start the I/O threads.

        A backend that cannot be opened is logged once; commands answer `IO_ERROR` until it can.
        `caches` is None for embedded use: no GPU blocks, only slots. Else the pool gets its pages
        in the background, on a GPU pinned; `compute_stream` returns the `cudaStream_t` on which
        the calling thread launches the engine's work (None: the default stream). `clock` measures
        the progress of reads; tests give their own.

        Raises:
            LayoutError: the copy engine cannot address the caches.
            MissingExtraError: the caches are on a GPU and CuPy is not installed.
            DeviceError: the GPU refused what the copy engine needs.
        """
        pool = HostPool(
            config.primary.capacity_bytes // PAGE_BYTES * PAGE_BYTES,
            huge_pages=config.primary.huge_pages,
            hugetlb=config.primary.hugetlb,
        )
        engine = background = None
        tiers: list[TierIo] = []
        with ExitStack() as undo:
            if caches is not None:
                if config.primary.pinned == "auto":
                    background = IoPool(SPAWN_MAX, "tierstore-background")
                    undo.callback(background.close, _CLOSE_SECONDS)
                    background.open()
                engine = open_copy_engine(
                    caches.device,
                    config.gpu,
                    counters=counters,
                    spawn=None if background is None else background.submit_read,
                    compute_stream=compute_stream,
                )
                undo.callback(engine.close)
                engine.register(caches, manifest.blocks_per_chunk, pool.address, pool.size_bytes)
            for tier in config.secondary:
                opened = TierIo(
                    tier,
                    manifest,
                    open_backend,
                    rank=rank,
                    rank_count=rank_count,
                    pool=PoolRegion(pool.address, pool.size_bytes),
                )
                undo.callback(opened.backend.close)
                undo.callback(opened.pool.close, _CLOSE_SECONDS)
                tiers.append(opened)
            undo.pop_all()
        return cls(
            manifest=manifest,
            pool=pool,
            engine=engine,
            background=background,
            tiers=tiers,
            counters=counters,
            clock=clock or MonotonicClock(),
        )

    def fence(self, job_ids: tuple[JobId, ...]) -> None:
        """Keep the engine's next step from writing before these offloads have left the GPU."""
        if self._engine is not None and job_ids:
            wanted = set(job_ids)
            with self._lock:
                copy_ids = [c for c, copy in self._copies.items() if copy.job.job_id in wanted]
            self._engine.fence(tuple(copy_ids))

    def submit(self, commands: Iterable[Command]) -> None:
        """Start commands; returns at once.

        Offloads read the GPU blocks as of the work that the engine has launched so far, so they
        are submitted after the forward pass, everything else before or after. Loads write their
        blocks after that work, too, and after the offloads fenced before.
        """
        after = None
        for command in commands:
            job = Job(command.job_id)
            with self._lock:
                self._jobs[command.job_id] = job
            if isinstance(command, Offload):
                assert self._engine is not None, "an offload needs registered KV caches"
                self._start_copy(job, command, self._engine)
            elif isinstance(command, Load):
                if after is None and self._engine is not None:
                    after = self._engine.mark_compute()
                job.after = after
                self._start_load(job, command)
            elif isinstance(command, Demote):
                self._start_demote(job, command)
            else:
                self._start_release(job, command)

    def poll(self) -> list[TransferDone]:
        """Return the answers that became known; never blocks."""
        arrived = self._engine.poll() if self._engine is not None else []
        refused = self._engine.take_failed() if self._engine is not None else []
        answers: list[TransferDone] = []
        with self._lock:
            for copy_id in arrived:
                self._copies.pop(copy_id).job.copies_left -= 1
            for copy_id in refused:
                self._end_refused_copy(copy_id, FailureReason.IO_ERROR)
            now = self._clock.seconds()
            overdue = [job for job in self._jobs.values() if job.is_overdue(now)]
            for job in overdue:
                job.abandon()
            answers += [job.late() for job in overdue if not job.is_settled()]
            settled = [job for job in self._jobs.values() if job.is_settled()]
            for job in settled:
                del self._jobs[job.job_id]
                answers.append(job.done())
        return answers

    def wait(self, timeout_seconds: float) -> None:
        """Sleep until a task reports or time is up; not at all while copies are on their way."""
        with self._lock:
            if not self._copies and not any(job.is_settled() for job in self._jobs.values()):
                self._changed.wait(timeout_seconds)

    def drain(self, timeout_seconds: float) -> list[TransferDone]:
        """Wait until every submitted command is answered or time is up; return the answers."""
        until = self._clock.seconds() + timeout_seconds
        answers = self.poll()
        while self._jobs and self._clock.seconds() < until:
            self.wait(0.01)
            answers += self.poll()
        return answers

    @property
    def pool(self) -> HostPool:
        """The slots' memory; the slot with number s starts at s * PAGE_BYTES."""
        return self._pool

    def begin_sync(self, tier_idx: int, also: AfterSync) -> PendingSync:
        """Flush a tier's payload to its device, then call `also`, in a thread of the tier."""
        tier, sync = self._tiers[tier_idx], PendingSync()
        tier.pool.submit_write(partial(self._sync, tier.backend, also, sync))
        return sync

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Finish what was accepted, stop the threads, free the pool; idempotent.

        Returns after about `timeout_seconds`, whatever hangs. Afterwards no copy writes to the
        engine's blocks, even if a thread hangs in its read.
        """
        if self._closed:
            return
        self._closed = True
        until = self._clock.seconds() + timeout_seconds
        stops_at = until - min(timeout_seconds * _MOMENT_SHARE, _CLOSE_MOMENT_SECONDS)
        for tier in self._tiers:
            tier.pool.begin_close()
        hung = [tier for tier in self._tiers if not tier.pool.close(self._seconds_to(stops_at))]
        self._stop_copies(self._seconds_to(until))
        if self._engine is not None:
            self._engine.close()
        is_idle = self._background is None or self._background.close(self._seconds_to(until))
        self._close_tiers([tier for tier in self._tiers if tier not in hung], until)
        if is_idle and not hung:
            self._pool.close()
        else:
            # A thread still hangs in its I/O: freeing the memory that it writes to would be worse.
            _logger.error(
                "I/O threads hang at close: their memory stays allocated: tiers=%s",
                ", ".join(tier.config.name for tier in hung),
            )

    def _seconds_to(self, until: float) -> float:
        return max(0.0, until - self._clock.seconds())

    def _close_tiers(self, tiers: Sequence[TierIo], until: float) -> None:
        """Close backends side by side, in threads of their own: one may hang in that, too."""
        closes = [tier.close for tier in tiers]
        if not run_side_by_side(closes, "tierstore-close", self._seconds_to(until)):
            _logger.error("payload files hang at close: their threads go on closing them")

    def _start_load(self, job: Job, load: Load) -> None:
        index = PartIndex(load)
        for part in index.resident_parts():
            assert self._engine is not None, "a load to blocks needs registered KV caches"
            # The whole request is in memory: it does not queue behind what comes from disks.
            self._start_copy(job, part, self._engine, urgent=not load.promotes)
        first = 0
        for promote in load.promotes:
            self._start_promote(job, promote, first, index)
            first += len(promote.keys)

    def _start_promote(self, job: Job, promote: Promote, first: int, index: PartIndex) -> None:
        """Queue the reads of a promote; its keys have the indices from `first` in the job."""
        tier = self._tiers[promote.tier_idx]
        chunk_bytes = self._chunk_bytes[promote.group_idx]
        threads = tier.config.io.threads
        spans = split_spans(promote, first, chunk_bytes, threads, tier.held_bytes_max)
        with self._lock:
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
                    tier.pool.submit_read(task)

    def _start_demote(self, job: Job, demote: Demote) -> None:
        tier = self._tiers[demote.tier_idx]
        chunk_bytes = self._chunk_bytes[demote.group_idx]
        spans = split_spans(demote, 0, chunk_bytes, tier.config.io.threads)
        with self._lock:
            self._accept(job, tier, len(spans))
        for span in spans:
            tier.pool.submit_write(partial(self._write, job, tier, demote.owner, span))

    def _start_release(self, job: Job, release: Release) -> None:
        tier = self._tiers[release.tier_idx]
        with self._lock:
            self._accept(job, tier, 1)
        tier.pool.submit_write(partial(self._release, job, tier, release))

    def _accept(self, job: Job, tier: TierIo, task_count: int) -> None:
        """Count tasks that are about to be queued; the lock is held."""
        job.tasks_left += task_count
        now = self._clock.seconds()
        for _ in range(task_count):
            tier.progress.accept(now)

    def _start_copy(
        self, job: Job, part: Offload | LoadPart, engine: CopyEngine, *, urgent: bool = False
    ) -> None:
        """Submit one copy; may run in an I/O thread."""
        copy_id = CopyId(next(self._copy_ids))
        offload_count = len(part.slots) if isinstance(part, Offload) else 0
        with self._lock:
            self._copies[copy_id] = Copy(job, offload_count)
            job.copies_left += 1
        where = (part.group_idx, part.block_ids, part.slots)
        reason: FailureReason | None = FailureReason.IO_ERROR
        try:
            if isinstance(part, Offload):
                engine.submit_offload(copy_id, *where)
            else:
                engine.submit_load(copy_id, *where, after=job.after, urgent=urgent)
            reason = None
        except (LayoutError, DeviceError) as error:
            if self._causes.is_new(type(error).__name__):
                _logger.error(
                    "copy refused (others are counted): job=%d cause=%s", job.job_id, error
                )
            reason = FailureReason.LAYOUT if isinstance(error, LayoutError) else reason
        finally:
            if reason is not None:  # a bug, too, ends the copy: its job has to be answered
                with self._lock:
                    self._end_refused_copy(copy_id, reason)
        if reason is None and isinstance(part, LoadPart):
            count = len(part.slots)
            self._counters.add(Metric.LOADED_CHUNKS, count)
            self._counters.add(Metric.LOADED_BYTES, count * self._chunk_bytes[part.group_idx])

    def _end_refused_copy(self, copy_id: CopyId, reason: FailureReason) -> None:
        """Fail what a copy was for; the lock is held."""
        copy = self._copies.pop(copy_id)
        copy.job.copies_left -= 1
        copy.job.ok = False
        copy.job.failed.update(dict.fromkeys(range(copy.offload_count), reason))

    def _read(self, job: Job, tier: TierIo, span: RecordSpan, index: PartIndex) -> None:
        """Fill slots and send them on to the GPU (in an I/O thread)."""
        if not self._begin_read(job, tier, span):
            return
        failed = span.all_failed()
        try:
            failed = tier.backend.read(span.records(self._pool.array.data, self._slot_bytes))
            if self._engine is not None:
                self._send_on(job, index.parts_of(span.slots_without(failed)), self._engine)
        finally:
            self._end_task(job, tier, span, failed)
            with self._lock:
                self._leave_gate(tier, span)

    def _held_bytes(self, span: RecordSpan) -> int:
        return span.record_count * self._slot_bytes[span.command.group_idx]

    def _leave_gate(self, tier: TierIo, span: RecordSpan) -> None:
        """Let the next reads begin; the lock is held."""
        for task in tier.gate.end(self._held_bytes(span)):
            tier.pool.submit_read(task)

    def _begin_read(self, job: Job, tier: TierIo, span: RecordSpan) -> bool:
        """Note that a read has its turn; False: it was given up, its slots are somebody else's."""
        with self._lock:
            now = self._clock.seconds()
            read = job.reads.get(span.indices.start)
            if read is None:
                tier.progress.end(now)
                self._leave_gate(tier, span)
                return False
            tier.progress.begin(now)
            read.began_at = now
            return True

    def _send_on(self, job: Job, parts: list[LoadPart], engine: CopyEngine) -> None:
        for part in parts:
            with self._lock:
                if job.abandoned:
                    return
                # Counted before the lock is dropped: a job with a copy on its way cannot be
                # abandoned, so no copy ever writes to blocks that the engine took back.
                job.copies_left += 1
                self._submitting_count += 1
            try:
                self._start_copy(job, part, engine)
            finally:
                with self._lock:
                    job.copies_left -= 1
                    self._submitting_count -= 1
                    self._changed.notify_all()

    def _stop_copies(self, timeout_seconds: float) -> None:
        """Let no thread start another copy to the engine's blocks."""
        with self._lock:
            for job in self._jobs.values():
                job.abandoned = True
            self._changed.wait_for(lambda: not self._submitting_count, timeout_seconds)

    def _write(self, job: Job, tier: TierIo, owner: int, span: RecordSpan) -> None:
        """Write slots to records (in an I/O thread)."""
        failed = span.all_failed()
        self._begin_write(tier)
        try:
            failed = tier.write(owner, span.records(self._pool.array.data, self._slot_bytes))
        finally:
            if failed:
                job.cause = take_cause() or job.cause
            self._end_task(job, tier, span, failed)

    def _release(self, job: Job, tier: TierIo, release: Release) -> None:
        reason: FailureReason | None = FailureReason.IO_ERROR
        self._begin_write(tier)
        try:
            reason = tier.backend.release(release.runs, release.empty_segments)
        finally:
            with self._lock:
                job.ok = reason is None
                job.cause = "" if job.ok else take_cause()
                job.tasks_left -= 1
                tier.progress.end(self._clock.seconds())
                self._changed.notify_all()

    def _sync(self, backend: Backend, also: AfterSync, sync: PendingSync) -> None:
        """Flush one tier to its device (in an I/O thread)."""
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
            with self._lock:
                sync.why = why
                sync.is_done = True
                self._changed.notify_all()

    def _begin_write(self, tier: TierIo) -> None:
        take_cause()  # of something that came before
        with self._lock:
            tier.progress.begin(self._clock.seconds())

    def _end_task(
        self, job: Job, tier: TierIo, span: RecordSpan, failed: dict[int, FailureReason]
    ) -> None:
        indices = span.indices
        with self._lock:
            job.failed.update({indices[i]: reason for i, reason in failed.items()})
            job.reads.pop(indices.start, None)  # a demote has none
            job.tasks_left -= 1
            tier.progress.end(self._clock.seconds())
            self._changed.notify_all()
