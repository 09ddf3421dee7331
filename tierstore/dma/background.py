"""Background work on the pool: what starts it, and when it gives way to transfers."""

import threading
from collections.abc import Callable

from tierstore.io_pool import wait_for

__all__ = ["SPAWN_MAX", "BackgroundTurns", "Spawn", "no_io"]

Spawn = Callable[[Callable[[], None]], None]
"""Runs a task in a background thread."""

SPAWN_MAX = 4
"""Most tasks of one kind that are spawned at once."""

_LOOK_SECONDS = 0.01
_LOOKS_MAX = 4


def no_io() -> bool:
    """Return False: nobody tells of reads and writes of slots."""
    return False


class BackgroundTurns:
    """When background work takes its next step: while no transfer is under way, or rarely.

    Not by a low priority of its threads: one that the kernel holds back keeps the interpreter, or
    the lock of the address space, for as long. Beside two busy processes, whoever mapped memory
    then waited for up to 0.2 to 1 s.
    """

    def __init__(
        self,
        is_busy: Callable[[], bool],
        *,
        look_seconds: float = _LOOK_SECONDS,
        looks_max: int = _LOOKS_MAX,
    ) -> None:
        """`is_busy` returns whether a transfer is under way; any thread calls it, with no lock.

        After `looks_max` looks, `look_seconds` apart, a step is due: busy engines get their pages,
        too.
        """
        self._is_busy = is_busy
        self._look_seconds = look_seconds
        self._looks_max = looks_max
        # An interruption cannot keep a lock from being left, as it can a condition, which is left
        # by a function in Python.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._is_over = False

    def wait(self) -> bool:
        """Wait until the next step is due; False: there is none any more."""
        for _ in range(self._looks_max):
            if self._is_over or not self._is_busy():
                break
            with self._lock:
                wait_for(self._changed, lambda: self._is_over, self._look_seconds)
        return not self._is_over

    def end(self) -> None:
        """Let no further step be taken; idempotent."""
        with self._lock:
            self._is_over = True
            self._changed.notify_all()
