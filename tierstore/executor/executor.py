"""The executor: commands in, copies and I/O tasks out, one answer per command."""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Self

from tierstore.backend.opening import BackendOpener, offer_pool, open_backend
from tierstore.backend.protocol import PoolRegion
from tierstore.bounded_log import bounded
from tierstore.clock import Clock, MonotonicClock
from tierstore.config import StoreConfig
from tierstore.dma.background import SPAWN_MAX
from tierstore.dma.opening import open_copy_engine
from tierstore.dma.protocol import CopyEngine
from tierstore.executor.copies import Copies
from tierstore.executor.job import Job, PartIndex
from tierstore.executor.jobs import OpenJobs
from tierstore.executor.syncing import AfterSync, PendingSync
from tierstore.executor.tasks import IoTasks
from tierstore.executor.tier_io import TierIo
from tierstore.host_pool import HostPool
from tierstore.io_pool import IoPool, run_side_by_side
from tierstore.layout import PAGE_BYTES, CanonicalKVCaches
from tierstore.manifest import Manifest
from tierstore.metrics import Counters
from tierstore.transfer import Command, Demote, JobId, Load, Offload, TransferDone

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

    A command is a job (`OpenJobs`) of copies between GPU and slots (`Copies`) and of tasks between
    slots and records (`IoTasks`), which run in I/O threads.
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
        chunk_bytes = [manifest.chunk_bytes(i) for i in range(len(manifest.groups))]
        self._pool = pool
        self._engine = engine
        self._background = background
        self._tiers = tiers
        self._clock = clock
        self._jobs = OpenJobs()
        self._copies = None if engine is None else Copies(engine, self._jobs, counters, chunk_bytes)
        self._tasks = IoTasks(
            pool,
            self._copies,
            self._jobs,
            clock,
            chunk_bytes=chunk_bytes,
            slot_bytes=[group.slot_bytes for group in manifest.group_specs()],
        )
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
                    background = _open_background(undo)
                engine = open_copy_engine(
                    caches.device,
                    config.gpu,
                    counters=counters,
                    spawn=None if background is None else background.submit_urgent,
                    is_io_under_way=lambda: any(tier.progress.has_tasks for tier in tiers),
                    compute_stream=compute_stream,
                )
                undo.callback(engine.close)
                engine.register(caches, manifest.blocks_per_chunk, pool.address, pool.size_bytes)
            for tier in config.secondary:
                opened = TierIo(
                    tier,
                    manifest,
                    offer_pool(open_backend, PoolRegion(pool.address, pool.size_bytes)),
                    rank=rank,
                    rank_count=rank_count,
                    pool_bytes=pool.size_bytes,
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
        if self._copies is not None and job_ids:
            self._copies.fence(frozenset(job_ids))

    def submit(self, commands: Iterable[Command]) -> None:
        """Start commands; returns at once.

        Offloads read the GPU blocks as of the work that the engine has launched so far, so they
        are submitted after the forward pass, everything else before or after. Loads write their
        blocks after that work, too, and after the offloads fenced before.
        """
        after = None
        for command in commands:
            job = self._jobs.begin(command.job_id)
            if isinstance(command, Offload):
                assert self._copies is not None, "an offload needs registered KV caches"
                self._copies.start(job, command)
            elif isinstance(command, Load):
                if after is None and self._copies is not None:
                    # Now, and not when a record has been read: in the I/O thread the mark would
                    # also cover steps that came later, and the copy would wait for them.
                    after = self._copies.mark_compute()
                job.after = after
                self._start_load(job, command)
            elif isinstance(command, Demote):
                self._tasks.queue_demote(job, self._tiers[command.tier_idx], command)
            else:
                self._tasks.queue_release(job, self._tiers[command.tier_idx], command)

    def poll(self) -> list[TransferDone]:
        """Return the answers that became known; never blocks."""
        if self._copies is not None:
            self._copies.settle()
        return self._jobs.take_answers(self._clock.seconds())

    def wait(self, timeout_seconds: float) -> None:
        """Sleep until an answer is due or time is up; not at all while copies are on their way."""
        with self._jobs.lock:
            is_copying = self._copies is not None and self._copies.are_under_way()
            if not is_copying and not self._jobs.is_any_settled():
                self._jobs.wait(timeout_seconds)

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
        return self._tasks.queue_sync(self._tiers[tier_idx], also)

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
        self._jobs.abandon_all()
        if self._copies is not None:
            self._copies.wait_until_submitted(self._seconds_to(until))
        if self._engine is not None:
            self._engine.close()
        is_idle = self._background is None or self._background.close(self._seconds_to(until))
        are_closed = self._close_tiers([tier for tier in self._tiers if tier not in hung], until)
        if is_idle and not hung:
            if are_closed:  # until then, a backend may have the pool registered with a device
                self._pool.close()
        else:
            # A thread still hangs in its I/O: freeing the memory that it writes to would be worse.
            _logger.error(
                "I/O threads hang at close: their memory stays allocated: tiers=%s",
                ", ".join(tier.config.name for tier in hung),
            )

    def _seconds_to(self, until: float) -> float:
        return max(0.0, until - self._clock.seconds())

    def _close_tiers(self, tiers: Sequence[TierIo], until: float) -> bool:
        """Close backends side by side, in threads of their own; False: one hangs in that, too."""
        closes = [tier.close for tier in tiers]
        are_closed = run_side_by_side(closes, "tierstore-close", self._seconds_to(until))
        if not are_closed:
            _logger.error("payload files hang at close: their threads go on closing them")
        return are_closed

    def _start_load(self, job: Job, load: Load) -> None:
        index = PartIndex(load)
        for part in index.resident_parts():
            assert self._copies is not None, "a load to blocks needs registered KV caches"
            # The whole request is in memory: it does not queue behind what comes from disks.
            self._copies.start(job, part, urgent=not load.promotes)
        first = 0
        for promote in load.promotes:
            self._tasks.queue_promote(job, self._tiers[promote.tier_idx], promote, first, index)
            first += len(promote.keys)


def _open_background(undo: ExitStack) -> IoPool:
    """Start the threads that give the pool its pages.

    On a CPU, too: pages that come as they are used delay each load from disk (490 instead of 90 ms
    for 146 MB). They give way to transfers, and one of them does while others help with a copy:
    so there is one more. An embedded store does without, since it may never fill its memory.
    """
    background = IoPool(SPAWN_MAX + 1, "tierstore-background")
    undo.callback(background.close, _CLOSE_SECONDS)
    background.open()
    return background
