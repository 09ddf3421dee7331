"""The only module that starts threads: an I/O pool and a serial mailbox.

Reads go before writes: a load keeps a user waiting, a demote nobody.
"""

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from tierstore.errors import ClosedError

__all__ = ["IoPool", "Mailbox", "is_pool_thread"]

_logger = logging.getLogger(__name__)

Item = TypeVar("Item")

_READ, _WRITE, _STOP = 0, 1, 2

_this_thread = threading.local()


def is_pool_thread() -> bool:
    """Return whether this thread was started here."""
    return getattr(_this_thread, "is_pooled", False)


class IoPool:
    """A few threads that run blocking I/O, reads before writes, each in order of arrival.

    The queue is not bounded here: its callers bound what they submit in bytes (the planner's
    write-behind limit, the pinned slots of a load).
    """

    def __init__(self, thread_count: int, name: str) -> None:
        self._thread_count = thread_count
        self._name = name
        self._queue: queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]] = (
            queue.PriorityQueue()
        )
        self._sequence = itertools.count()
        self._threads: list[threading.Thread] = []

    def open(self) -> None:
        """Start the threads."""
        for number in range(self._thread_count):
            thread = threading.Thread(target=self._run, name=f"{self._name}-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def submit_read(self, task: Callable[[], None]) -> None:
        """Queue a read. `task` reports its own outcome and must not raise."""
        self._queue.put((_READ, next(self._sequence), task))

    def submit_write(self, task: Callable[[], None]) -> None:
        """Queue a write behind all reads. `task` reports its own outcome and must not raise."""
        self._queue.put((_WRITE, next(self._sequence), task))

    def close(self, timeout_seconds: float) -> bool:
        """Run what is queued, then stop; False: a thread still hangs in its I/O."""
        until = time.monotonic() + timeout_seconds
        for _ in self._threads:
            self._queue.put((_STOP, next(self._sequence), None))
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        _this_thread.is_pooled = True
        while True:
            _, _, task = self._queue.get()
            if task is None:
                return
            try:
                task()
            except Exception:  # the outermost frame of a thread: a bug must not end the pool
                _logger.exception("I/O task failed: pool=%s", self._name)
            del task


class Mailbox(Generic[Item]):
    """One thread that handles queued items in order, as many at once as have gathered."""

    def __init__(self, name: str, handle: Callable[[list[Item]], None]) -> None:
        """`handle` runs in the thread, is given one or more items, and must not raise."""
        self._handle = handle
        self._items: list[Item] = []
        self._condition = threading.Condition()
        self._busy = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def open(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, item: Item) -> None:
        """Queue one item; never blocks.

        Raises:
            ClosedError: after `close`.
        """
        with self._condition:
            if self._closed:
                raise ClosedError("the mailbox is closed")
            self._items.append(item)
            self._condition.notify_all()

    def offer(self, item: Item, waiting_max: int) -> bool:
        """Queue one item unless so many wait already; say whether it was.

        Raises:
            ClosedError: after `close`.
        """
        with self._condition:
            if len(self._items) >= waiting_max:
                return False
            self.put(item)
            return True

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until nothing is queued or being handled; False: time is up."""
        with self._condition:
            return self._condition.wait_for(
                lambda: not self._items and not self._busy, timeout_seconds
            )

    def close(self, timeout_seconds: float) -> bool:
        """Handle what is queued, then stop; False: the thread still hangs. Idempotent.

        The thread itself may call it: it ends after what it is handling.
        """
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        if self._thread.ident not in (None, threading.get_ident()):
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        _this_thread.is_pooled = True
        while True:
            with self._condition:
                self._condition.wait_for(lambda: bool(self._items) or self._closed)
                if not self._items:
                    return
                batch, self._items = self._items, []
                self._busy = True
            try:
                self._handle(batch)
            except Exception:  # the outermost frame of a thread: a bug must not end it
                _logger.exception("mailbox batch failed: items=%d", len(batch))
            finally:
                with self._condition:
                    self._busy = False
                    self._condition.notify_all()
