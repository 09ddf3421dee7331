"""Time as a dependency, so that tests own it."""

import time
from typing import Protocol

__all__ = ["Clock", "MonotonicClock"]


class Clock(Protocol):
    """A source of monotonic seconds."""

    def seconds(self) -> float:
        """Return monotonic seconds since an arbitrary start."""


class MonotonicClock:
    """The machine's monotonic clock."""

    def seconds(self) -> float:
        """Return monotonic seconds since an arbitrary start."""
        return time.monotonic()
