"""A circuit breaker: whether something that failed is worth asking again. No lock, no thread.

       failures in a row, or `trip`
CLOSED ----------------------------> OPEN <-----------+
  ^                                   | the pause     | the trial failed:
  |                                   v is over       | the pause doubles
  +------------------------------ HALF_OPEN ----------+
           the trial succeeded
"""

import math
from enum import IntEnum

from tierstore.clock import Clock
from tierstore.config import BreakerConfig
from tierstore.transfer import FailureReason

__all__ = ["Breaker", "BreakerState"]


class BreakerState(IntEnum):
    """Whether operations go through; the values of a metric."""

    CLOSED = 0
    """All of them."""
    HALF_OPEN = 1
    """One trial."""
    OPEN = 2
    """None."""


class Breaker:
    """Counts failures in a row and decides when to try again. One thread.

    Trips that follow each other soon make longer and longer pauses, even if something let the
    breaker close in between: what works only at times must not be tried at every turn.
    """

    def __init__(self, config: BreakerConfig, clock: Clock) -> None:
        """Start closed."""
        self._config = config
        self._clock = clock
        self._state = BreakerState.CLOSED
        self._failure_count = 0
        self._failed_at = -math.inf
        self._pause_seconds = 0.0
        """The last one."""
        self._retry_at = 0.0
        self._closed_at = -math.inf
        self._is_recovering = False
        """It is open, and `recover` was called since."""
        self.is_trial_under_way = False
        self.close_count = 0
        """How often it has closed."""
        self.cause: FailureReason | None = None
        """Why it tripped last."""

    @property
    def state(self) -> BreakerState:
        """The state now: time alone makes an open breaker half-open."""
        if self._state is BreakerState.OPEN and self._clock.seconds() >= self._retry_at:
            if self._is_recovering:
                self._close()
            else:
                self._state = BreakerState.HALF_OPEN
                self.is_trial_under_way = False
        return self._state

    @property
    def is_closed(self) -> bool:
        """Whether everything goes through."""
        return self._state is BreakerState.CLOSED or self.state is BreakerState.CLOSED

    @property
    def allows_trial(self) -> bool:
        """Whether one trial may go through now."""
        return self.state is BreakerState.HALF_OPEN and not self.is_trial_under_way

    @property
    def retry_seconds(self) -> float:
        """How long it stays open if nothing happens."""
        if self.state is not BreakerState.OPEN:
            return 0.0
        return self._retry_at - self._clock.seconds()

    @property
    def failure_count(self) -> int:
        """How many operations in a row have failed while it is closed."""
        return self._failure_count

    @property
    def is_failing(self) -> bool:
        """Whether it is closed although the last operation failed, a pause or longer ago."""
        return (
            self._failure_count > 0
            and self.is_closed
            and self._clock.seconds() - self._failed_at >= self._config.retry_after_seconds
        )

    def begin_trial(self) -> None:
        """Take note that a trial is under way, if one was due."""
        self.is_trial_under_way = self.allows_trial

    def succeed(self) -> None:
        """Take note of an operation that succeeded."""
        self._failure_count = 0
        if self.state is BreakerState.HALF_OPEN:
            self._close()
        else:
            self.recover()

    def recover(self) -> None:
        """Take note of something that speaks for closing, but is no trial.

        It closes at once after the first trip. After others it closes when the pause is over.
        """
        is_repeated = self._pause_seconds > self._config.retry_after_seconds
        if self.state is BreakerState.OPEN and is_repeated:
            self._is_recovering = True
        elif self._state is not BreakerState.CLOSED:
            self._close()

    def fail(self, reason: FailureReason) -> None:
        """Take note of an operation that failed."""
        self._failed_at = self._clock.seconds()
        if self.is_closed:
            self._failure_count += 1
            if self._failure_count >= self._config.failures:
                self.trip(reason)
        else:
            self.trip(reason)

    def trip(self, reason: FailureReason) -> None:
        """Open now, or take note of a trial that failed."""
        self._is_recovering = False
        if self.state is BreakerState.OPEN:
            return  # the operation began before
        now = self._clock.seconds()
        is_soon = now - self._closed_at <= self._pause_seconds
        if self._state is BreakerState.HALF_OPEN or is_soon:
            longest = self._config.retry_after_max_seconds
            self._pause_seconds = min(2 * self._pause_seconds, longest)
        else:
            self._pause_seconds = self._config.retry_after_seconds
        self._open(reason)

    def postpone(self) -> None:
        """Take note of a trial that showed nothing: the next one comes after the same pause."""
        if self.is_trial_under_way and self.cause is not None:
            self._open(self.cause)

    def retry_now(self) -> None:
        """Let a trial go through at once: a caller wants to know."""
        if self.state is BreakerState.OPEN:
            self._state = BreakerState.HALF_OPEN
            self.is_trial_under_way = False

    def _open(self, reason: FailureReason) -> None:
        self._state = BreakerState.OPEN
        self._retry_at = self._clock.seconds() + self._pause_seconds
        self._failure_count = 0
        self.is_trial_under_way = False
        self.cause = reason

    def _close(self) -> None:
        self._state = BreakerState.CLOSED
        self._closed_at = self._clock.seconds()
        self.close_count += 1
        self._failure_count = 0
        self._is_recovering = False
        self.is_trial_under_way = False
