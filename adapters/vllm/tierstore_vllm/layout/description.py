"""An engine and its KV caches, described once at registration: shape, manifest, byte regions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierstore.config import StoreConfig
from tierstore.errors import ConfigError, LayoutError, ManifestError
from tierstore.layout import CanonicalKVCaches, ChunkOrder, GroupKind
from tierstore.manifest import GroupManifest, Manifest
from tierstore.quoting import named
from tierstore_vllm.identity import describe_identity
from tierstore_vllm.layout.pages import LayerPages, group_pages
from tierstore_vllm.layout.regions import canonicalize
from tierstore_vllm.layout.specs import chunk_order, classify_group, kv_dtypes

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["EngineShape", "WorkerLayout", "describe_engine", "describe_worker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """What the scheduler half must know besides the manifest."""

    hash_block_tokens: int
    """Tokens per entry of `Request.block_hashes`."""
    alignment_tokens: int
    """Hit lengths are multiples of this."""
    rank_count: int
    """Workers that answer every job."""
    draft_groups: frozenset[int] = frozenset()
    """Indices of the groups that vLLM marks as those of an EAGLE or MTP draft model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLayout:
    """One worker's KV caches: whose bytes, and where they are."""

    manifest: Manifest
    caches: CanonicalKVCaches


def describe_engine(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> EngineShape:
    """Read what does not depend on memory; valid in the scheduler process.

    Raises:
        LayoutError: vLLM did not say how finely it hashes blocks.
    """
    hash_block_tokens = kv_cache_config.hash_block_size
    if not hash_block_tokens:
        raise LayoutError("vLLM resolved no hash_block_size: there are no block hashes to cache by")
    return EngineShape(
        hash_block_tokens=hash_block_tokens,
        alignment_tokens=kv_cache_config.cache_hit_alignment_tokens or hash_block_tokens,
        rank_count=vllm_config.parallel_config.world_size,
        draft_groups=frozenset(
            group_idx
            for group_idx, group in enumerate(kv_cache_config.kv_cache_groups)
            if group.is_eagle_group
        ),
    )


def describe_worker(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    config: StoreConfig,
    kv_caches: "Mapping[str, torch.Tensor]",
) -> WorkerLayout:
    """Describe the registered KV caches of this rank.

    One group that cannot be kept makes every hit impossible, so nothing is kept at all then.

    Raises:
        LayoutError: a group cannot be cached; the message says which layer and why.
        ConfigError: the configuration cannot work with this engine; says what to change.
    """
    try:
        return _describe(vllm_config, kv_cache_config, config, kv_caches)
    except (ConfigError, LayoutError):
        raise
    except ManifestError as error:
        raise LayoutError(str(error)) from error
    except Exception as error:  # whatever vLLM's objects raise when they are not as expected
        raise LayoutError(
            f"the KV caches are not as vLLM 0.32 and 0.33 describe them: {named(error)}"
        ) from error


def _describe(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    config: StoreConfig,
    kv_caches: "Mapping[str, torch.Tensor]",
) -> WorkerLayout:
    if not kv_cache_config.kv_cache_groups:
        raise LayoutError("the model has no KV cache")
    groups: list[GroupManifest] = []
    pages_of_group: list[list[LayerPages]] = []
    order = chunk_order(kv_cache_config.kv_cache_layout)
    context_shards = vllm_config.parallel_config.decode_context_parallel_size
    for group_idx, group in enumerate(kv_cache_config.kv_cache_groups):
        kind, window_tokens = classify_group(group_idx, group)
        pages = group_pages(group, kv_cache_config.num_blocks, kv_caches)
        if order is ChunkOrder.BLOCK_MAJOR:
            pages.sort(key=lambda layer: layer.addresses)
        spec = group.kv_cache_spec
        groups.append(
            GroupManifest(
                kind=kind,
                tokens_per_block=spec.block_size * (context_shards if spec.dcp_sharded else 1),
                layer_names=tuple(layer.layer_name for layer in pages),
                page_bytes=tuple(layer.page_bytes for layer in pages),
                window_tokens=window_tokens,
            )
        )
        pages_of_group.append(pages)
    _check_chunks(config, groups)
    signatures = (sorted({layer.signature for layer in pages}) for pages in pages_of_group)
    identity = describe_identity(vllm_config)
    manifest = Manifest(
        engine=identity.engine,
        model=identity.model,
        revision=identity.revision,
        kv_dtype=kv_dtypes(kv_cache_config),
        quantization=identity.quantization,
        layout=kv_cache_config.kv_cache_layout or "",
        chunk_order=order,
        blocks_per_chunk=config.offload.blocks_per_chunk,
        hash_algorithm=identity.hash_algorithm,
        hash_seed=identity.hash_seed,
        parallel_shape=identity.parallel_shape,
        groups=tuple(groups),
        extra=tuple(
            sorted(
                (
                    *identity.extra,
                    ("hash_block_tokens", str(kv_cache_config.hash_block_size)),
                    ("pages", "|".join(",".join(names) for names in signatures)),
                )
            )
        ),
    )
    device = next(iter(kv_caches.values())).device
    caches = canonicalize(pages_of_group, kv_cache_config.num_blocks, order, str(device))
    return WorkerLayout(manifest=manifest, caches=caches)


def _check_chunks(config: StoreConfig, groups: Sequence[GroupManifest]) -> None:
    """Refuse chunks of several blocks where a block is a state: only its last one exists."""
    if config.offload.blocks_per_chunk > 1 and any(g.kind is GroupKind.STATE for g in groups):
        raise ConfigError(
            f"offload.blocks_per_chunk: a model with mamba or linear attention layers needs 1, "
            f"got {config.offload.blocks_per_chunk}"
        )
