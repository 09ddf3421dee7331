"""Observes which weights a worker really computes with when a request names a LoRA adapter.

vLLM gives a connector an adapter's name and path, but not its weights. The files do not identify
them either: a worker reads them when it first needs them, drops the weights when it needs the room,
reads the files again, or is told to reload them under the same name. So each rank wraps the two
methods of vLLM's LoRA manager that do all of this, and digests the loaded weights in memory. A
digest of the files, taken by the scheduler, would not show when a worker read them.
"""

import functools
import logging
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from tierstore.bounded_log import bounded
from tierstore.quoting import named
from tierstore_vllm.engine_names import LORA_NAMES, missing_names
from tierstore_vllm.messages import Adapter, AdapterClaim, AdapterUse

if TYPE_CHECKING:
    from vllm.config import LoRAConfig
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

__all__ = ["ADAPTER_COUNT_MAX", "LoraWatch", "digest_adapter", "file_states"]

_logger = bounded(logging.getLogger(__name__))

ADAPTER_COUNT_MAX = 4096
"""Adapters that a rank reports; requests of further ones are not cached."""

_UNKNOWN = b""

_CONFIG_NAMES = (
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
    "fully_sharded_loras",
    "lora_dtype",
    "target_modules",
)
"""Settings that determine how an adapter's weights affect the KV cache."""

_FileStates = tuple[tuple[str | int, ...], ...]


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The adapter that was last loaded under one `lora_int_id`."""

    adapter: Adapter
    digest: bytes
    files: _FileStates | None
    """Their states before and after reading; None: they changed, or there are no local files."""


class LoraWatch:
    """One rank's adapters. Called in the thread that loads them and takes the engine's steps."""

    def __init__(self, lora_config: "LoRAConfig", rank: int) -> None:
        self._config = lora_config
        self._rank = rank
        self._manager: LRUCacheWorkerLoRAManager | None = None
        self._loaded: dict[int, _Loaded] = {}
        self._told: dict[Adapter, tuple[int, bytes]] = {}
        """The id under which each adapter was last used, and its last reported digest."""
        self._uses: list[AdapterUse] = []
        self._logged: set[str] = set()
        """Classes of exceptions from digests that were already logged."""

    def open(self) -> None:
        """Start watching, before the engine can be asked to load an adapter."""
        if self._config.enable_tower_connector_lora:
            # vLLM caches an adapter's image embeddings by the adapter's name only.
            _logger.warning("requests of LoRA adapters are not cached: enable_tower_connector_lora")
            return
        missing = missing_names(LORA_NAMES)
        if missing:
            _logger.warning(
                "requests of LoRA adapters are not cached: vLLM lacks %s", ", ".join(missing)
            )
            return
        _wrap_manager()
        _watches.add(self)

    def close(self) -> None:
        """Stop watching; idempotent."""
        _watches.discard(self)

    def take(self) -> list[AdapterUse]:
        """Return the reports since the last call."""
        uses, self._uses = self._uses, []
        return uses

    def tell_all(self) -> None:
        """Report every adapter again: the scheduler half has forgotten earlier reports."""
        self._uses += [
            AdapterUse(self._rank, adapter, digest) for adapter, (_, digest) in self._told.items()
        ]

    def holds(self, claim: AdapterClaim) -> bool:
        """Return whether a request of this adapter will be computed with the weights it claims.

        Weights in memory are known. Dropped ones will be read again, so the files must be
        unchanged; this is checked by a stat of each.
        """
        loaded = self._loaded.get(claim.lora_int_id)
        if loaded is None or loaded.digest != claim.digests.get(self._rank):
            return False
        if self._manager is not None and claim.lora_int_id in self._manager.list_adapters():
            return True
        is_same = loaded.files is not None and loaded.files == file_states(claim.adapter.path)
        return is_same and loaded.adapter == claim.adapter

    def watches(self, manager: "LRUCacheWorkerLoRAManager") -> bool:
        """Return whether this manager belongs to the watch's engine; a process may have several."""
        return manager.lora_config is self._config

    def on_load(
        self,
        manager: "LRUCacheWorkerLoRAManager",
        request: "LoRARequest",
        model: "LoRAModel",
        files: _FileStates | None,
    ) -> None:
        """Take note that `model` was read for `request`; `files` are the states before reading."""
        adapter = Adapter.of(request)
        digest = _UNKNOWN
        try:
            digest = digest_adapter(request, model, self._config)
        except Exception as error:  # noqa: BLE001 - must not fail vLLM's step
            self._log(adapter, error)
        if files != file_states(adapter.path):
            files = None
        self._manager = manager
        self._loaded.pop(request.lora_int_id, None)
        self._loaded[request.lora_int_id] = _Loaded(adapter, digest, files)
        while len(self._loaded) > ADAPTER_COUNT_MAX:
            del self._loaded[next(iter(self._loaded))]
        # Requests that run under this id continue with the new weights, under any adapter name.
        others = [other for other, (i, _) in self._told.items() if i == request.lora_int_id]
        for told in {adapter, *others}:
            self._tell(told, request.lora_int_id, digest)

    def _log(self, adapter: Adapter, error: Exception) -> None:
        cause = type(error).__name__
        if cause not in self._logged:
            self._logged.add(cause)
            _logger.warning(
                "requests of a LoRA adapter are not cached: name=%s cause=%s "
                "(further ones of this kind are not logged)",
                adapter.name,
                named(error),
            )

    def on_use(self, request: "LoRARequest") -> None:
        """Take note that a request of this adapter is about to be computed."""
        adapter = Adapter.of(request)
        loaded = self._loaded.get(request.lora_int_id)
        if loaded is not None:
            self._tell(adapter, request.lora_int_id, loaded.digest)
        elif adapter in self._told:  # excludes the dummy adapters of vLLM's warm-up
            self._tell(adapter, request.lora_int_id, _UNKNOWN)

    def _tell(self, adapter: Adapter, lora_int_id: int, digest: bytes) -> None:
        if adapter not in self._told and len(self._told) == ADAPTER_COUNT_MAX:
            return
        _, told = self._told.get(adapter, (0, None))
        self._told[adapter] = lora_int_id, digest
        if told != digest:
            self._uses.append(AdapterUse(self._rank, adapter, digest))


