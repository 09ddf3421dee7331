"""What an embedded caller hands to `TierStore.open`, checked; what a call without memory says."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierstore.config import StoreConfig, check_config, load_config
from tierstore.embedded.planes import Patience
from tierstore.errors import ConfigError
from tierstore.manifest import Manifest
from tierstore.quoting import escaped, quoted

__all__ = ["no_memory", "require_arguments", "require_config"]


def require_config(config: StoreConfig | Mapping[str, Any] | str | Path) -> StoreConfig:
    """Return a configuration whose values are all checked, whoever made it.

    Raises:
        ConfigError: it is not.
    """
    return check_config(config) if isinstance(config, StoreConfig) else load_config(config)


def require_arguments(manifest: object, patience: object, **functions: object) -> None:
    """Refuse arguments of a wrong type before anything is opened.

    Raises:
        TypeError: names the argument.
    """
    if not isinstance(manifest, Manifest):
        raise TypeError(f"manifest: expected a Manifest, got {quoted(manifest)}")
    if patience is not None and not isinstance(patience, Patience):
        raise TypeError(f"patience: expected a Patience, got {quoted(patience)}")
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(f"{name}: expected a function, got {quoted(function)}")


def no_memory(error: MemoryError) -> ConfigError:
    """Return the error of a call for which the system has no memory left."""
    return ConfigError(
        f"primary.capacity: the system has no memory left ({escaped(error) or 'MemoryError'}); "
        "lower it, or raise what limits the process (ulimit -v, the container)"
    )
