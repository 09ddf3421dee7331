"""The jobs of an executor that are not answered yet, and the lock that guards them."""

import threading
from collections.abc import Callable

from tierstore.executor.job import Job
from tierstore.transfer import JobId, TransferDone

__all__ = ["OpenJobs"]


class OpenJobs:
    """Jobs by id. Tasks report from their threads, so whoever reads or changes a job locks."""

    def __init__(self) -> None:
        # An interruption cannot keep a lock from being left, as it can a condition, which is left
        # by a function in Python: the condition is for those who hold the lock.
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._jobs: dict[JobId, Job] = {}

    def __len__(self) -> int:
        """Return how many jobs are open."""
        return len(self._jobs)

    def begin(self, job_id: JobId) -> Job:
        """Open a job for a command."""
        job = Job(job_id)
        with self.lock:
            self._jobs[job_id] = job
        return job

    def take_answers(self, now: float) -> list[TransferDone]:
        """Give up reads that are overdue; return the answers of jobs that are late or settled."""
        with self.lock:
            overdue = [job for job in self._jobs.values() if job.is_overdue(now)]
            for job in overdue:
                job.abandon()
            answers = [job.answer_late() for job in overdue if not job.is_settled()]
            settled = [job for job in self._jobs.values() if job.is_settled()]
            for job in settled:
                del self._jobs[job.job_id]
                answers.append(job.answer())
        return answers

    def is_any_settled(self) -> bool:
        """Return whether an answer is due; the lock is held."""
        return any(job.is_settled() for job in self._jobs.values())

    def abandon_all(self) -> None:
        """Let no task copy anything more to the engine's blocks."""
        with self.lock:
            for job in self._jobs.values():
                job.abandoned = True

    def tell_changed(self) -> None:
        """Wake up who waits; the lock is held."""
        self._changed.notify_all()

    def wait(self, timeout_seconds: float) -> None:
        """Leave the lock, which is held, until something has changed or time is up."""
        self._changed.wait(timeout_seconds)

    def wait_until(self, is_reached: Callable[[], bool], timeout_seconds: float) -> None:
        """Leave the lock, which is held, until `is_reached` or time is up."""
        self._changed.wait_for(is_reached, timeout_seconds)
