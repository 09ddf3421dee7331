"""tierstore keeps the KV cache of an LLM inference engine in pinned host memory and on disk.

Public is what `__all__` names here: it changes with a new minor version at most, and the changelog
says so. So are the keys of the configuration, the names of metrics, and what `tierstore.testing`
offers to the tests of plug-ins. Everything else may change in any release.
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
    from tierstore.config import StoreConfig, load_config
    from tierstore.embedded.answers import PrefixMatch, StoreStats
    from tierstore.embedded.store import TierStore
    from tierstore.manifest import Manifest
else:
    # The tiers are most of what there is to import: who only names chunks does without.
    _MODULE_BY_NAME = {
        "Manifest": "tierstore.manifest",
        "PrefixMatch": "tierstore.embedded.answers",
        "StoreConfig": "tierstore.config",
        "StoreStats": "tierstore.embedded.answers",
        "TierStore": "tierstore.embedded.store",
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
    "BackendBusyError",
    "BackendError",
    "BackendFullError",
    "CatalogError",
    "ClosedError",
    "ConfigError",
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
    "__version__",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "get_offload_namespace",
    "load_config",
    "make_offload_key",
    "make_offload_keys",
]
