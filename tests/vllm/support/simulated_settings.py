"""What a simulated engine is made of: layers, vLLM's configuration, the allocation, the tiers."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from allocation import Specs, attention, make_vllm_config, planning, state, window
from simulated_runner import Speculation
from vllm.config import KVTransferConfig
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

__all__ = [
    "BLOCK_TOKENS",
    "DRAFT_LAYER",
    "FAMILIES",
    "EngineMemory",
    "EngineSettings",
    "make_engine_config",
    "tier_config",
]

BLOCK_TOKENS = 4
LENGTH_MAX = 96
DRAFT_LAYER = "z_draft.0"
_PAGE_BYTES = 512


FAMILIES = {
    "full": ("a.0", "a.1"),
    "windows": ("a.0", "w.0"),
    "wide windows": ("a.0", "n.0"),
    "states": ("a.0", "s.0"),
    "all": ("a.0", "s.0", "w.0"),
}
"""Layers by name: attention, window, one with narrow heads (of larger blocks then), state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """One engine."""

    family: str
    is_async: bool = False
    speculation: Speculation = field(default_factory=Speculation)
    window_tokens: int = 9
    block_count: int = 60
    step_tokens_max: int = 24
    running_max: int = 5
    retention: int | None = None
    """vLLM's `prefix_cache_retention_interval`: None keeps every state in the GPU's cache."""
    layout: str = "LBHNC"
    peer_chance: float = 0.0
    peer_is_sync: bool = False
    reserves_all: bool = True


def _layers(settings: "EngineSettings") -> Specs:
    names = FAMILIES[settings.family]
    if settings.speculation.has_draft_layers:
        names += (DRAFT_LAYER,)
    return {name: _layer(name[0], settings) for name in names}


def _layer(letter: str, settings: "EngineSettings") -> Any:
    sizes = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1}
    if letter == "s":
        return state(
            _PAGE_BYTES,
            block_size=BLOCK_TOKENS,
            shapes=((5, 8), (2, 4, 8)),
            num_speculative_blocks=settings.speculation.token_count,
        )
    if letter in "wn":
        head_size = 16 if letter == "n" else 32
        return window(**sizes, head_size=head_size, sliding_window=settings.window_tokens)
    return attention(**sizes)


class EngineMemory:
    """KV caches as vLLM's `EngineCore` plans and allocates them."""

    def __init__(self, vllm_config: Any, settings: EngineSettings) -> None:
        register_all_kvcache_specs(vllm_config)
        layers = _layers(settings)
        layout = KVCacheLayout[settings.layout]
        groups = planning.get_kv_cache_groups(vllm_config, dict(layers))
        block_bytes = planning._get_kv_cache_bytes_per_block(groups, layout)
        self.worker = planning.get_kv_cache_config_from_groups(
            vllm_config, groups, block_bytes * settings.block_count
        )
        self.worker.kv_cache_layout = settings.layout
        self.scheduler = planning.generate_scheduler_kv_cache_config([self.worker])
        self.block_tokens, self.hash_tokens = kv_cache_utils.resolve_kv_cache_block_sizes(
            self.scheduler, vllm_config
        )
        alignment = kv_cache_utils.resolve_cache_hit_alignment_tokens(
            self.scheduler, vllm_config, self.block_tokens, self.hash_tokens
        )
        for config in (self.worker, self.scheduler):
            config.hash_block_size = self.hash_tokens
            config.cache_hit_alignment_tokens = alignment
        self.views = allocate_kv_cache(self.worker, torch.device("cpu"), layout, None)


def make_engine_config(settings: EngineSettings, config: dict[str, Any]) -> Any:
    """Only what the scheduler reads, beside what the connector and the allocation do."""
    made = make_vllm_config(KVCacheLayout[settings.layout])
    speculation = settings.speculation
    has_states = "s.0" in FAMILIES[settings.family]
    vars(made.cache_config).update(
        block_size=BLOCK_TOKENS,
        num_gpu_blocks=settings.block_count,
        enable_prefix_caching=True,
        mamba_cache_mode="align" if has_states else "none",
        enable_mamba_shared_prefix_checkpoint=False,
        prefix_match_unit=None,
        prefix_cache_retention_interval=settings.retention,
    )
    vars(made.scheduler_config).update(
        max_num_seqs=settings.running_max,
        max_num_active_seqs=None,
        max_num_batched_tokens=settings.step_tokens_max,
        max_num_scheduled_tokens=None,
        long_prefill_token_threshold=0,
        long_prefill_token_threshold_adaptive=False,
        policy="fcfs",
        watermark=0.0,
        enable_chunked_prefill=True,
        scheduler_reserve_full_isl=settings.reserves_all,
        async_scheduling=settings.is_async,
    )
    vars(made.model_config).update(
        uses_mrope=False,
        is_encoder_decoder=False,
        max_model_len=LENGTH_MAX,
        runner_type="generate",
        is_diffusion=False,
        supports_multimodal_inputs=False,
        return_sampling_mask=False,
    )
    vars(made.parallel_config).update(
        data_parallel_index=0, rank=0, world_size=1, distributed_executor_backend="uni"
    )
    batches = 2 if settings.is_async else 1
    vars(made).update(
        max_concurrent_batches=batches,
        max_in_flight_tokens=batches * settings.step_tokens_max,
        num_speculative_tokens=speculation.token_count,
        num_lookahead_tokens=speculation.token_count if speculation.has_draft_layers else 0,
        num_prefill_lookahead_tokens=1 if speculation.has_draft_layers else 0,
        speculative_config=_make_speculative(speculation),
        use_v2_model_runner=False,
        is_mm_encoder_only=False,
        kv_events_config=None,
        ec_transfer_config=None,
        ec_manager_config=SimpleNamespace(get_encoder_cache_manager_obj=lambda: None),
        aux_output_config=SimpleNamespace(enabled=False),
        observability_config=SimpleNamespace(
            kv_cache_metrics=False,
            per_request_spec_decode_metrics=None,
            enable_mfu_metrics=False,
            enable_logging_iteration_details=False,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="SharedConnector",
            kv_connector_module_path="simulated_peer",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"tierstore.config": config},
        ),
    )
    return made


def _make_speculative(speculation: Speculation) -> Any:
    if not speculation.token_count:
        return None
    has_layers = speculation.has_draft_layers
    return SimpleNamespace(
        method="mtp" if has_layers else "ngram",
        draft_model_config=None,
        num_speculative_tokens=speculation.token_count,
        num_speculative_tokens_per_batch_size=None,
        max_num_new_slots_for_drafting=0,
        use_eagle=lambda: has_layers,
        use_eagle_block_drop=lambda: has_layers,
        use_dspark=lambda: False,
        use_dflash=lambda: False,
        uses_draft_model=lambda: False,
    )


def tier_config(folder: Path | None, *, memory: str, blocks_per_chunk: int) -> dict[str, Any]:
    """Configure tierstore: memory alone, or a disk below it."""
    config: dict[str, Any] = {
        "version": 1,
        "primary": {"capacity": memory, "pinned": "never"},
        "offload": {"blocks_per_chunk": blocks_per_chunk},
    }
    if folder is not None:
        config["secondary"] = [
            {
                "name": "disk",
                "backend": "file",
                "path": str(folder),
                "capacity": "8MiB",
                "io": {"mode": "buffered", "threads": 3},
            }
        ]
    return config
