"""The breaker against a list of what happened, with time that passes when the model says so.

What must hold is said in terms of the history: how long it may be open, what may have tripped it,
and that it never stays open once asked after the longest pause.
"""

from fake_clock import FakeClock
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierstore.config import BreakerConfig
from tierstore.tier.health.breaker import Breaker, BreakerState
from tierstore.transfer import FailureReason

CONFIG = BreakerConfig(failures=3, retry_after_seconds=5.0, retry_after_max_seconds=30.0)
REASONS = st.sampled_from([FailureReason.IO_ERROR, FailureReason.FULL])


class BreakerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.clock = FakeClock()
        self.breaker = Breaker(CONFIG, self.clock)
        self.failures_in_a_row = 0
        self.opened_at = None
        self.failed_trials = 0
        self.saw_trip = False

    def note(self, before):
        """Follow a change of state."""
        state = self.breaker.state
        if state is BreakerState.OPEN and before is not BreakerState.OPEN:
            self.opened_at = self.clock.now
        if state is BreakerState.CLOSED:
            self.opened_at = None

    @rule()
    def succeed(self):
        before = self.breaker.state
        self.breaker.succeed()
        self.failures_in_a_row = 0
        if before is not BreakerState.OPEN:
            assert self.breaker.state is BreakerState.CLOSED
        self.failed_trials = 0 if before is BreakerState.HALF_OPEN else self.failed_trials
        self.note(before)

    @rule(reason=REASONS)
    def fail(self, reason):
        before = self.breaker.state
        self.breaker.fail(reason)
        if before is BreakerState.CLOSED:
            self.failures_in_a_row += 1
            should_trip = self.failures_in_a_row == CONFIG.failures
            assert (self.breaker.state is BreakerState.OPEN) is should_trip
            if should_trip:
                self.failures_in_a_row = 0
                assert self.breaker.cause is reason
        else:
            assert self.breaker.state is BreakerState.OPEN
        if before is BreakerState.HALF_OPEN:
            self.failed_trials += 1
            # Each failed trial doubles the pause, so this is the least that it may be.
            least = CONFIG.retry_after_seconds * 2**self.failed_trials
            assert self.breaker.retry_seconds >= min(least, CONFIG.retry_after_max_seconds)
        self.note(before)

    @rule()
    def trip(self):
        before = self.breaker.state
        self.breaker.trip(FailureReason.DEADLINE)
        assert self.breaker.state is BreakerState.OPEN
        self.failures_in_a_row = 0
        self.note(before)

    @rule()
    def recover(self):
        before = self.breaker.state
        self.breaker.recover()
        if before is BreakerState.HALF_OPEN:
            assert self.breaker.state is BreakerState.CLOSED
            self.failed_trials = 0
        self.note(before)

    @precondition(lambda self: self.breaker.allows_trial)
    @rule()
    def begin_trial(self):
        self.breaker.begin_trial()
        assert not self.breaker.allows_trial, "two trials at once"

    @precondition(lambda self: self.breaker.is_trial_under_way)
    @rule()
    def postpone(self):
        pause = CONFIG.retry_after_max_seconds
        self.breaker.postpone()
        assert self.breaker.state is BreakerState.OPEN
        assert 0 < self.breaker.retry_seconds <= pause
        self.opened_at = self.clock.now

    @rule()
    def ask_at_once(self):
        before = self.breaker.state
        self.breaker.retry_now()
        assert self.breaker.state is not BreakerState.OPEN
        self.note(before)

    @rule(seconds=st.sampled_from([0.125, 4.875, 5.0, 10.0, 29.0, 30.0, 100.0]))
    def pass_time(self, seconds):
        before = self.breaker.state
        self.clock.now += seconds
        if seconds >= CONFIG.retry_after_max_seconds:
            assert self.breaker.state is not BreakerState.OPEN
        if self.breaker.state is BreakerState.CLOSED is not before:
            self.failed_trials = 0
            self.failures_in_a_row = 0
        self.note(before)

    @invariant()
    def it_is_open_for_a_bounded_time(self):
        assert self.breaker.retry_seconds <= CONFIG.retry_after_max_seconds
        if self.breaker.state is BreakerState.OPEN:
            assert self.clock.now - self.opened_at < CONFIG.retry_after_max_seconds
            assert not self.breaker.allows_trial
        assert self.breaker.is_closed is (self.breaker.state is BreakerState.CLOSED)
        if self.breaker.is_trial_under_way:
            assert self.breaker.state is BreakerState.HALF_OPEN


TestBreaker = BreakerMachine.TestCase
TestBreaker.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
