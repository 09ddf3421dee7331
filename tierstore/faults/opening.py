"""Which system calls a tier's configuration means: `io.faults` is for game days."""

import logging
import os
from collections.abc import Callable
from functools import lru_cache
from typing import TypeAlias

from tierstore.bounded_log import bounded
from tierstore.config import SecondaryConfig
from tierstore.device.system import SYSTEM, SystemCalls
from tierstore.errors import ConfigError
from tierstore.faults.plan import FaultPlan

__all__ = ["ALLOW_FAULTS", "SystemOpener", "open_system"]

_logger = bounded(logging.getLogger(__name__))

ALLOW_FAULTS = "TIERSTORE_ALLOW_FAULTS"
"""The environment variable that has to be 1 where a configuration asks for faults."""

_PLANS_MAX = 64

SystemOpener: TypeAlias = Callable[[SecondaryConfig], SystemCalls]
"""A function such as `open_system`; tests give one that returns system calls with faults."""


def open_system(config: SecondaryConfig) -> SystemCalls:
    """Return what a tier asks its device through.

    With `io.faults`, its catalog and its backend share one plan in this process, so that calls are
    counted on when it is opened again.

    Raises:
        ConfigError: faults are configured, and the environment does not allow them.
    """
    if not config.io.faults:
        return SYSTEM
    if os.environ.get(ALLOW_FAULTS) != "1":
        raise ConfigError(
            f"secondary {config.name!r}: io.faults makes the tier fail on purpose; remove the key, "
            f"or set {ALLOW_FAULTS}=1 in the environment of every process of the engine"
        )
    return _plan_of(config).open_system(config)


@lru_cache(maxsize=_PLANS_MAX)
def _plan_of(config: SecondaryConfig) -> FaultPlan:
    for rule in config.io.faults:
        _logger.warning(
            "FAULTS ARE INJECTED, for io.faults says so: secondary=%s rule=%s", config.name, rule
        )
    return FaultPlan(*config.io.faults)
