"""The only module that starts threads: an I/O pool and a serial mailbox.

Urgent tasks go before deferred ones: a load keeps a user waiting, a demote does not. Deferred tasks
get a share of the turns all the same: while none of them runs, nothing is demoted and no bytes are
freed.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from tierstore.bounded_log import bounded
from tierstore.errors import ClosedError, ConfigError
from tierstore.quoting import escaped

__all__ = [
    "URGENT_IN_A_ROW_MAX",
    "IoPool",
    "Mailbox",
    "TaskOrder",
    "is_pool_thread",
    "run_side_by_side",
    "wait_for",
]

_logger = bounded(logging.getLogger(__name__))

Item = TypeVar("Item")

URGENT_IN_A_ROW_MAX = 8
"""After so many urgent tasks that overtook a deferred one, the deferred one has its turn."""

_BEGIN_SECONDS_MAX = 5.0
"""A thread that has not begun by then is given up."""
_NO_MEMORY_SECONDS = 0.05
"""Between two attempts to wait, when there is no memory for it."""


class TaskOrder(Generic[Item]):
    """The order in which urgent and deferred tasks have their turns: O(1) each. Takes no lock."""

    def __init__(self) -> None:
        self._urgent: deque[Item] = deque()
        self._deferred: deque[Item] = deque()
        self._overtaken_count = 0
        """Urgent tasks that overtook the first deferred one since the last deferred one's turn."""

    def __len__(self) -> int:
        return len(self._urgent) + len(self._deferred)

    def add_urgent(self, task: Item) -> None:
        """Queue a task behind all other urgent ones."""
        self._urgent.append(task)

    def add_deferred(self, task: Item) -> None:
        """Queue a task behind all other deferred ones."""
        self._deferred.append(task)

    def take(self) -> Item | None:
        """Remove the task whose turn it is and return it; None: there is none."""
        urgent, deferred = self._urgent, self._deferred
        if urgent and not (deferred and self._overtaken_count >= URGENT_IN_A_ROW_MAX):
            self._overtaken_count = self._overtaken_count + 1 if deferred else 0
            return urgent.popleft()
        self._overtaken_count = 0
        return deferred.popleft() if deferred else None


_this_thread = threading.local()


def is_pool_thread() -> bool:
    """Return whether this thread was started here, to do the I/O of a store."""
    return getattr(_this_thread, "is_pooled", False)


class _Beginning(threading.Event):
    """Set when a thread has begun; waited for a bounded time.

    Without memory a thread can end before its first step. `threading.Thread.start` would wait for
    that step without limit.
    """

    def wait(self, timeout: float | None = None) -> bool:
        seconds = _BEGIN_SECONDS_MAX if timeout is None else timeout
        if not super().wait(seconds):
            raise RuntimeError(f"it has not begun within {seconds:.0f} s, as without memory")
        return True


