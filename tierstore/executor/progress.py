"""Whether the reads of a load, and the tiers they wait for, still move. No lock, no clock."""

import math
from dataclasses import dataclass

__all__ = ["SpanRead", "TierProgress"]


class TierProgress:
    """When the tasks of one tier began and ended. The caller's lock guards it."""

    def __init__(self, thread_count: int, deadline_seconds: float) -> None:
        """`thread_count` is how many tasks run side by side."""
        self._thread_count = thread_count
        self.deadline_seconds = deadline_seconds
        self._task_count = 0
        self._moved_at = -math.inf
        """When a task last began or ended, or a thread was free to begin one."""

    def accept(self, now: float) -> None:
        """Note that a task is queued."""
        if self._task_count < self._thread_count:
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
        """Return whether all threads are busy and none has got on for the length of the deadline.

        What is queued now would wait for a device that may never answer.
        """
        return self._task_count >= self._thread_count and self.has_stood_still(self._moved_at, now)

    def has_stood_still(self, since: float, now: float) -> bool:
        """Return whether no task began or ended for the deadline, looked at from `since` on."""
        return now - max(since, self._moved_at) > self.deadline_seconds


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
