"""Giving the bytes of evicted records back, until every rank has done it."""

from collections.abc import Callable

from tierstore.tier.health.tier_health import TierHealth
from tierstore.tier.secondary import SecondaryTier
from tierstore.tier_events import Freed
from tierstore.transfer import JobId, Release, TransferDone

__all__ = ["Releases"]

_RETRY_CALLS_MAX = 1 << 8
"""A release that keeps failing is tried again after at most so many calls of `commands`."""


class Releases:
    """The releases of one tier. The bytes stay charged until they really are gone. One thread."""

    def __init__(self, tier_idx: int, secondary: SecondaryTier, health: TierHealth) -> None:
        """Share the tier; `health` says how many releases are worth a try."""
        self._tier_idx = tier_idx
        self._secondary = secondary
        self._health = health
        self._under_way: dict[JobId, Freed] = {}
        self._due: list[Freed] = []
        self._failed: list[Freed] = []
        self._failure_count = 0
        self._calls_until_retry = 0

    @property
    def is_under_way(self) -> bool:
        """Whether the device was told to give bytes back, and has not answered."""
        return bool(self._under_way)

    @property
    def is_due(self) -> bool:
        """Whether some have to be tried, or tried again."""
        return bool(self._due or self._failed)

    def add(self, freed: Freed) -> None:
        """Take what the catalog has given up."""
        self._due.append(freed)

    def commands(self, new_job_id: Callable[[], JobId]) -> list[Release]:
        """Return the releases to try now."""
        if self._failed:
            self._calls_until_retry -= 1
            if self._calls_until_retry <= 0:
                self._due += self._failed
                self._failed.clear()
        if not self._due:
            return []
        count = self._health.release_count_max()
        if count == 1 and self._under_way:
            count = 0
        chosen, self._due = self._due[:count], self._due[count:]
        return [self._start(freed, new_job_id()) for freed in chosen]

    def complete(self, done: TransferDone) -> bool:
        """Take the data plane's answer; False: the job is no release."""
        freed = self._under_way.pop(done.job_id, None)
        if freed is None:
            return False
        if done.ok:
            self._secondary.released(freed.release_id)
            self._failure_count = 0
        else:
            self._failed.append(freed)
            self._failure_count += 1
            self._calls_until_retry = min(1 << self._failure_count, _RETRY_CALLS_MAX)
        return True

    def _start(self, freed: Freed, job_id: JobId) -> Release:
        self._under_way[job_id] = freed
        return Release(
            job_id=job_id,
            tier_idx=self._tier_idx,
            runs=freed.runs,
            empty_segments=freed.empty_segments,
        )