def digest_adapter(request: "LoRARequest", model: "LoRAModel", config: "LoRAConfig") -> bytes:
    """Return a digest of everything that determines a loaded adapter's effect; 16 bytes.

    Covers every attribute that vLLM gives an adapter and its layers, except the adapter's number.

    Raises:
        TypeError: an attribute has an unknown type.
    """
    digest = xxhash.xxh3_128()
    _feed(digest, {name: getattr(config, name, None) for name in _CONFIG_NAMES})
    _feed(digest, bool(request.is_3d_lora_weight))
    _feed(digest, {name: value for name, value in vars(model).items() if name != "id"})
    return digest.digest()


def _feed(digest: "xxhash.xxh3_128", value: object) -> None:
    """Feed a value to a digest, encoded so that different values give different bytes."""
    import torch

    kind = type(value).__qualname__
    match value:
        case None | bool() | int() | float() | str() | torch.dtype():
            text = repr(value).encode()
            digest.update(f"{kind} {len(text)} ".encode() + text)
        case torch.Tensor():
            digest.update(f"{kind} {value.dtype} {tuple(value.shape)} ".encode())
            flat = value.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy())
        case Mapping():
            digest.update(f"{kind} {len(value)} ".encode())
            for name in sorted(value):
                _feed(digest, name)
                _feed(digest, value[name])
        case list() | tuple():
            digest.update(f"{kind} {len(value)} ".encode())
            for item in value:
                _feed(digest, item)
        case _ if hasattr(value, "__dict__") and type(value).__module__.startswith("vllm.lora."):
            digest.update(f"{kind} ".encode())
            _feed(digest, vars(value))
        case _:
            raise TypeError(f"an adapter has an attribute of type {kind}")


def file_states(path: str) -> _FileStates | None:
    """Return the stat fields of a folder's files that show changes; None: not a local folder."""
    with (
        suppress(OSError, RuntimeError, ValueError),
        os.scandir(Path(path).expanduser()) as entries,
    ):
        stats = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
        return tuple(
            sorted(
                (name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
                for name, stat in stats
            )
        )
    return None


_watches: "weakref.WeakSet[LoraWatch]" = weakref.WeakSet()


@functools.cache
def _wrap_manager() -> None:
    """Make vLLM's LoRA manager notify the watches of its engine; once per process."""
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    load, use = LRUCacheWorkerLoRAManager._load_adapter, LRUCacheWorkerLoRAManager.add_adapter  # noqa: SLF001

    @functools.wraps(load)
    def load_watched(
        manager: LRUCacheWorkerLoRAManager, lora_request: "LoRARequest"
    ) -> "LoRAModel":
        files = file_states(lora_request.lora_path)
        model = load(manager, lora_request)
        for watch in _watches_of(manager):
            watch.on_load(manager, lora_request, model, files)
        return model

    @functools.wraps(use)
    def use_watched(manager: LRUCacheWorkerLoRAManager, lora_request: "LoRARequest") -> bool:
        is_loaded: bool = use(manager, lora_request)
        for watch in _watches_of(manager):
            watch.on_use(lora_request)
        return is_loaded

    LRUCacheWorkerLoRAManager._load_adapter = load_watched  # noqa: SLF001
    LRUCacheWorkerLoRAManager.add_adapter = use_watched


def _watches_of(manager: "LRUCacheWorkerLoRAManager") -> Iterator[LoraWatch]:
    return (watch for watch in _watches if watch.watches(manager))
