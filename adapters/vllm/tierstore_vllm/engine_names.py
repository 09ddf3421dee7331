"""Which vLLM the adapter can work with: one that has the names it needs, whatever its number.

A check of the version would refuse releases that work, and accept forks that do not.
"""

import importlib
import logging
from collections.abc import Mapping

from tierstore.bounded_log import bounded
from tierstore.errors import ConfigError

__all__ = [
    "LORA_NAMES",
    "NEEDED_NAMES",
    "PLUGIN_NAMES",
    "TESTED_VERSIONS",
    "check_engine",
    "missing_names",
]

_logger = bounded(logging.getLogger(__name__))

TESTED_VERSIONS = ("0.32", "0.33")

_SPEC_FIELDS = ("block_size", "dcp_sharded", "prefix_cacheable", "state_content_size_bytes")

NEEDED_NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "vllm": {"__version__": (), "envs": ()},
    "vllm.config": {
        "AttentionConfig": ("indexer_kv_dtype",),
        "CacheConfig": ("cache_dtype", "prefix_caching_hash_algo"),
        "CompilationConfig": ("static_forward_context",),
        "KVEventsConfig": ("enable_kv_cache_events",),
        "KVTransferConfig": (
            "engine_id",
            "kv_connector_extra_config",
            "kv_load_failure_policy",
            "kv_role",
        ),
        "LoadConfig": ("load_format",),
        "ModelConfig": (
            "code_revision",
            "dtype",
            "hf_config",
            "hf_config_path",
            "max_model_len",
            "model",
            "model_class_overrides",
            "model_impl",
            "model_weights",
            "multimodal_config",
            "quantization",
            "quantization_config",
            "revision",
            "seed",
        ),
        "ParallelConfig": (
            "cp_kv_cache_interleave_size",
            "decode_context_parallel_size",
            "distributed_executor_backend",
            "pipeline_parallel_size",
            "prefill_context_parallel_size",
            "rank",
            "tensor_parallel_size",
            "world_size",
        ),
        "SpeculativeConfig": ("draft_model_config", "method"),
        "VllmConfig": (
            "attention_config",
            "cache_config",
            "compilation_config",
            "kv_events_config",
            "kv_transfer_config",
            "load_config",
            "lora_config",
            "max_concurrent_batches",
            "model_config",
            "parallel_config",
            "speculative_config",
        ),
    },
    "vllm.distributed.kv_events": {
        "BlockRemoved": ("block_hashes", "group_idx", "medium"),
        "BlockStored": (
            "block_hashes",
            "block_size",
            "group_idx",
            "lora_id",
            "lora_name",
            "medium",
            "parent_block_hash",
            "token_ids",
        ),
        "KVCacheEvent": (),
        "MEDIUM_CPU": (),
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        "KVConnectorBase_V1": (
            "build_connector_meta",
            "build_connector_worker_meta",
            "build_kv_connector_stats",
            "build_prom_metrics",
            "get_external_cache_hit_sources",
            "get_kv_connector_stats",
            "get_num_new_matched_tokens",
            "get_required_kvcache_layout",
            "get_transfer_results",
            "handle_preemptions",
            "has_pending_push_work",
            "on_new_request",
            "register_kv_caches",
            "requires_kv_delivery",
            "requires_piecewise_for_cudagraph",
            "reset_cache",
            "save_kv_layer",
            "set_xfer_handshake_metadata_pp_aware",
            "shutdown",
            "start_load_kv",
            "take_events",
            "update_connector_output",
            "update_state_after_alloc",
            "wait_for_layer_load",
            "wait_for_save",
        ),
        "KVConnectorMetadata": (),
        "KVConnectorRole": ("WORKER", "SCHEDULER"),
        "KVConnectorTransferResults": ("finished_recving", "failed_recving"),
        "KVConnectorWorkerMetadata": ("aggregate",),
        "SupportsHMA": ("request_finished_all_groups",),
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": {
        "KVConnectorPromMetrics": ("observe",),
        "KVConnectorStats": ("aggregate", "data", "is_empty", "reduce", "reset"),
    },
    "vllm.v1.core.kv_cache_manager": {"KVCacheBlocks": ("blocks",)},
    "vllm.v1.core.kv_cache_utils": {
        "BlockHash": (),
        "KVCacheBlock": ("block_hash", "block_id"),
        "maybe_convert_block_hash": (),
    },
    "vllm.v1.core.sched.output": {
        "CachedRequestData": (
            "new_block_ids",
            "num_computed_tokens",
            "req_ids",
            "resumed_req_ids",
        ),
        "NewRequestData": ("block_ids", "num_computed_tokens", "req_id"),
        "SchedulerOutput": (
            "kv_cache_block_copies",
            "kv_connector_block_state",
            "num_scheduled_tokens",
            "preempted_req_ids",
            "scheduled_cached_reqs",
            "scheduled_new_reqs",
        ),
    },
    "vllm.v1.kv_cache_interface": {
        "ChunkedLocalAttentionSpec": (*_SPEC_FIELDS, "attention_chunk_size"),
        "FullAttentionSpec": (
            *_SPEC_FIELDS,
            "dtype",
            "kv_quant_mode",
            "non_causal",
            "unpadded_page_size_bytes",
        ),
        "KVCacheConfig": (
            "cache_hit_alignment_tokens",
            "hash_block_size",
            "kv_cache_groups",
            "kv_cache_layout",
            "num_blocks",
        ),
        "KVCacheGroupSpec": (
            "enable_kv_transfer",
            "host_resident",
            "is_eagle_group",
            "kv_cache_spec",
            "layer_names",
        ),
        "MLAAttentionSpec": (),
        "MambaSpec": (*_SPEC_FIELDS, "dtypes", "mamba_cache_mode", "shapes"),
        "SinkFullAttentionSpec": (),
        "SlidingWindowMLASpec": (),
        "SlidingWindowSpec": (*_SPEC_FIELDS, "extra_retained_tokens", "sliding_window"),
        "UniformTypeKVCacheSpecs": ("kv_cache_specs",),
        "iter_layer_specs": (),
    },
    "vllm.v1.kv_cache_layout": {"KVCacheLayout": ("is_block_outermost",)},
    "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": ("DISK", "HOST")},
    "vllm.v1.outputs": {
        "KVConnectorOutput": ("invalid_block_ids", "kv_connector_worker_meta"),
    },
    "vllm.v1.request": {
        "Request": (
            "all_token_ids",
            "block_hashes",
            "kv_transfer_params",
            "lora_request",
            "num_computed_tokens",
            "num_prompt_tokens",
            "num_tokens",
            "request_id",
            "skip_reading_prefix_cache",
        ),
    },
}
"""Per module of vLLM: what the connector imports, and what it uses of it.

After a change, run `scripts/vllm_names.py`: it records which tested version has what.
"""

