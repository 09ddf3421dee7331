"""A thread that carries what an embedded call has left on its way, and sleeps otherwise.

Until the next call, chunks would stay unwritten and the bytes of evicted ones withheld from other
processes.
"""

import logging
import threading
from collections.abc import Callable

from tierstore.bounded_log import bounded
from tierstore.embedded.call_gate import Gate
from tierstore.embedded.loop import PlaneLoop
from tierstore.io_pool import Mailbox, wait_for

__all__ = ["IdleCarrier"]

_logger = bounded(logging.getLogger(__name__))

_POLL_SECONDS_MIN = 0.005
_POLL_SECONDS_MAX = 0.1
"""Between two looks: the shorter one as long as something moves."""

_CLOSE_SECONDS = 5.0


class IdleCarrier:
    """Carries between calls; and closes a store that was dropped, which needs a thread.

    Knows the loop and not the store, so that the thread keeps no store alive.
    """

    def __init__(self, loop: PlaneLoop, gate: Gate, close_abandoned: Callable[[], None]) -> None:
        """Every call to the loop goes through `gate`; `close_abandoned` runs in the thread."""
        self._loop = loop
        self._gate = gate
        self._close_abandoned = close_abandoned
        self._is_awake = False
        self._is_abandoned = False
        # No event: an interruption could keep its lock from being left, for the thread and `close`
        # to wait for it for ever.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._is_stopped = False
        self._pause_seconds = _POLL_SECONDS_MIN
        self._logged: set[str] = set()
        self._mailbox: Mailbox[None] = Mailbox("tierstore-idle", self._carry)

    def open(self) -> None:
        """Start the thread."""
        self._mailbox.open()

    def wake(self) -> None:
        """Go on with what is on its way; the caller is inside the gate and about to leave it."""
        if not self._is_awake and not self._is_stopped and self._loop.has_messages():
            self._is_awake = True
            self._mailbox.put(None)

    def stop(self) -> None:
        """Carry nothing more; the caller is inside the gate."""
        self._is_stopped = True
        with self._lock:
            self._changed.notify_all()

    def abandon(self) -> None:
        """Let the thread close a store that was dropped.

        Called by the garbage collector, at any point of any thread: neither waits nor takes a lock
        that its thread may hold, and that is not re-entrant.
        """
        self._is_abandoned = True
        self._mailbox.put(None)

    def close(self) -> None:
        """Stop the thread, which does not wait for the gate; idempotent."""
        self.stop()
        self._mailbox.close(_CLOSE_SECONDS)

    def _carry(self, _wakes: list[None]) -> None:
        self._pause_seconds = _POLL_SECONDS_MIN
        while not self._is_abandoned and not self._is_stopped_within(self._pause_seconds):
            try:
                # If the gate is closed, a call is under way: its thread carries.
                if self._gate.try_run(self._step) and not self._is_awake:
                    break
            except Exception as error:  # the outermost frame of a thread: a bug must not end it
                self._pause_seconds = _POLL_SECONDS_MAX
                cause = type(error).__name__
                if cause not in self._logged:
                    self._logged.add(cause)
                    _logger.exception("idle step failed: cause=%s", cause)
        if self._is_abandoned:
            self._close_abandoned()

    def _is_stopped_within(self, seconds: float) -> bool:
        with self._lock:
            return wait_for(self._changed, lambda: self._is_stopped, seconds)

    def _step(self) -> None:
        if self._is_stopped or not self._loop.has_messages():
            self._is_awake = False
        elif self._loop.pump():
            self._pause_seconds = _POLL_SECONDS_MIN
        else:
            self._pause_seconds = min(2 * self._pause_seconds, _POLL_SECONDS_MAX)
