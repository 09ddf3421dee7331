"""When a breaker opens, for how long, and what closes it."""

import itertools

import pytest
from fake_clock import FakeClock

from tierstore.config import BreakerConfig
from tierstore.tier.health.breaker import Breaker, BreakerState
from tierstore.transfer import FailureReason

CLOSED, HALF_OPEN, OPEN = BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN
IO_ERROR = FailureReason.IO_ERROR
CONFIG = BreakerConfig(failures=3, retry_after_seconds=5.0, retry_after_max_seconds=60.0)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def breaker(clock):
    return Breaker(CONFIG, clock)


def test_it_opens_after_so_many_failures_in_a_row_and_a_success_starts_the_count_anew(breaker):
    for _ in range(10):
        breaker.fail(IO_ERROR)
        breaker.fail(IO_ERROR)
        assert breaker.state is CLOSED
        breaker.succeed()
    for _ in range(3):
        breaker.fail(IO_ERROR)
    assert breaker.state is OPEN
    assert breaker.cause is IO_ERROR
    assert breaker.retry_seconds == 5.0


def test_the_pause_doubles_with_each_trial_that_fails_up_to_the_longest(breaker, clock):
    breaker.trip(IO_ERROR)
    pauses = []
    for _ in range(6):
        pauses.append(breaker.retry_seconds)
        clock.now += pauses[-1] - 0.01
        assert breaker.state is OPEN
        clock.now += 0.01
        assert breaker.state is HALF_OPEN
        breaker.begin_trial()
        assert not breaker.allows_trial
        breaker.fail(IO_ERROR)
    assert pauses == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


def test_a_trial_that_succeeds_closes_it(breaker, clock):
    breaker.trip(IO_ERROR)
    clock.now += 5.0
    breaker.begin_trial()
    breaker.succeed()
    assert breaker.state is CLOSED


def test_the_pause_is_short_again_after_a_good_time(breaker, clock):
    for pause in (5.0, 10.0):
        breaker.trip(IO_ERROR)
        assert breaker.retry_seconds == pause
        clock.now += pause
        breaker.begin_trial()
        breaker.succeed()
    clock.now += 10.1
    breaker.trip(IO_ERROR)
    assert breaker.retry_seconds == 5.0


def test_what_comes_back_by_itself_closes_it_at_once_but_not_at_every_turn(breaker, clock):
    breaker.trip(IO_ERROR)
    breaker.recover()
    assert breaker.state is CLOSED
    open_for = []
    for _ in range(5):
        breaker.trip(IO_ERROR)
        breaker.recover()
        open_for.append(breaker.retry_seconds)
        clock.now += open_for[-1]
        assert breaker.state is CLOSED
    assert open_for == [10.0, 20.0, 40.0, 60.0, 60.0]


def test_a_failure_of_what_began_before_it_opened_is_none_of_the_trial(breaker, clock):
    breaker.trip(IO_ERROR)
    for _ in range(10):
        breaker.fail(IO_ERROR)
    assert breaker.retry_seconds == 5.0


def test_a_trial_that_shows_nothing_is_repeated_after_the_same_pause(breaker, clock):
    breaker.trip(IO_ERROR)
    for _ in range(3):
        clock.now += 5.0
        breaker.begin_trial()
        breaker.postpone()
        assert breaker.state is OPEN
        assert breaker.retry_seconds == 5.0


def test_who_asks_for_it_is_given_a_trial_at_once(breaker):
    breaker.retry_now()
    assert breaker.state is CLOSED
    breaker.trip(IO_ERROR)
    breaker.retry_now()
    assert breaker.allows_trial


def test_a_closed_one_is_failing_from_a_pause_after_its_last_failure(breaker, clock):
    assert not breaker.is_failing
    breaker.fail(IO_ERROR)
    assert not breaker.is_failing
    clock.now += 5.0
    assert breaker.is_failing
    breaker.succeed()
    assert not breaker.is_failing


def test_pauses_are_never_longer_than_the_longest(clock):
    config = BreakerConfig(failures=1, retry_after_seconds=7.0, retry_after_max_seconds=7.0)
    breaker = Breaker(config, clock)
    for _, _ in itertools.product(range(3), range(3)):
        breaker.fail(IO_ERROR)
        assert breaker.retry_seconds == 7.0
        clock.now += 7.0
