"""The configuration, parsed once at the edge into frozen dataclasses.

No code below this package sees a mapping. `load_config` (file or mapping) refuses unknown keys,
missing units and impossible pairs with a `ConfigError` that names the path of the key and the
nearest valid name.
"""

from tierstore.config.fault_rule import FaultKind, FaultRule
from tierstore.config.loader import check_config, emit_json_schema, load_config, to_mapping
from tierstore.config.model import (
    WRITE_QUEUE_BYTES_MAX,
    BreakerConfig,
    Cascade,
    GpuConfig,
    IntegrityConfig,
    IoConfig,
    IoMode,
    OffloadConfig,
    PrimaryConfig,
    SecondaryConfig,
    StoreConfig,
)

__all__ = [
    "WRITE_QUEUE_BYTES_MAX",
    "BreakerConfig",
    "Cascade",
    "FaultKind",
    "FaultRule",
    "GpuConfig",
    "IntegrityConfig",
    "IoConfig",
    "IoMode",
    "OffloadConfig",
    "PrimaryConfig",
    "SecondaryConfig",
    "StoreConfig",
    "check_config",
    "emit_json_schema",
    "load_config",
    "to_mapping",
]
