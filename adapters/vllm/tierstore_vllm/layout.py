"""vLLM's KV cache configuration in tierstore's words: identity, groups, byte regions."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierstore.config import StoreConfig
from tierstore.layout import CanonicalKVCaches
from tierstore.manifest import Manifest

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


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLayout:
    """One worker's KV caches: whose bytes, and where they are."""

    manifest: Manifest
    caches: CanonicalKVCaches


def describe_engine(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> EngineShape:
    """Read what does not depend on memory; valid in the scheduler process."""
    raise NotImplementedError


def describe_worker(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    config: StoreConfig,
    kv_caches: "dict[str, torch.Tensor]",
) -> WorkerLayout:
    """Describe the registered KV caches of this rank.

    Raises:
        LayoutError: a group cannot be cached; the message says which and why.
        ConfigError: the configuration cannot work with this engine; says what to change.
    """
    raise NotImplementedError
