"""Payload stores that other packages bring along."""

import inspect
from collections.abc import Callable
from typing import cast

from tierstore.backend.protocol import Backend, PoolRegion
from tierstore.codec.plain import RecordCodec
from tierstore.config import SecondaryConfig
from tierstore.config.plug_ins import PlugInGroup, load_plug_in, require_members
from tierstore.device.system import SystemCalls
from tierstore.errors import BackendError, ConfigError, TierStoreError
from tierstore.manifest import Manifest
from tierstore.quoting import named, quoted

__all__ = ["names_pool", "open_plug_in"]


def open_plug_in(
    config: SecondaryConfig,
    manifest: Manifest,
    *,
    rank: int,
    rank_count: int,
    codec: RecordCodec,
    system: SystemCalls,
    pool: PoolRegion | None = None,
) -> Backend:
    """Open the payload store of one rank that the plug-in `config.backend` makes.

    It is told `pool`, where the slots lie, if it has a parameter of that name.

    Raises:
        BackendError: it cannot be opened now; it is tried again.
        ConfigError: the plug-in cannot be used, or does not take these options.
    """
    make = load_plug_in(PlugInGroup.BACKENDS, config.backend)
    what = f"secondary {config.name!r}: backend {quoted(config.backend)}"
    region = {"pool": pool} if names_pool(make) else {}
    try:
        backend = make(
            config,
            manifest,
            rank=rank,
            rank_count=rank_count,
            codec=codec,
            system=system,
            **region,
            **config.backend_options,
        )
    except TierStoreError:
        raise
    except OSError as error:
        raise BackendError(f"{what}: {named(error)}") from error
    except Exception as error:
        raise ConfigError(
            f"{what}: the plug-in makes no backend: {named(error)}; see backend_options"
        ) from error
    require_members(backend, Backend, what)
    opened = cast("Backend", backend)
    try:
        opened.open()
    except TierStoreError:
        raise
    except Exception as error:
        raise BackendError(f"{what}: it cannot be opened: {named(error)}") from error
    return opened


def names_pool(function: Callable[..., object]) -> bool:
    """Return whether a function has a parameter named `pool`; `**kwargs` are none.

    It may hand these on to a function that does not know the name.
    """
    try:
        return "pool" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a callable written in C may have no signature
        return False
