"""Whether one tier is worth asking and worth writing to: a breaker for each direction.

What stops reads stops writes too, but not the other way round: the records of a device that is full
or read-only are as good as ever. A device on which writes stand still stops both.

    evidence                                  reads              writes
    records arrived, or were looked at        succeed            recover, if a hang stopped them
    hung reads came back                      recover            recover, if a hang stopped them
    a read missed the deadline, none came     trip               trip
    reads failed                              fail               trip, if reads tripped
    records were published                    recover, if none   succeed
                                              hangs
    a write failed, the catalog failed                           fail
    bytes were given back                     recover, if a      succeed, if a hang stopped them,
                                              hang stopped them  or if such a call failed last
    bytes could not be given back                                fail
    writes stand still, and reads too         trip               trip
"""

import logging
from collections.abc import Collection

from tierstore.bounded_log import bounded
from tierstore.clock import Clock
from tierstore.config import IoConfig
from tierstore.metrics import Counters, Metric
from tierstore.tier.health.breaker import BreakerState
from tierstore.tier.health.coupled_breakers import HANGING, CoupledBreakers
from tierstore.tier.health.standstill import Standstill
from tierstore.tier.secondary import SecondaryTier
from tierstore.transfer import FailureReason

__all__ = ["TRIAL_CHUNKS", "TierHealth", "worst_reason"]

_logger = bounded(logging.getLogger(__name__))

TRIAL_CHUNKS = 8
"""As many chunks, at most, go through as a trial: they hold as many slots if it hangs."""

_UNLIMITED = 1 << 62

_FAILING = (FailureReason.IO_ERROR, FailureReason.FULL)
_ANSWERED = (FailureReason.ABSENT, FailureReason.CORRUPT)
"""What is wrong with the record and not with its device, which has answered."""


