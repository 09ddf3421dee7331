"""The configuration, parsed once at the edge into frozen dataclasses.

Below this package nobody sees a mapping. `load_config` (file or mapping) refuses unknown keys,
missing units and impossible pairs with a `ConfigError` that names the path of the key and the
nearest valid name.
"""

from tierstore.config.loader import emit_json_schema, load_config
from tierstore.config.model import (
    GpuConfig,
    IoConfig,
    OffloadConfig,
    PrimaryConfig,
    SecondaryConfig,
    StoreConfig,
)

__all__ = [
    "GpuConfig",
    "IoConfig",
    "OffloadConfig",
    "PrimaryConfig",
    "SecondaryConfig",
    "StoreConfig",
    "emit_json_schema",
    "load_config",
]
