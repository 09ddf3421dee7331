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
from tierstore.transfer import Command, FailureReason, Offload
from tierstore_vllm.layout import WorkerLayout, describe_worker
from tierstore_vllm.lora.watch import LoraWatch
from tierstore_vllm.messages import AdapterClaim, StepMetadata, WorkerHello, WorkerReport
from tierstore_vllm.stats import StatsSource, TierStoreStats
from tierstore_vllm.worker.open_commands import OpenCommands

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
        self._open = OpenCommands(vllm_config.max_concurrent_batches)
        self._watch: LoraWatch | None = None
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
        job_ids = tuple(job for job in step.plan.fence_job_ids if job in self._open)
        if job_ids:
            self._guard("fence", lambda executor: executor.fence(job_ids))

    def start_transfers(self, step: StepMetadata) -> None:
        """Submit everything but the offloads; take over the requests that wait for loads."""
        if step.is_empty():  # as most are
            return
        self._open.await_loads(step.load_requests)
        self._open.fail_requests(step.failed_requests)
        if step.asks_for_hello:
            self._open.report.hellos[self._vllm_config.parallel_config.rank] = self._hello
        if step.asks_for_adapters and self._watch is not None:
            self._watch.tell_all()
        refused = {job for job, claim in step.claims.items() if not self._holds(claim)}
        self._submit(
            c for c in step.plan.commands if not isinstance(c, Offload) and c.job_id not in refused
        )
        for command in step.plan.commands:
            if command.job_id in refused:
                # Its chunks were computed with other weights of its request's adapter.
                self._open.refuse(command, FailureReason.OUTDATED)

    def _holds(self, claim: AdapterClaim) -> bool:
        return self._watch is not None and self._watch.holds(claim)

    def start_offloads(self, step: StepMetadata) -> None:
        """Submit the offloads of blocks that this step's forward pass fills."""
        self._submit(c for c in step.plan.commands if isinstance(c, Offload))

    def _submit(self, commands: Iterable[Command]) -> None:
        accepted = list(commands)
        if not accepted:
            return
        self._open.accept(accepted)
        if self._executor is None:
            self._open.fail_all()
        else:
            self._guard("submit", lambda executor: executor.submit(accepted))

    def take_results(self) -> KVConnectorTransferResults:
        """Collect the answers that became known; name the loads among them by request."""
        if self._open:
            self._guard("poll", lambda executor: self._open.answer(executor.poll()))
        return self._open.take_results()

    def take_report(self) -> WorkerReport | None:
        """Return the answers for the scheduler half; None when there are none."""
        if self._watch is not None:
            self._open.report.adapter_uses += self._watch.take()
        return self._open.take_report()

    @property
    def recent_reports(self) -> Sequence[WorkerReport]:
        """The reports of the last steps, as many as vLLM may not have looked at yet."""
        return self._open.recent_reports

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
        self._open.answer(executor.drain(DRAIN_SECONDS))
        copying_count = self._open.count_copying()
        if copying_count:
            raise DeviceError(f"{copying_count} transfers of the KV caches do not end before sleep")

    def close(self) -> None:
        """Finish what was accepted and stop, within a bounded time; idempotent."""
        until = time.monotonic() + DRAIN_SECONDS
        before_close, self.before_close = self.before_close, _nothing
        before_close()
        seconds = max(0.0, until - time.monotonic())
        self._guard("drain", lambda executor: self._open.answer(executor.drain(seconds)))
        self._guard("close", lambda executor: executor.close(_CLOSE_SECONDS))
        if self._watch is not None:
            self._watch.close()
        self._executor = None

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
            self._open.fail_all()

    def _abandon(self, executor: TransferExecutor) -> None:
        """Stop the executor before its jobs are declared failed.

        From then on vLLM gives their blocks to others, and no copy may write to them any more. Also
        if a thread hangs in its I/O, `close` lets it start no copy.
        """
        try:
            executor.close(_ABANDON_SECONDS)
        except Exception:  # as above; the executor is given up anyway
            _logger.exception("executor could not be closed")
        self._open.report.has_given_up = True


def _nothing() -> None:
    """Do nothing."""


def _current_stream() -> int:
    """Return the `cudaStream_t` on which this thread launches its steps."""
    import torch

    return int(torch.cuda.current_stream().cuda_stream)
