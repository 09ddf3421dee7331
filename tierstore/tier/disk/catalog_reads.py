"""Reads of a catalog in a thread of its own: the caller waits for a bounded time.

A catalog is read through a mapping, and a device that does not answer stops the thread that touches
a page of it. So all reads are done by one thread, also those of one key: that takes 27 us instead
of 5, but in the step's thread a page fault on a device that hangs would stop the engine. A read
that has begun and makes no progress hangs in its device, if the interpreter was free meanwhile; one
that has not begun only waits for its turn.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tierstore.io_pool import Mailbox, wait_for
from tierstore.tier.pending_read import PendingRead

__all__ = ["CatalogReads"]

Item = TypeVar("Item")
Answer = TypeVar("Answer")

_SLICE_SECONDS = 0.01
_LOOKS_MIN = 5
"""A waiting caller releases the interpreter so often before it calls a read hung."""


class CatalogReads:
    """The thread. One other thread at a time asks; any may wait."""

    def __init__(self, name: str) -> None:
        self._mailbox: Mailbox[PendingRead[object]] = Mailbox(name, self._read)
        self._lock = threading.RLock()  # an interruption cannot keep it from being left
        self._changed = threading.Condition(self._lock)
        self._step_count = 0
        """Grows with all that the thread does."""
        self._is_reading = False
        self._seen_step = -1
        self._seen_at = 0.0
        self._look_count = 0

    def open(self) -> None:
        """Start the thread."""
        self._mailbox.open()

    def ask(self, call: Callable[[], Answer]) -> PendingRead[Answer]:
        """Queue a read."""
        reading = PendingRead(call)
        self._mailbox.put(reading)  # type: ignore[arg-type]
        return reading

    def progressing(self, items: Iterable[Item]) -> Iterator[Item]:
        """Pass items on, and note the progress that the thread makes."""
        for item in items:
            self._step_count += 1
            yield item

    def wait(
        self, reading: PendingRead[Answer], seconds: float, stuck_seconds: float | None = None
    ) -> bool:
        """Wait until a read is done.

        False: time is up, or nothing has moved for `stuck_seconds` (None: as long).
        """
        stuck_seconds = seconds if stuck_seconds is None else stuck_seconds
        until = time.monotonic() + seconds
        while not reading.is_done:
            if self.is_stuck(stuck_seconds) or time.monotonic() >= until:
                return reading.is_done
            with self._lock:
                wait_for(self._changed, lambda: reading.is_done, min(_SLICE_SECONDS, seconds))
        return True

    def is_stuck(self, seconds: float) -> bool:
        """Return whether the read that has begun was seen to make no progress for so long."""
        with self._lock:
            if not self._is_reading or self._step_count != self._seen_step:
                self._seen_step = self._step_count if self._is_reading else -1
                self._seen_at = time.monotonic()
                self._look_count = 0
                return False
            self._look_count += 1
            return self._look_count >= _LOOKS_MIN and time.monotonic() - self._seen_at >= seconds

    def close(self, timeout_seconds: float) -> bool:
        """Do what is queued, then stop; False: the thread hangs in its catalog."""
        return self._mailbox.close(timeout_seconds)

    def _read(self, readings: list[PendingRead[object]]) -> None:
        for reading in readings:
            self._step_count += 1
            self._is_reading = True
            try:
                reading.run()
            finally:
                self._is_reading = False
            with self._lock:
                self._changed.notify_all()
