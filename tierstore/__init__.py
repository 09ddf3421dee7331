"""tierstore keeps the KV cache of an LLM inference engine in pinned host memory and on disk."""

from tierstore.config import load_config
from tierstore.errors import TierStoreError
from tierstore.key import (
    OffloadKey,
    get_offload_block_hash,
    get_offload_group_idx,
    get_offload_namespace,
    make_offload_key,
    make_offload_keys,
)
from tierstore.manifest import Manifest
from tierstore.store import PrefixMatch, StoreStats, TierStore

__all__ = [
    "Manifest",
    "OffloadKey",
    "PrefixMatch",
    "StoreStats",
    "TierStore",
    "TierStoreError",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "get_offload_namespace",
    "load_config",
    "make_offload_key",
    "make_offload_keys",
]
