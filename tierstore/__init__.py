"""tierstore keeps the KV cache of an LLM inference engine in pinned host memory and on disk.

Public is what `__all__` names here: it changes with a new minor version at most, and the changelog
says so. That holds for the calls of `TierStore` and `AsyncTierStore`, what they answer, the errors
that they name, and the types of their arrays (`ChunkRows`, `WritableChunkRows`, `CpuTensor`):
these may come to accept more. Public are also the keys of the configuration, the names of metrics,
and what `tierstore.testing` offers to the tests of plug-ins. All other names are private, whether
they begin with an underscore or not, and may change in any release.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from tierstore.errors import (
    BackendBusyError,
    BackendError,
    BackendFullError,
    CatalogError,
    ClosedError,
    ConfigError,
    LayoutError,
    ManifestError,
    MissingExtraError,
    PromptError,
    ReentryError,
    TierStoreError,
)
from tierstore.key import (
    OffloadKey,
    get_offload_block_hash,
    get_offload_group_idx,
    get_offload_namespace,
    make_offload_key,
    make_offload_keys,
)

if TYPE_CHECKING:
    from tierstore.arrays import ChunkRows, CpuTensor, WritableChunkRows
    from tierstore.config import StoreConfig, load_config
    from tierstore.embedded.answers import PrefixMatch, StoreStats
    from tierstore.embedded.async_store import AsyncTierStore
    from tierstore.embedded.store import TierStore
    from tierstore.manifest import Manifest
else:
    # The tiers are most of what there is to import: who only names chunks does without.
    _MODULE_BY_NAME = {
        "AsyncTierStore": "tierstore.embedded.async_store",
        "ChunkRows": "tierstore.arrays",
        "CpuTensor": "tierstore.arrays",
        "Manifest": "tierstore.manifest",
        "PrefixMatch": "tierstore.embedded.answers",
        "StoreConfig": "tierstore.config",
        "StoreStats": "tierstore.embedded.answers",
        "TierStore": "tierstore.embedded.store",
        "WritableChunkRows": "tierstore.arrays",
        "load_config": "tierstore.config",
    }

    def __getattr__(name: str) -> object:
        if name not in _MODULE_BY_NAME:
            raise AttributeError(f"module 'tierstore' has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(_MODULE_BY_NAME[name]), name)
        return found

    def __dir__() -> list[str]:
        return sorted(globals().keys() | _MODULE_BY_NAME)


__version__ = "0.1.0"

__all__ = [
    "AsyncTierStore",
    "BackendBusyError",
    "BackendError",
    "BackendFullError",
    "CatalogError",
    "ChunkRows",
    "ClosedError",
    "ConfigError",
    "CpuTensor",
    "LayoutError",
    "Manifest",
    "ManifestError",
    "MissingExtraError",
    "OffloadKey",
    "PrefixMatch",
    "PromptError",
    "ReentryError",
    "StoreConfig",
    "StoreStats",
    "TierStore",
    "TierStoreError",
    "WritableChunkRows",
    "__version__",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "get_offload_namespace",
    "load_config",
    "make_offload_key",
    "make_offload_keys",
]
