"""Which call of all fails, the simplest way: the n-th, and some behind it."""

import math
import threading

__all__ = ["FaultSchedule"]


class FaultSchedule:
    """Counts calls and says which of them fail. Thread-safe; may be shared by many wrappers."""

    def __init__(self, fail_at: int, *, fail_count: float = 1) -> None:
        """Let calls number `fail_at` (from 1) and following fail, `fail_count` of them.

        `fail_count=math.inf`: the device is dead from then on, until `heal`.
        """
        self._lock = threading.Lock()
        self._fail_at = float(fail_at)
        self._fail_count = fail_count
        self._call_count = 0
        self._struck_count = 0

    @property
    def call_count(self) -> int:
        """How many calls were made so far."""
        return self._call_count

    @property
    def has_struck(self) -> bool:
        """Whether any call failed."""
        return self._struck_count > 0

    def strike(self) -> bool:
        """Count one call; True: it shall fail."""
        with self._lock:
            self._call_count += 1
            strikes = self._fail_at <= self._call_count < self._fail_at + self._fail_count
            self._struck_count += strikes
            return strikes

    def fail_from_now(self) -> None:
        """Let the next call fail, and `fail_count` of them in all."""
        with self._lock:
            self._fail_at = self._call_count + 1.0

    def heal(self) -> None:
        """Let no further call fail."""
        with self._lock:
            self._fail_at = math.inf