class TierHealth:
    """What is known of one tier's device. One thread."""

    def __init__(
        self, tier: SecondaryTier, name: str, config: IoConfig, clock: Clock, counters: Counters
    ) -> None:
        """Begin with a sound tier, which says of itself whether `is_open` and `is_stuck`."""
        self._tier = tier
        self._name = name
        self._clock = clock
        self._breakers = CoupledBreakers(config.breaker, clock)
        self._reads, self._writes = self._breakers.reads, self._breakers.writes
        self._standstill = Standstill(config.deadline_seconds, clock)
        self._read_at = clock.seconds()
        """When records were last read well."""
        self._hung_count = 0
        self._is_release_failing = False
        """What failed last could not give bytes back."""
        self._shown_state = BreakerState.CLOSED
        self._shown = (BreakerState.CLOSED, BreakerState.CLOSED)
        self._state = counters.tally(Metric.TIER_STATE, label=name)
        self._trips = counters.tally(Metric.TIER_TRIPS, label=name)

    # What may be done

    @property
    def is_open(self) -> bool:
        """Whether the tier is in reach."""
        return self._tier.is_open

    @property
    def is_readable(self) -> bool:
        """Whether the tier may be asked for any number of records."""
        return self._reads.is_closed and self.is_open

    @property
    def is_writable(self) -> bool:
        """Whether any number of chunks may go down."""
        return self._writes.is_closed and self.is_open

    @property
    def state(self) -> BreakerState:
        """The worse of both directions; open also while the tier is out of reach."""
        if not self.is_open:
            return BreakerState.OPEN
        return self._breakers.state

    def read_count_max(self) -> int:
        """Return how many chunks may be asked for now."""
        if self._tier.is_stuck:
            self._breakers.trip(FailureReason.STALLED)
        if self.is_readable:
            return _UNLIMITED
        if not self.is_open or not self._reads.allows_trial:
            return 0
        # No request waits for a write, so that goes first, unless reads alone are in doubt.
        is_told_soon = self._writes.is_trial_under_way and not self._hung_count
        return 0 if is_told_soon else TRIAL_CHUNKS

    def write_count_max(self) -> int:
        """Return how many chunks may go down now."""
        if self.is_writable:
            return _UNLIMITED
        return TRIAL_CHUNKS if self.is_open and self._writes.allows_trial else 0

    def release_count_max(self) -> int:
        """Return how many releases may be tried now: a full device takes all of them."""
        if not self.is_open:
            return 0
        if self._writes.is_closed or self._writes.cause is FailureReason.FULL:
            return _UNLIMITED
        return int(self._writes.state is BreakerState.HALF_OPEN)

    @property
    def allows_write_trial(self) -> bool:
        """Whether some of what failed should be tried, to see whether the tier is back."""
        return self.is_open and self._writes.allows_trial

    @property
    def is_write_failing(self) -> bool:
        """Whether the last write failed, a pause ago, without putting the tier out of use."""
        return self.is_open and self._writes.is_failing

    @property
    def is_write_doubted(self) -> bool:
        """Whether the last write failed."""
        return self._writes.failure_count > 0

    @property
    def may_write_soon(self) -> bool:
        """Whether waiting for what goes down makes sense: not while nothing is tried."""
        return self.is_open and self._writes.state is not BreakerState.OPEN

    @property
    def write_return_count(self) -> int:
        """How often writes were let through again after they were stopped."""
        return self._writes.close_count

    @property
    def write_cause(self) -> FailureReason:
        """Why nothing is written now."""
        return self._breakers.write_cause

    @property
    def is_standing_still(self) -> bool:
        """Whether the tier is out of use because nothing came back."""
        return not self.is_writable and self.write_cause in HANGING

    @property
    def trouble(self) -> str:
        """What is wrong with a tier that is not writable, in words."""
        if not self.is_open:
            return "is not open"
        return "has not moved" if self.is_standing_still else "refuses writes"

    @property
    def has_stalled(self) -> bool:
        """Whether writes stood still for a deadline since `forget_stall`."""
        return self._standstill.has_stalled

    def forget_stall(self) -> None:
        """Take note that the last stall was dealt with."""
        self._standstill.has_stalled = False

    # What was done

    def begin_read(self) -> None:
        """Take note of reads that were begun."""
        self._reads.begin_trial()

    def begin_write_trial(self) -> bool:
        """Take note of writes that are begun; return whether they are a trial."""
        if self._writes.is_closed:
            return False
        self._writes.begin_trial()
        return True

    def retry_now(self) -> None:
        """Let writes be tried at once: a caller wants to know."""
        self._writes.retry_now()
        self._standstill.end()
        self._show()

    def end_read(
        self, arrived_count: int, failed: Collection[FailureReason], begun_at: float
    ) -> None:
        """Take the outcome of one command's reads of this tier, which began at `begun_at`."""
        if arrived_count or any(reason in _ANSWERED for reason in failed):
            self._read_at = self._clock.seconds()
            self._standstill.end()
            self._reads.succeed()
            self._breakers.recover_writes()
        elif any(reason in HANGING for reason in failed):
            if self._read_at > begun_at:  # others came meanwhile
                self._breakers.fail_reads(FailureReason.DEADLINE)
            else:
                self._breakers.trip(_first(failed, HANGING))
        elif any(reason in _FAILING for reason in failed):
            self._standstill.end()
            self._breakers.fail_reads(_first(failed, _FAILING))
        else:
            self._reads.postpone()
        self._show()

    def hang(self, chunk_count: int) -> None:
        """Take note of reads that go on although they were answered as late."""
        self._hung_count += chunk_count

    def end_hang(self, chunk_count: int, failed: Collection[FailureReason]) -> None:
        """Take the outcome of reads that hung: those that failed, of so many."""
        self._hung_count -= chunk_count
        self._standstill.end()
        if len(failed) < chunk_count or any(reason in _ANSWERED for reason in failed):
            self._reads.recover()
            self._breakers.recover_writes()
        elif any(reason in _FAILING for reason in failed):
            self._breakers.fail_reads(_first(failed, _FAILING))
        self._show()

    def note_moved(self) -> None:
        """Take note that a write was answered, whatever became of it."""
        self._standstill.end()

    def note_written(self) -> None:
        """Take note of chunks that were written and published."""
        self._standstill.end()
        self._is_release_failing = False
        self._writes.succeed()
        if not self._reads.is_closed and not self._hung_count:
            self._reads.recover()
        self._show()

    def note_released(self) -> None:
        """Take note of bytes that were given back, which a full or failing device does as well.

        It shows that the device does not hang, and that it gives bytes back again.
        """
        self._standstill.end()
        was_hanging = not self._writes.is_closed and self.write_cause in HANGING
        if was_hanging or self._is_release_failing:
            self._is_release_failing = False
            self._writes.succeed()
        is_hanging = not self._reads.is_closed and self._reads.cause in HANGING
        if is_hanging and not self._hung_count:
            self._reads.recover()
        self._show()

    def note_unreleased(self) -> None:
        """Take note of bytes that could not be given back: as a trial only if there is no other."""
        self._standstill.end()
        if not self._writes.is_trial_under_way:
            self._is_release_failing = True
            self._writes.fail(FailureReason.IO_ERROR)
            self._show()

    def note_refused(self, reason: FailureReason, *, is_trial: bool) -> None:
        """Take note of writes that failed, or were refused; most reasons say nothing of a device.

        `is_trial`: they were begun since the tier was tried last. A refusal because of the tier's
        capacity is no failure: do not tell of it as `FULL`.
        """
        self._standstill.end()
        is_trial = is_trial and self._writes.is_trial_under_way
        if not is_trial and not self._writes.is_closed:
            return  # it began before
        if reason in _FAILING:
            self._breakers.is_coupled = self._is_release_failing = False
            self._writes.fail(reason)
        else:
            self._writes.postpone()
        self._show()

    def look(self, *, is_writing: bool, is_waiting: bool) -> None:
        """Look at what is under way, as often as answers are asked for.

        `is_writing`: the device was told to write, or to give bytes back, and has not answered.
        `is_waiting`: something waits for the catalog.
        """
        is_trial = self._writes.is_trial_under_way
        is_expected = is_writing or (is_trial and is_waiting)
        if self._standstill.look(is_expected=is_expected):
            self._breakers.stand_still(is_writing=is_writing)
        elif not is_expected and not is_waiting:
            self._writes.postpone()  # the trial is gone: a reset, or there was nothing to write
        self._show()

    def _show(self) -> None:
        """Bring the metrics up to date, and log what has changed."""
        shown = (self._reads.state, self._writes.state)
        if shown != self._shown:
            before, now = max(self._shown), max(shown)
            self._shown = shown
            if before is BreakerState.CLOSED:
                self._trips.add(1)
            self._log(shown, is_news=before is BreakerState.CLOSED or now is BreakerState.CLOSED)
        state = self.state
        if state is not self._shown_state:
            self._state.add(state - self._shown_state)
            self._shown_state = state

    def _log(self, shown: tuple[BreakerState, BreakerState], *, is_news: bool) -> None:
        """Log a change of state: loudly whether the tier is in use, quietly what trials show."""
        causes = {
            breaker.cause.value
            for breaker in (self._reads, self._writes)
            if breaker.cause is not None and not breaker.is_closed
        }
        retry_seconds = [
            breaker.retry_seconds
            for breaker in (self._reads, self._writes)
            if breaker.state is BreakerState.OPEN
        ]
        _logger.log(
            logging.WARNING if is_news else logging.INFO,
            "tier %s: tier=%s reads=%s writes=%s cause=%s retry_seconds=%.3g",
            "in use" if max(shown) is BreakerState.CLOSED else "out of use",
            self._name,
            *(state.name.lower() for state in shown),
            ",".join(sorted(causes)) or "none",
            min(retry_seconds, default=0.0),
        )


def _first(failed: Collection[FailureReason], wanted: Collection[FailureReason]) -> FailureReason:
    return next(reason for reason in failed if reason in wanted)


def worst_reason(reasons: Collection[FailureReason]) -> FailureReason:
    """Return the reason that says most about the device."""
    for reason in (FailureReason.IO_ERROR, FailureReason.FULL):
        if reason in reasons:
            return reason
    return next(iter(reasons))