LORA_NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "vllm.config": {
        "LoRAConfig": (
            "enable_mixed_moe_lora_format",
            "enable_moe_shared_loras",
            "enable_tower_connector_lora",
            "fully_sharded_loras",
            "lora_dtype",
            "target_modules",
        ),
    },
    "vllm.lora.request": {
        "LoRARequest": (
            "is_3d_lora_weight",
            "load_inplace",
            "lora_int_id",
            "lora_name",
            "lora_path",
        ),
    },
    "vllm.lora.worker_manager": {
        "LRUCacheWorkerLoRAManager": ("_load_adapter", "add_adapter", "list_adapters"),
    },
}
"""The same for requests with a LoRA adapter; without these names they are not cached."""

PLUGIN_NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "vllm.distributed.kv_transfer.kv_connector.factory": {
        "KVConnectorFactory": ("register_connector",)
    },
}
"""The same for launching by the connector's name; without these names, its module path is given."""


def check_engine() -> None:
    """Refuse a vLLM that lacks what the connector needs; warn of one it was not tested with.

    Raises:
        ConfigError: names what is missing and which versions have it.
    """
    from vllm import __version__ as version

    missing = missing_names(NEEDED_NAMES)
    tested = " and ".join(TESTED_VERSIONS)
    if missing:
        raise ConfigError(
            f"vLLM {version} cannot run TierStoreConnector, it lacks {', '.join(missing)}; "
            f"install vLLM {tested}, or a release of tierstore that knows vLLM {version}"
        )
    if ".".join(version.split(".")[:2]) not in TESTED_VERSIONS:
        _logger.warning(
            "tierstore is tested with vLLM %s; %s has everything it needs, continuing",
            tested,
            version,
        )


def missing_names(names: Mapping[str, Mapping[str, tuple[str, ...]]]) -> list[str]:
    """Return which of such names the installed vLLM lacks."""
    return [
        f"{module}.{name}"
        for module, classes in names.items()
        for name in _missing(module, classes)
    ]


def _missing(module_name: str, classes: Mapping[str, tuple[str, ...]]) -> list[str]:
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return list(classes)
    missing: list[str] = []
    for name, attributes in classes.items():
        found = getattr(module, name, None)
        if found is None:
            missing.append(name)
            continue
        known = _own_names(found) if attributes else set()
        missing += [f"{name}.{a}" for a in attributes if a not in known and not hasattr(found, a)]
    return missing


def _own_names(found: object) -> set[str]:
    """Name what objects of a class have although the class itself does not."""
    code = getattr(getattr(found, "__init__", None), "__code__", None)
    set_by_constructor = () if code is None else code.co_names  # among others
    return {*getattr(found, "__dataclass_fields__", ()), *set_by_constructor}