class _Thread(threading.Thread):
    """A thread that does not keep the process from ending, and whose start is bounded."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work: Callable[[], None] | None = work
        self._started = _Beginning()

    @property
    def has_begun(self) -> bool:
        """Whether it can be joined: a thread without memory may have an id and never run."""
        return self._started.is_set()

    def begin(self) -> None:
        """Start it.

        Raises:
            ConfigError: the system refuses. The thread may begin later all the same; it ends then.
        """
        try:
            self.start()
        except (RuntimeError, MemoryError) as error:
            # The interpreter keeps the thread in its list of those about to begin, perhaps for
            # ever; removed from there, it would end in a traceback if it did begin. So it drops its
            # work, and with it whatever that keeps alive.
            self._work = None
            raise ConfigError(
                f"io.threads: the system starts no thread '{self.name}' ({escaped(error)}); lower "
                "io.threads, or raise what limits the process (ulimit -u, ulimit -v, the container)"
            ) from error

    def run(self) -> None:
        """Do its work; the interpreter calls it in the thread."""
        work, self._work = self._work, None
        if work is not None:
            work()


def wait_for(
    condition: threading.Condition,
    predicate: Callable[[], bool],
    timeout_seconds: float | None = None,
) -> bool:
    """Wait as `Condition.wait_for` does, also where there is no memory for it.

    The lock is taken once. Others may take it meanwhile, so that they can do what is waited for.
    """
    until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    while True:
        left_seconds = None if until is None else max(0.0, until - time.monotonic())
        try:
            return condition.wait_for(predicate, left_seconds)
        except MemoryError:
            if left_seconds == 0.0:
                return False
        condition.release()
        try:
            time.sleep(_NO_MEMORY_SECONDS)
        finally:
            condition.acquire()


class IoPool:
    """A few threads that run blocking I/O in the order of `TaskOrder`.

    The queue is not bounded here: its callers bound what they submit in bytes (a cascade's write
    queue, the pinned slots of a load).
    """

    def __init__(self, thread_count: int, name: str, *, serves_callers: bool = False) -> None:
        """`serves_callers`: its threads call stores for others, and do no I/O of theirs."""
        self._thread_count = thread_count
        self._serves_callers = serves_callers
        self._name = name
        # An interruption cannot keep a lock from being left, as it can a condition, which is left
        # by a function in Python.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._order: TaskOrder[Callable[[], object]] = TaskOrder()
        self._is_closing = False
        self._threads: list[_Thread] = []

    def open(self) -> None:
        """Start the threads, all or none.

        Raises:
            ConfigError: the system starts no more.
        """
        try:
            for number in range(self._thread_count):
                name = f"{self._name}-{number}"
                thread = _Thread(self._run, name)
                thread.begin()
                self._threads.append(thread)
        except BaseException:
            self.close(0.0)
            raise

    def submit_urgent(self, task: Callable[[], object]) -> None:
        """Queue a task that should run soon. It reports its own outcome and must not raise."""
        with self._lock:
            self._order.add_urgent(task)
            self._changed.notify()

    def submit_deferred(self, task: Callable[[], object]) -> None:
        """Queue a task that can wait. It reports its own outcome and must not raise."""
        with self._lock:
            self._order.add_deferred(task)
            self._changed.notify()

    def submit_next(self, tasks: Sequence[Callable[[], object]]) -> None:
        """Queue urgent tasks as the last step of a task: its thread takes one of all at once.

        So one thread less is woken than there are tasks. A thread that is woken for nothing takes
        the interpreter for it.
        """
        with self._lock:
            for task in tasks:
                self._order.add_urgent(task)
            if len(tasks) > 1:
                self._changed.notify(len(tasks) - 1)

    def begin_close(self) -> None:
        """Let the threads stop after what is queued; idempotent."""
        with self._lock:
            self._is_closing = True
            self._changed.notify_all()

    def close(self, timeout_seconds: float) -> bool:
        """Run what is queued, then stop; False: a thread still hangs in its I/O. Idempotent."""
        until = time.monotonic() + timeout_seconds
        self.begin_close()
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        _this_thread.is_pooled = not self._serves_callers
        while True:
            with self._lock:
                wait_for(self._changed, lambda: bool(self._order) or self._is_closing)
                task = self._order.take()
            if task is None:
                return
            _run_task(task, self._name)
            del task


def _run_task(task: Callable[[], object], pool_name: str) -> None:
    try:
        task()
    # The outermost frame of a thread: neither a bug nor a `sys.exit` of foreign code may end it.
    except BaseException:
        with suppress(MemoryError):
            _logger.exception("I/O task failed: pool=%s", pool_name)


def run_side_by_side(
    tasks: Sequence[Callable[[], object]], name: str, timeout_seconds: float
) -> bool:
    """Run tasks, each in a thread of its own; False: some still run there when time is up.

    They report their own outcome and must not raise. If the system starts no thread, they run in
    this one, one after the other, however long that takes: what must be closed is closed.
    """
    pool = IoPool(len(tasks), name)
    try:
        pool.open()
    except (ConfigError, MemoryError):
        for task in tasks:
            _run_task(task, name)
        return True
    for task in tasks:
        pool.submit_deferred(task)
    return pool.close(timeout_seconds)


class Mailbox(Generic[Item]):
    """One thread that handles queued items in order, all that are queued at once."""

    def __init__(self, name: str, handle: Callable[[list[Item]], None]) -> None:
        """`handle` runs in the thread, is given one or more items, and must not raise."""
        self._handle = handle
        self._items: list[Item] = []
        self._lock = threading.RLock()  # as in `IoPool`
        self._condition = threading.Condition(self._lock)
        self._busy = False
        self._closed = False
        self._thread = _Thread(self._run, name)

    def open(self) -> None:
        """Start the thread.

        Raises:
            ConfigError: the system starts no more.
        """
        try:
            self._thread.begin()
        except BaseException:
            self.close(0.0)
            raise

    def put(self, item: Item) -> None:
        """Queue one item; never blocks.

        Raises:
            ClosedError: after `close`.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the mailbox is closed")
            self._items.append(item)
            self._condition.notify_all()

    def offer(self, item: Item, waiting_max: int) -> bool:
        """Queue one item unless `waiting_max` wait already; return whether it was queued.

        Raises:
            ClosedError: after `close`.
        """
        with self._lock:
            if len(self._items) >= waiting_max:
                return False
            self.put(item)
            return True

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until nothing is queued or being handled; False: time is up."""
        with self._lock:
            return wait_for(
                self._condition, lambda: not self._items and not self._busy, timeout_seconds
            )

    def close(self, timeout_seconds: float) -> bool:
        """Handle what is queued, then stop; False: the thread still hangs. Idempotent.

        The thread itself may call it: it ends after what it is handling.
        """
        with self._lock:
            self._closed = True
            self._condition.notify_all()
        if self._thread.has_begun and self._thread.ident != threading.get_ident():
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        _this_thread.is_pooled = True
        while True:
            with self._lock:
                wait_for(self._condition, lambda: bool(self._items) or self._closed)
                if not self._items:
                    return
                batch, self._items = self._items, []
                self._busy = True
            try:
                self._handle(batch)
            except BaseException:  # the outermost frame of a thread: see `_run_task`
                with suppress(MemoryError):
                    _logger.exception("mailbox batch failed: items=%d", len(batch))
            finally:
                with self._lock:
                    self._busy = False
                    self._condition.notify_all()
