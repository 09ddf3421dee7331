"""How the tiers get on with what they were told, and how long a call waits for one of them."""

import math
from dataclasses import dataclass
from typing import Self

from tierstore.transfer import Demote, Release, TransferDone

__all__ = ["TierPace", "TierWait"]

_FAILURES_MAX = 32
"""A device that refuses so many commands in a row, releases tried again among them, is not waited
for: about three seconds, where one that hangs is waited for until time is up."""


@dataclass(slots=True)
class TierPace:
    """How one tier gets on with what it was told."""

    moved_at: float
    """When a command was last carried out, or the tier was opened."""
    failure_count: int = 0
    """Commands that failed since the tier was opened."""
    failure_count_at_move: int = 0
    stands_still: bool = False
    """It was waited for in vain, and has not moved since."""
    cause: str = ""
    """Why the last demote failed, in the system's words; empty: it did not, or that is unknown."""

    unsynced_count: int = 0
    """Chunks that were written since the device was last asked with success to keep all."""

    def note(self, done: TransferDone, order: Demote | Release | None, now: float) -> None:
        """Take note of the answer to a command."""
        if isinstance(order, Demote):
            self.cause = done.cause
            self.unsynced_count += len(order.keys) - len(done.failed)
        if done.ok:
            self.moved_at = now
            self.failure_count_at_move = self.failure_count
            self.stands_still = False
        else:
            self.failure_count += 1


@dataclass(frozen=True, slots=True)
class TierWait:
    """One call's wait for one tier: it lasts as long as the tier moves."""

    pace: TierPace
    since: float
    failure_count: int
    stall_seconds: float
    seconds_max: float

    @classmethod
    def begin(
        cls, pace: TierPace, now: float, stall_seconds: float, seconds_max: float = math.inf
    ) -> Self:
        """Wait from now on, at most `stall_seconds` without and `seconds_max` with a movement."""
        return cls(pace, now, pace.failure_count, stall_seconds, seconds_max)

    def seconds_left(self, now: float) -> float:
        """Return how long the wait lasts from now on if the tier does not move."""
        stalls_at = max(self.since, self.pace.moved_at) + self.stall_seconds
        return min(stalls_at, self.since + self.seconds_max) - now

    def rest_of(self, now: float) -> Self:
        """Return a wait that forgives what failed, for the time that is left."""
        stall_seconds = max(0.0, self.seconds_left(now))
        return type(self).begin(self.pace, now, stall_seconds, stall_seconds)

    def is_vain(self, now: float) -> bool:
        """Return whether the tier has been waited for long enough."""
        known_count = max(self.failure_count, self.pace.failure_count_at_move)
        return self.pace.failure_count - known_count > _FAILURES_MAX or self.seconds_left(now) < 0
