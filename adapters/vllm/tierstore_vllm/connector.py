"""`TierStoreConnector`: vLLM's hooks on one side, the two halves on the other.

vLLM makes one connector in each worker and one beside the scheduler, perhaps in the same process;
they share nothing but messages. The hooks only pass on, and the halves raise nothing into the
engine: what fails is logged, and vLLM computes what it would have computed without a cache.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tierstore.bounded_log import bounded
from tierstore.config import StoreConfig, load_config
from tierstore.errors import ConfigError
from tierstore.quoting import quoted
from tierstore_vllm.identity import check_block_hashes
from tierstore_vllm.local import local_workers
from tierstore_vllm.messages import StepMetadata, WorkerReport
from tierstore_vllm.opening import Opening
from tierstore_vllm.stats import TierStorePromMetrics, TierStoreStats
from tierstore_vllm.worker import WorkerHalf

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from tierstore_vllm.scheduler import SchedulerHalf

__all__ = ["TierStoreConnector"]

_logger = bounded(logging.getLogger(__name__))

_CONFIG_KEY = "tierstore.config"


class TierStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps vLLM's KV blocks in host memory and on disk."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        """Read the configuration; both roles do, since they may be different processes.

        Raises:
            ConfigError: the configuration cannot work; the message says what to change.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        transfer_config = vllm_config.kv_transfer_config
        self._config = _load_store_config(transfer_config)
        check_block_hashes(vllm_config, self._config)
        self._worker: WorkerHalf | None = None
        self._scheduler: SchedulerHalf | None = None
        self._opening = Opening(vllm_config, kv_cache_config, self._config)
        if role is KVConnectorRole.WORKER:
            self._worker = WorkerHalf(vllm_config, kv_cache_config, self._config)
        elif transfer_config.kv_load_failure_policy == "fail":
            _logger.warning(
                "kv_load_failure_policy is 'fail': a chunk that is lost ends its request with an "
                "error; set it to 'recompute'"
            )

    # Class level: what vLLM asks before it builds anything.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str:
        """Prefer pages that are one contiguous run per layer; vLLM may decide otherwise.

        In the spelling of vLLM's own connectors: `MultiConnector` compares it letter by letter.
        """
        return "LBHNC"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return False: nothing happens inside the forward pass."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TierStoreStats:
        """Wrap sums that came from another process."""
        return TierStoreStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TierStorePromMetrics:
        """Register the Prometheus counters."""
        return TierStorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: a chunk that was not offloaded is a later miss, nothing worse."""
        return False

    @property
    def supports_eagle_prefix_cache_hashing(self) -> bool:
        """Return False: another kind of block hashes would change every key.

        vLLM after 0.33 asks; 0.33 keeps the old hashes wherever there is a connector.
        """
        return False

    # Worker role.

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Describe the KV caches and open this rank's data plane.

        Raises:
            ConfigError: the configuration cannot work; the message says what to change.
        """
        worker = self._worker_half
        worker.register(kv_caches)
        engine_id = str(self._vllm_config.kv_transfer_config.engine_id)
        local_workers.add(engine_id, self._config, worker)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Wait for offloads that read blocks which this step writes."""
        self._worker_half.fence(_step(kv_connector_metadata))

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Start loads, demotes and releases."""
        self._worker_half.start_transfers(_step(self._get_connector_metadata()))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: requests run only after their loads are complete."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: blocks are offloaded after the forward pass."""

    def wait_for_save(self) -> None:
        """Start the offloads of blocks that this step fills; does not wait for them."""
        self._worker_half.start_offloads(_step(self._get_connector_metadata()))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Name the requests whose loads have ended since the last call."""
        return self._worker_half.take_results()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Return the answers to the scheduler's commands."""
        return self._worker_half.take_report()

    def unregister_kv_caches(self) -> None:
        """Finish what reads or writes the KV caches before they are unmapped."""
        self._worker_half.suspend()

    # Scheduler role.

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: "dict[tuple[int, int], KVConnectorHandshakeMetadata]"
    ) -> None:
        """Open the control plane at once if the worker lives in this process.

        vLLM calls this before the first request, when its workers have registered their KV caches.
        The metadata is for other connectors: of several, vLLM passes on that of one.

        Raises:
            ConfigError: the configuration cannot work; the message says what to change.
        """
        if self._scheduler is None:  # vLLM calls this again when it wakes from sleep
            self._scheduler = self._opening.open_local()

    def on_new_request(self, request: "Request") -> None:
        """Get to know a request."""
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)
        else:
            self._opening.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded beyond the local ones; None: ask again."""
        if self._scheduler is None:
            return (None, False) if self._opening.is_awaited() else (0, False)
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Plan the load into the blocks that were allocated for it."""
        if self._scheduler is not None:
            self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Split loaded tokens into those from host memory and those from disk."""
        if self._scheduler is None:
            return {}
        return self._scheduler.get_external_cache_hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        """Plan this step's transfers."""
        if self._scheduler is None:
            return self._opening.build_connector_meta(scheduler_output)
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Take the workers' answers."""
        report = connector_output.kv_connector_worker_meta
        if self._scheduler is None:
            if isinstance(report, WorkerReport):
                self._scheduler = self._opening.take(report)
            return
        if connector_output.invalid_block_ids:
            self._scheduler.drop_offloads()  # before the answers, which would publish them
        if isinstance(report, WorkerReport):
            self._scheduler.take_report(report)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks may be freed at once."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks may be freed at once, a fence guards those being read."""
        if self._scheduler is not None:
            self._scheduler.request_finished(request, block_ids)
        else:
            self._opening.request_finished(request.request_id)
        return False, None

    def take_events(self) -> "Iterable[KVCacheEvent]":
        """Return what came to the tiers and what left them since the last call, for listeners."""
        return () if self._scheduler is None else self._scheduler.take_events()

    def has_pending_push_work(self) -> bool:
        """Keep the engine stepping while answers are outstanding."""
        if self._scheduler is None:
            return self._opening.is_awaited()
        return self._scheduler.has_work()

    def reset_cache(self) -> bool:
        """Forget all cached chunks."""
        if self._scheduler is not None:
            return self._scheduler.reset_cache()
        self._opening.reset_cache()
        return True

    # Both roles.

    def get_kv_connector_stats(self) -> TierStoreStats | None:
        """Return what was counted since the last call."""
        if self._worker is not None:
            return self._worker.take_stats()
        return self._scheduler.take_stats() if self._scheduler is not None else None

    def shutdown(self) -> None:
        """Finish what was accepted and close; idempotent."""
        if self._worker is not None:
            local_workers.discard(self._worker)
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    @property
    def _worker_half(self) -> WorkerHalf:
        assert self._worker is not None, "a worker hook was called on the scheduler's connector"
        return self._worker


def _load_store_config(transfer_config: "KVTransferConfig") -> StoreConfig:
    """Load the one key that `kv_connector_extra_config` has."""
    if transfer_config.kv_role != "kv_both":
        raise ConfigError(
            f"kv_role: expected 'kv_both', since tierstore both offloads and loads, "
            f"got {quoted(transfer_config.kv_role)}"
        )
    extra = transfer_config.kv_connector_extra_config
    source = extra.get(_CONFIG_KEY)
    if len(extra) != 1 or not isinstance(source, str | Mapping):
        # Another key is a slip or another connector's: what it asks for would not happen.
        raise ConfigError(
            f"kv_connector_extra_config: expected the one key {_CONFIG_KEY!r} with the path of a "
            f"YAML file or the same mapping inline, got {quoted(extra)}"
        )
    return load_config(source)


def _step(metadata: KVConnectorMetadata) -> StepMetadata:
    assert isinstance(metadata, StepMetadata), type(metadata)
    return metadata
