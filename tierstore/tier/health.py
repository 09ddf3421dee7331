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
from tierstore.tier.breaker import Breaker, BreakerState
from tierstore.tier.secondary import SecondaryTier
from tierstore.transfer import FailureReason

__all__ = ["STANDSTILL_DEADLINES", "TRIAL_CHUNKS", "TierHealth", "worst_reason"]

_logger = bounded(logging.getLogger(__name__))

TRIAL_CHUNKS = 8
"""As many chunks, at most, go through as a trial: they hold as many slots if it hangs."""

STANDSTILL_DEADLINES = 5
"""Writes of which none is answered for so many deadlines hang. More than one, for they wait behind
reads and behind each other."""

_LOOKS_MIN = 8
"""Times that a control plane must have looked for answers meanwhile: one that is idle looks rarely,
and what it has not fetched is no sign of a hang."""

_UNLIMITED = 1 << 62

_FAILING = (FailureReason.IO_ERROR, FailureReason.FULL)
_HANGING = (FailureReason.DEADLINE, FailureReason.STALLED)
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
        self._reads = Breaker(config.breaker, clock)
        self._writes = Breaker(config.breaker, clock)
        self._deadline_seconds = config.deadline_seconds
        self.has_stalled = False
        """Writes stood still for a deadline since somebody took note of it and cleared this."""
        self._standstill_seconds = STANDSTILL_DEADLINES * config.deadline_seconds
        self._read_at = clock.seconds()
        """When records were last read well."""
        self._hung_count = 0
        self._is_coupled = False
        """Writes were stopped because reads were."""
        self._is_release_failing = False
        """What failed last could not give bytes back."""
        self._stood_seconds = 0.0
        self._looked_at = clock.seconds()
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
        """The worse of both directions; open also without a catalog."""
        if not self.is_open:
            return BreakerState.OPEN
        return max(self._reads.state, self._writes.state)

    def read_count_max(self) -> int:
        """Return how many chunks may be asked for now."""
        if self._tier.is_stuck:
            self._trip_both(FailureReason.STALLED)
        if self.is_readable:
            return _UNLIMITED
        if not self.is_open or not self._reads.allows_trial:
            return 0
        # Nobody waits for a write: what it shows is waited for, unless reads alone are in doubt.
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
        """Whether it is of use to wait for what goes down: not while nothing is tried."""
        return self.is_open and self._writes.state is not BreakerState.OPEN

    @property
    def write_return_count(self) -> int:
        """How often writes were let through again after they were stopped."""
        return self._writes.close_count

    @property
    def write_cause(self) -> FailureReason:
        """Why nothing is written now."""
        return self._writes.cause or FailureReason.STALLED

    @property
    def is_standing_still(self) -> bool:
        """Whether the tier is out of use because nothing came back."""
        return not self.is_writable and self.write_cause in _HANGING

    @property
    def trouble(self) -> str:
        """What is wrong with a tier that is not writable, in words."""
        if not self.is_open:
            return "is not open"
        return "has not moved" if self.is_standing_still else "refuses writes"

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
        """Let writes be tried at once, because somebody wants to know."""
        self._writes.retry_now()
        self._stood_seconds = 0.0
        self._show()

    def end_read(
        self, arrived_count: int, failed: Collection[FailureReason], begun_at: float
    ) -> None:
        """Take the outcome of one command's reads of this tier, which began at `begun_at`."""
        if arrived_count or any(reason in _ANSWERED for reason in failed):
            self._read_at = self._clock.seconds()
            self._stood_seconds = 0.0
            self._reads.succeed()
            self._recover_writes()
        elif any(reason in _HANGING for reason in failed):
            if self._read_at > begun_at:  # others came meanwhile
                self._fail_reads(FailureReason.DEADLINE)
            else:
                self._trip_both(_first(failed, _HANGING))
        elif any(reason in _FAILING for reason in failed):
            self._stood_seconds = 0.0
            self._fail_reads(_first(failed, _FAILING))
        else:
            self._reads.postpone()
        self._show()

    def hang(self, chunk_count: int) -> None:
        """Take note of reads that go on although they were answered as late."""
        self._hung_count += chunk_count

    def end_hang(self, chunk_count: int, failed: Collection[FailureReason]) -> None:
        """Take the outcome of reads that hung: those that failed, of so many."""
        self._hung_count -= chunk_count
        self._stood_seconds = 0.0
        if len(failed) < chunk_count or any(reason in _ANSWERED for reason in failed):
            self._reads.recover()
            self._recover_writes()
        elif any(reason in _FAILING for reason in failed):
            self._fail_reads(_first(failed, _FAILING))
        self._show()

    def note_moved(self) -> None:
        """Take note that a write was answered, whatever became of it."""
        self._stood_seconds = 0.0

    def note_written(self) -> None:
        """Take note of chunks that were written and published."""
        self._stood_seconds = 0.0
        self._is_release_failing = False
        self._writes.succeed()
        if not self._reads.is_closed and not self._hung_count:
            self._reads.recover()
        self._show()

    def note_released(self) -> None:
        """Take note of bytes that were given back, which a full or failing device does as well.

        It shows that the device does not hang, and that it gives bytes back again.
        """
        self._stood_seconds = 0.0
        was_hanging = not self._writes.is_closed and self.write_cause in _HANGING
        if was_hanging or self._is_release_failing:
            self._is_release_failing = False
            self._writes.succeed()
        is_hanging = not self._reads.is_closed and self._reads.cause in _HANGING
        if is_hanging and not self._hung_count:
            self._reads.recover()
        self._show()

    def note_unreleased(self) -> None:
        """Take note of bytes that could not be given back: as a trial only if there is no other."""
        self._stood_seconds = 0.0
        if not self._writes.is_trial_under_way:
            self._is_release_failing = True
            self._writes.fail(FailureReason.IO_ERROR)
            self._show()

    def note_refused(self, reason: FailureReason, *, is_trial: bool) -> None:
        """Take note of writes that failed, or were refused; most reasons say nothing of a device.

        `is_trial`: they were begun since the tier was tried last. A refusal because of the tier's
        capacity is no failure: do not tell of it as `FULL`.
        """
        self._stood_seconds = 0.0
        is_trial = is_trial and self._writes.is_trial_under_way
        if not is_trial and not self._writes.is_closed:
            return  # it began before
        if reason in _FAILING:
            self._is_coupled = self._is_release_failing = False
            self._writes.fail(reason)
        else:
            self._writes.postpone()
        self._show()

    def look(self, *, is_writing: bool, is_waiting: bool) -> None:
        """Look after what is under way, as often as answers are asked for.

        `is_writing`: the device was told to write, or to give bytes back, and has not answered.
        `is_waiting`: something waits for the catalog.
        """
        now = self._clock.seconds()
        elapsed = min(now - self._looked_at, self._standstill_seconds / _LOOKS_MIN)
        self._looked_at = now
        is_trial = self._writes.is_trial_under_way
        if not is_writing and not (is_trial and is_waiting):
            self._stood_seconds = 0.0
            if not is_waiting:
                self._writes.postpone()  # the trial is gone: a reset, or there was nothing to write
        else:
            self._stood_seconds += elapsed
            self.has_stalled = self.has_stalled or self._stood_seconds > self._deadline_seconds
            if self._stood_seconds > self._standstill_seconds:
                self._stood_seconds = 0.0
                self._stand_still(is_writing=is_writing)
        self._show()

    def _stand_still(self, *, is_writing: bool) -> None:
        if not is_writing:
            self._writes.fail(FailureReason.STALLED)  # the trial waits for the catalog
        elif self._writes.state is BreakerState.OPEN:
            self._writes.cause = FailureReason.STALLED
        else:
            self._is_coupled = False
            self._writes.trip(FailureReason.STALLED)
            if self._reads.is_closed:
                self._reads.trip(FailureReason.STALLED)

    def _fail_reads(self, reason: FailureReason) -> None:
        was_closed = self._reads.is_closed
        self._reads.fail(reason)
        if was_closed and not self._reads.is_closed:
            self._couple_writes(reason)

    def _trip_both(self, reason: FailureReason) -> None:
        self._reads.trip(reason)
        self._couple_writes(reason)

    def _couple_writes(self, reason: FailureReason) -> None:
        """Stop writes, but for a trial at once: perhaps reads alone are in trouble."""
        if self._writes.is_closed:
            self._is_coupled = True
            self._writes.trip(reason)
            self._writes.retry_now()

    def _recover_writes(self) -> None:
        if not self._writes.is_closed and (self._is_coupled or self.write_cause in _HANGING):
            self._writes.recover()

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
    """Return the reason that says most of the device."""
    for reason in (FailureReason.IO_ERROR, FailureReason.FULL):
        if reason in reasons:
            return reason
    return next(iter(reasons))
