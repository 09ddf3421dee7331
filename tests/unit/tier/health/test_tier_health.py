"""What is evidence for and against a tier's device, beyond what a store lets happen at will."""

from types import SimpleNamespace

import pytest
from fake_clock import FakeClock

from tierstore.config import BreakerConfig, IoConfig
from tierstore.metrics import Counters
from tierstore.tier.health.tier_health import TierHealth
from tierstore.transfer import FailureReason

IO_ERROR = FailureReason.IO_ERROR
FAILURE_COUNT = 3


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def health(clock):
    config = IoConfig(breaker=BreakerConfig(failures=FAILURE_COUNT))
    tier = SimpleNamespace(is_open=True, is_stuck=False)
    return TierHealth(tier, "disk", config, clock, Counters())


def refuse_writes(health, count=FAILURE_COUNT):
    for _ in range(count):
        health.note_refused(IO_ERROR, is_trial=False)


def fail_reads(health):
    for _ in range(FAILURE_COUNT):
        health.end_read(0, [IO_ERROR], 0.0)


def test_bytes_given_back_are_no_evidence_that_a_device_writes(health):
    refuse_writes(health)
    assert not health.is_writable
    health.note_released()
    assert not health.is_writable
    health.retry_now()
    assert health.begin_write_trial()
    health.note_released()
    assert not health.is_writable
    health.note_written()
    assert health.is_writable


def test_bytes_given_back_between_writes_that_fail_keep_no_tier_in_use(health):
    for _ in range(FAILURE_COUNT):
        refuse_writes(health, 1)
        health.note_released()
    assert not health.is_writable


def test_bytes_given_back_are_no_evidence_that_a_device_reads(health):
    fail_reads(health)
    assert not health.is_readable
    health.note_released()
    assert not health.is_readable


def test_a_device_that_gives_bytes_back_hangs_no_more(health, clock):
    while health.is_writable:
        health.look(is_writing=True, is_waiting=False)
        clock.now += 1.0
    assert not health.is_readable
    health.note_released()
    assert health.is_writable
    assert health.is_readable


def test_a_device_that_gave_no_bytes_back_is_sound_when_it_does(health):
    for _ in range(FAILURE_COUNT):
        health.note_unreleased()
    assert not health.is_writable
    health.note_released()
    assert health.is_writable
