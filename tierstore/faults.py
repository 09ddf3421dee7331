"""Which device a tier has: the kernel as it is, or one with faults on demand."""

from collections.abc import Callable
from typing import TypeAlias

from tierstore.config import SecondaryConfig
from tierstore.system import SYSTEM, SystemCalls

__all__ = ["SystemOpener", "open_system"]

SystemOpener: TypeAlias = Callable[[SecondaryConfig], SystemCalls]
"""A function such as `open_system`; tests give one that returns system calls with faults."""


def open_system(config: SecondaryConfig) -> SystemCalls:
    """Return what a tier asks its device through."""
    del config
    return SYSTEM
