"""The worker half: brings each step's commands to the executor and the answers back.

    handle_preemptions    fence: blocks that vLLM will write again must have been read
    start_load_kv         loads, demotes, releases: they touch no block of a running request
    wait_for_save         offloads: the forward pass that fills their blocks is launched
    get_transfer_results  answers; finished loads by request
    build_connector_worker_meta  answers, for the scheduler half

Nothing that fails here reaches the engine. A load is reported as finished exactly once in any case,
since vLLM keeps its request waiting until then.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from tierstore.bounded_log import bounded
from tierstore.config import StoreConfig
from tierstore.errors import ConfigError, DeviceError, LayoutError, TierStoreError
from tierstore.executor import TransferExecutor
from tierstore.manifest import Manifest
from tierstore.metrics import Counters
from tierstore.quoting import named
from tierstore.tier.opening import check_tiers
from tierstore.transfer import (
    Command,
    Demote,
    FailureReason,
    JobId,
    Load,
    Offload,
    Release,
    TransferDone,
)
from tierstore_vllm.layout import WorkerLayout, describe_worker
from tierstore_vllm.lora.watch import LoraWatch
from tierstore_vllm.messages import (
    AdapterClaim,
    RankAnswer,
    StepMetadata,
    WorkerHello,
    WorkerReport,
)
from tierstore_vllm.stats import StatsSource, TierStoreStats

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["DRAIN_SECONDS", "WorkerHalf"]

_logger = bounded(logging.getLogger(__name__))

DRAIN_SECONDS = 22.0
"""How long sleep and shutdown wait for what was accepted. With what comes after it, the shutdown of
both halves takes 30 seconds at most, whatever hangs."""

_CLOSE_SECONDS = 3.0
"""How long a shutdown waits for I/O threads and payload files after that."""

_ABANDON_SECONDS = 2.0
"""How long the engine's step waits, once, for the transfers of an executor that is given up."""

_WAIT_SECONDS = 0.001


