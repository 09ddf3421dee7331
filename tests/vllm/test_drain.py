"""The shutdown of an engine in one process ends, whatever hangs, and no sooner than it must."""

import pytest
from fake_clock import FakeClock

pytest.importorskip("vllm", reason="vLLM is not installed")

from tierstore_vllm.drain import drain
from tierstore_vllm.worker import DRAIN_SECONDS

pytestmark = pytest.mark.vllm


class Halves:
    """Both halves: some messages left, each of which takes some seconds to be answered."""

    recent_reports = ()

    def __init__(self, message_count, seconds):
        self.clock = FakeClock()
        self.message_count = message_count
        self.seconds = seconds
        self.answers_at = self.clock.now + seconds

    def has_work(self):
        return self.message_count > 0

    def take_missed_reports(self, reports):
        pass

    def plan_idle_step(self):
        pass

    def start_transfers(self, step):
        pass

    def take_results(self):
        pass

    def take_report(self):
        return "report" if self.clock.now >= self.answers_at else None

    def wait(self):
        self.clock.now += 0.5

    def run(self):
        started = self.clock.now
        drain(self, self, clock=self.clock)
        return self.clock.now - started


class Scheduler(Halves):
    def take_report(self, *report):
        if report:
            self.message_count -= 1
            self.answers_at = self.clock.now + self.seconds
            return None
        return super().take_report()


def test_all_that_moves_is_drained():
    halves = Scheduler(message_count=10, seconds=2)
    assert halves.run() == 20
    assert not halves.has_work()


def test_a_drain_that_moves_ends_when_its_time_is_up():
    halves = Scheduler(message_count=1000, seconds=2)
    assert DRAIN_SECONDS <= halves.run() <= DRAIN_SECONDS + 1
    assert halves.has_work()


def test_a_drain_that_does_not_move_ends_sooner():
    halves = Scheduler(message_count=10, seconds=10_000)
    assert halves.run() <= DRAIN_SECONDS / 2
