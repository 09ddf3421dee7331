"""Arguments of vLLM's `KVTransferConfig` for tierstore, other connectors, and several at once."""

from pathlib import Path
from typing import Any

__all__ = ["example", "far", "several", "tierstore"]

_MEMORY_ONLY = {"version": 1, "primary": {"capacity": "64MiB"}}


def tierstore(config: dict[str, Any] = _MEMORY_ONLY, **child: Any) -> dict[str, Any]:
    return {
        "kv_connector": "TierStoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tierstore.config": config},
    } | child


def example(folder: Path) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def far(folder: Path, *, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return {
        "kv_connector": "FarConnector",
        "kv_connector_module_path": "far",
        "kv_role": role,
        "kv_connector_extra_config": {"folder": str(folder)} | extra,
    }


def several(*children: dict[str, Any], role: str = "kv_both") -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(children)},
    }
