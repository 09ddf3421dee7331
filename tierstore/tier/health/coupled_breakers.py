"""The breakers of a tier's two directions: what stops reads stops writes too, not the reverse."""

from tierstore.clock import Clock
from tierstore.config import BreakerConfig
from tierstore.tier.health.breaker import Breaker, BreakerState
from tierstore.transfer import FailureReason

__all__ = ["HANGING", "CoupledBreakers"]

HANGING = (FailureReason.DEADLINE, FailureReason.STALLED)
"""Why a breaker tripped whose device answers nothing, in contrast to one that refuses."""


class CoupledBreakers:
    """One breaker per direction, and why the one for writes is open. No lock, no thread.

    Not one for both: a device that is full or read-only would lose its hits.
    """

    def __init__(self, config: BreakerConfig, clock: Clock) -> None:
        """Start closed."""
        self.reads = Breaker(config, clock)
        self.writes = Breaker(config, clock)
        self.is_coupled = False
        """Whether writes were stopped because reads were."""

    @property
    def state(self) -> BreakerState:
        """The worse of both directions."""
        return max(self.reads.state, self.writes.state)

    @property
    def write_cause(self) -> FailureReason:
        """Why nothing is written now."""
        return self.writes.cause or FailureReason.STALLED

    def fail_reads(self, reason: FailureReason) -> None:
        """Take note of reads that failed; writes are stopped if that stops reads."""
        was_closed = self.reads.is_closed
        self.reads.fail(reason)
        if was_closed and not self.reads.is_closed:
            self._couple_writes(reason)

    def trip(self, reason: FailureReason) -> None:
        """Stop reads, and writes with them."""
        self.reads.trip(reason)
        self._couple_writes(reason)

    def recover_writes(self) -> None:
        """Let writes go on if a success of reads speaks against what has stopped them."""
        if not self.writes.is_closed and (self.is_coupled or self.write_cause in HANGING):
            self.writes.recover()

    def stand_still(self, *, is_writing: bool) -> None:
        """Take note that nothing moves; `is_writing`: the device was told to write."""
        if not is_writing:
            self.writes.fail(FailureReason.STALLED)  # the trial waits for the catalog
        elif self.writes.state is BreakerState.OPEN:
            self.writes.cause = FailureReason.STALLED
        else:
            self.is_coupled = False
            self.writes.trip(FailureReason.STALLED)
            if self.reads.is_closed:
                self.reads.trip(FailureReason.STALLED)

    def _couple_writes(self, reason: FailureReason) -> None:
        """Stop writes, but for a trial at once: perhaps reads alone are in trouble."""
        if self.writes.is_closed:
            self.is_coupled = True
            self.writes.trip(reason)
            self.writes.retry_now()
