"""Whether the reads of a load, and the tiers they wait for, still move. No lock, no clock."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["ReadGate", "SpanRead", "TierProgress"]

Task = Callable[[], object]


_THREADS_MIN = 4
"""With so many threads or more, reads never take the last one."""


class ReadGate:
    """Bounds what reads of one tier hold after they were begun: slots and threads. No lock.

    The last thread is left to writes: a trial shows whether a tier is back, even if reads hang in
    all the others.

    A read that was begun and hangs keeps its slots, since the kernel may still write to them. One
    that was not begun does not, so what waits here can be given up at once.
    """

    def __init__(self, held_bytes_max: int, thread_count: int) -> None:
        """A single read may hold more than `held_bytes_max`, alone."""
        self._held_bytes_max = held_bytes_max
        self._held_bytes = 0
        self._read_count_max = thread_count - (thread_count >= _THREADS_MIN)
        self._read_count = 0
        self._waiting: deque[tuple[Task, int]] = deque()

    @property
    def has_waiting(self) -> bool:
        """Whether a read waits until others have ended."""
        return bool(self._waiting)

    def admit(self, task: Task, slot_bytes: int) -> bool:
        """Return whether a read may be queued for a thread; if not, `end` returns it later."""
        if self._waiting or not self._fits(slot_bytes):
            self._waiting.append((task, slot_bytes))
            return False
        self._hold(slot_bytes)
        return True

    def end(self, slot_bytes: int) -> list[Task]:
        """Take note that a read has ended; return those that may be queued now."""
        self._held_bytes -= slot_bytes
        self._read_count -= 1
        admitted: list[Task] = []
        while self._waiting and self._fits(self._waiting[0][1]):
            task, waiting_bytes = self._waiting.popleft()
            self._hold(waiting_bytes)
            admitted.append(task)
        return admitted

    def _hold(self, slot_bytes: int) -> None:
        self._held_bytes += slot_bytes
        self._read_count += 1

    def _fits(self, slot_bytes: int) -> bool:
        if not self._read_count:
            return True
        is_thread_free = self._read_count < self._read_count_max
        return is_thread_free and self._held_bytes + slot_bytes <= self._held_bytes_max


class TierProgress:
    """When the tasks of one tier began and ended. The caller's lock guards it."""

    def __init__(self, thread_count: int, deadline_seconds: float, gate: ReadGate) -> None:
        """`thread_count` is how many tasks run side by side, unless `gate` holds reads back."""
        self._thread_count = thread_count
        self._gate = gate
        self.deadline_seconds = deadline_seconds
        self._task_count = 0
        self._moved_at = -math.inf
        """When a task last began or ended, or a thread was free to begin one."""

    @property
    def has_tasks(self) -> bool:
        """Whether a task is queued or under way; a look at it needs no lock."""
        return self._task_count > 0

    @property
    def has_task_for_all(self) -> bool:
        """Whether each thread has a task without any more; a look at it needs no lock."""
        return self._task_count >= self._thread_count

    def accept(self, now: float) -> None:
        """Note that a task is queued."""
        if not self._is_busy():
            self._moved_at = now
        self._task_count += 1

    def begin(self, now: float) -> None:
        """Note that a thread has begun a task."""
        self._moved_at = now

    def end(self, now: float) -> None:
        """Note that a task has ended."""
        self._moved_at = now
        self._task_count -= 1

    def is_stalled(self, now: float) -> bool:
        """Return whether no read could begin, and no task has got on for the deadline.

        What is queued now would wait for a device that may never answer.
        """
        return self._is_busy() and self.has_stood_still(self._moved_at, now)

    def has_stood_still(self, since: float, now: float) -> bool:
        """Return whether no task began or ended for the deadline, looked at from `since` on."""
        return now - max(since, self._moved_at) > self.deadline_seconds

    def _is_busy(self) -> bool:
        """Return whether a read that is queued now has to wait for another task."""
        return self._task_count >= self._thread_count or self._gate.has_waiting


@dataclass(slots=True, eq=False)
class SpanRead:
    """One I/O task of a load that has not ended."""

    indices: range
    """The chunks that it reads, by their index in the job."""
    tier: TierProgress
    queued_at: float
    began_at: float | None = None
    """None: it waits for a thread, and nothing was written to its slots."""

    def is_overdue(self, now: float) -> bool:
        """Return whether the read makes no progress.

        Its own I/O has lasted for longer than the deadline, or it waits for a tier that has not
        moved for so long. How long it waits for a tier that moves is no measure of the device.
        """
        if self.began_at is None:
            return self.tier.has_stood_still(self.queued_at, now)
        return now - self.began_at > self.tier.deadline_seconds