class WorkerHalf:
    """One rank's data plane behind vLLM's worker hooks. One thread."""

    def __init__(
        self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", config: StoreConfig
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._counters = Counters()
        self._stats: StatsSource | None = StatsSource(self._counters)
        self._executor: TransferExecutor | None = None
        self._hello = WorkerHello(None, "vLLM registered no KV caches")
        self._open_jobs: dict[JobId, Command] = {}
        self._load_requests: dict[JobId, str] = {}
        self._watch: LoraWatch | None = None
        self._late_jobs: set[JobId] = set()
        """Open jobs whose first answer said that they are late."""
        self._results = KVConnectorTransferResults()
        self._report = WorkerReport()
        self._recent_reports: deque[WorkerReport] = deque(maxlen=vllm_config.max_concurrent_batches)
        self.before_close: Callable[[], None] = _nothing
        """What the scheduler half of the same process has to do first."""

    def register(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Describe the KV caches and open the executor.

        A layout that cannot be cached, a GPU that refuses what copies need, or whatever vLLM's
        objects raise leaves this rank without an executor; `hello` says why.

        Raises:
            ConfigError: the configuration cannot work with this engine; says what to change.
            MissingExtraError: the KV caches are on a GPU and CuPy is not installed.
        """
        try:
            layout = describe_worker(
                self._vllm_config, self._kv_cache_config, self._config, kv_caches
            )
            self._check_tiers(layout.manifest)
            self._executor = self._open_executor(layout)
            self._open_watch()
        except (LayoutError, DeviceError) as error:
            self._hello = WorkerHello(None, str(error))
        except TierStoreError:
            raise
        except Exception as error:  # the outermost frame below the engine
            _logger.exception("KV caches could not be described, this rank caches nothing")
            self._hello = WorkerHello(None, f"a worker failed: {named(error)}")
            executor, self._executor = self._executor, None
            if executor is not None:
                executor.close()
        else:
            self._hello = WorkerHello(layout.manifest)

    def _check_tiers(self, manifest: Manifest) -> None:
        """Find out what cannot work before the first request, while the engine can still refuse.

        In one process the scheduler half opens the tiers before that anyway. Elsewhere it learns
        the manifest in the engine's first step.
        """
        parallel = self._vllm_config.parallel_config
        if parallel.rank or parallel.distributed_executor_backend == "uni":
            return
        try:
            check_tiers(self._config, manifest, rank_count=parallel.world_size)
        except ConfigError:
            raise
        except TierStoreError as error:
            _logger.debug("tiers cannot be opened, as the scheduler will say: cause=%s", error)

    def _open_watch(self) -> None:
        lora_config = self._vllm_config.lora_config
        if lora_config is not None:
            self._watch = LoraWatch(lora_config, self._vllm_config.parallel_config.rank)
            self._watch.open()

    def _open_executor(self, layout: WorkerLayout) -> TransferExecutor:
        parallel = self._vllm_config.parallel_config
        return TransferExecutor.open(
            self._config,
            layout.manifest,
            rank=parallel.rank,
            rank_count=parallel.world_size,
            caches=layout.caches,
            counters=self._counters,
            compute_stream=_current_stream if layout.caches.device != "cpu" else None,
        )

    @property
    def hello(self) -> WorkerHello:
        """What the scheduler half must know before it can plan anything."""
        return self._hello

    def fence(self, step: StepMetadata) -> None:
        """Keep this step from writing to blocks that are still being offloaded."""
        job_ids = tuple(job for job in step.plan.fence_job_ids if job in self._open_jobs)
        if job_ids:
            self._guard("fence", lambda executor: executor.fence(job_ids))

    def start_transfers(self, step: StepMetadata) -> None:
        """Submit everything but the offloads; take over the requests that wait for loads."""
        if step.is_empty():  # as most are
            return
        self._load_requests.update(step.load_requests)
        self._results.finished_recving.update(step.failed_requests)
        self._results.failed_recving.update(step.failed_requests)
        if step.asks_for_hello:
            self._report.hellos[self._vllm_config.parallel_config.rank] = self._hello
        if step.asks_for_adapters and self._watch is not None:
            self._watch.tell_all()
        refused = {job for job, claim in step.claims.items() if not self._holds(claim)}
        self._submit(
            c for c in step.plan.commands if not isinstance(c, Offload) and c.job_id not in refused
        )
        for command in step.plan.commands:
            if command.job_id in refused:
                self._refuse(command)

    def _holds(self, claim: AdapterClaim) -> bool:
        return self._watch is not None and self._watch.holds(claim)

    def _refuse(self, command: Command) -> None:
        """Fail a load whose chunks were computed with other weights of its request's adapter."""
        self._open_jobs[command.job_id] = command
        self._answer([_failure(command, FailureReason.OUTDATED)])

    def start_offloads(self, step: StepMetadata) -> None:
        """Submit the offloads of blocks that this step's forward pass fills."""
        self._submit(c for c in step.plan.commands if isinstance(c, Offload))

    def _submit(self, commands: Iterable[Command]) -> None:
        accepted = list(commands)
        if not accepted:
            return
        self._open_jobs.update((command.job_id, command) for command in accepted)
        if self._executor is None:
            self._fail_open_jobs()
        else:
            self._guard("submit", lambda executor: executor.submit(accepted))

    def take_results(self) -> KVConnectorTransferResults:
        """Collect the answers that became known; name the loads among them by request."""
        if self._open_jobs:
            self._guard("poll", lambda executor: self._answer(executor.poll()))
        results, self._results = self._results, KVConnectorTransferResults()
        return results

    def take_report(self) -> WorkerReport | None:
        """Return the answers for the scheduler half; None when there are none."""
        if self._watch is not None:
            self._report.adapter_uses += self._watch.take()
        report = self._report
        if report.is_empty():
            return None
        self._report = WorkerReport()
        self._recent_reports.append(report)
        return report

    @property
    def recent_reports(self) -> Sequence[WorkerReport]:
        """The reports of the last steps, as many as vLLM may not have looked at yet."""
        return tuple(self._recent_reports)

    def wait(self) -> None:
        """Wait a moment for the next answer."""
        self._guard("wait", lambda executor: executor.wait(_WAIT_SECONDS))

    def take_stats(self) -> TierStoreStats | None:
        """Return what was counted since the last call."""
        if self._stats is None:
            return None
        try:
            return self._stats.take()
        except Exception:  # the outermost frame below the engine
            _logger.exception("statistics failed, this rank reports none any more")
            self._stats = None
            return None

    def suspend(self) -> None:
        """Finish what is under way before vLLM unmaps the KV caches (sleep mode); idempotent.

        A copy to or from the KV caches that does not end costs this rank its cache: it would
        touch unmapped memory, so the executor is given up. Waking up needs nothing: vLLM's own
        allocator maps the KV caches to the same addresses again.
        """
        self._guard("suspend", self._finish_copies)

    def _finish_copies(self, executor: TransferExecutor) -> None:
        self._answer(executor.drain(DRAIN_SECONDS))
        copying = [
            job_id
            for job_id, command in self._open_jobs.items()
            # A load whose deadline passed copies nothing any more.
            if isinstance(command, Load | Offload) and job_id not in self._late_jobs
        ]
        if copying:
            raise DeviceError(f"{len(copying)} transfers of the KV caches do not end before sleep")

    def close(self) -> None:
        """Finish what was accepted and stop, within a bounded time; idempotent."""
        until = time.monotonic() + DRAIN_SECONDS
        before_close, self.before_close = self.before_close, _nothing
        before_close()
        seconds = max(0.0, until - time.monotonic())
        self._guard("drain", lambda executor: self._answer(executor.drain(seconds)))
        self._guard("close", lambda executor: executor.close(_CLOSE_SECONDS))
        if self._watch is not None:
            self._watch.close()
        self._executor = None

    def _answer(self, dones: Iterable[TransferDone]) -> None:
        for done in dones:
            answer = RankAnswer.of(done, again=done.job_id in self._late_jobs)
            self._report.add(done.job_id, answer)
            if answer.settled_count:
                del self._open_jobs[done.job_id]
                self._late_jobs.discard(done.job_id)
            else:
                self._late_jobs.add(done.job_id)
            request_id = self._load_requests.pop(done.job_id, None)
            if request_id is not None:
                self._results.finished_recving.add(request_id)
                if not done.ok:
                    self._results.failed_recving.add(request_id)

    def _guard(self, what: str, call: Callable[[TransferExecutor], None]) -> None:
        """Run one call of the executor; should it raise, go on without a cache."""
        if self._executor is None:
            return
        try:
            call(self._executor)
        except Exception:  # the outermost frame below the engine
            _logger.exception("executor failed, this rank caches no more: call=%s", what)
            executor, self._executor = self._executor, None
            self._abandon(executor)
            self._fail_open_jobs()

    def _abandon(self, executor: TransferExecutor) -> None:
        """Stop the executor before its jobs are declared failed.

        From then on vLLM gives their blocks to others, and no copy may write to them any more. Also
        if a thread hangs in its I/O, `close` lets it start no copy.
        """
        try:
            executor.close(_ABANDON_SECONDS)
        except Exception:  # as above; the executor is given up anyway
            _logger.exception("executor could not be closed")
        self._report.has_given_up = True

    def _fail_open_jobs(self) -> None:
        """Answer every command, and report every load that a request waits for, just once."""
        for job_id, command in self._open_jobs.items():
            again = job_id in self._late_jobs
            answer = RankAnswer.of(_failure(command, FailureReason.CLOSED), again=again)
            self._report.add(job_id, answer)
        self._results.finished_recving.update(self._load_requests.values())
        self._results.failed_recving.update(self._load_requests.values())
        self._open_jobs.clear()
        self._late_jobs.clear()
        self._load_requests.clear()


def _nothing() -> None:
    """Do nothing."""


def _current_stream() -> int:
    """Return the `cudaStream_t` on which this thread launches its steps."""
    import torch

    return int(torch.cuda.current_stream().cuda_stream)


def _failure(command: Command, reason: FailureReason) -> TransferDone:
    """Answer a command that was never carried out."""
    match command:
        case Offload():
            chunk_count = len(command.slots)
        case Demote():
            chunk_count = len(command.keys)
        case Load():
            # One without promotes has no chunk that could be lost: the first stands for the load.
            chunk_count = max(1, sum(len(promote.keys) for promote in command.promotes))
        case Release():
            chunk_count = 0
    failed = dict.fromkeys(range(chunk_count), reason)
    return TransferDone(job_id=command.job_id, ok=False, failed=failed)
