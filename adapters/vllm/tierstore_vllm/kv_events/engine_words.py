"""What vLLM calls things in its events; not every version has each of the names."""

import importlib
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from tierstore.bounded_log import bounded
from tierstore.config import StoreConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["EventGroup", "describe_event_groups", "optional_name"]

_logger = bounded(logging.getLogger(__name__))


class EventGroup(NamedTuple):
    """What events say of a KV cache group, in vLLM's words."""

    kind: str | None = None
    window_tokens: int | None = None


def optional_name(module: str, name: str) -> Any:
    """Return a name of vLLM that not every version has."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def describe_event_groups(
    config: StoreConfig, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig"
) -> tuple[EventGroup, ...] | None:
    """Return what events say of each KV cache group; None: no events are wanted."""
    if not config.offload.events:
        return None
    publisher = vllm_config.kv_events_config
    if publisher is None or not publisher.enable_kv_cache_events:
        _logger.warning(
            "offload.events is true, but vLLM publishes no events: give it --kv-events-config with "
            "enable_kv_cache_events"
        )
        return None
    kind = optional_name("vllm.v1.kv_cache_interface", "get_kv_cache_spec_kind")
    window = optional_name("vllm.v1.kv_cache_interface", "get_kv_cache_spec_sliding_window")
    return tuple(
        EventGroup(kind(group.kv_cache_spec).value, window(group.kv_cache_spec))
        if kind and window
        else EventGroup()
        for group in kv_cache_config.kv_cache_groups
    )
