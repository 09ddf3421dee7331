"""A stack over a device that hangs, refuses and heals in any order, with time that a test moves.

Method: the data plane is a stand-in that answers at once, refuses, or keeps what it was told until
the device heals; a load that hangs is answered as late first. While the tier is out of use,
nothing but trials may reach it. However the device behaved, it is used again once it is sound, and
what memory has is written.
"""

from fake_clock import FakeClock
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tierstore import Manifest, load_config, make_offload_keys
from tierstore.metrics import Counters
from tierstore.testing.spread import spread_hashes
from tierstore.tier.health.breaker import BreakerState
from tierstore.tier.health.tier_health import TRIAL_CHUNKS
from tierstore.tier.opening import open_stack
from tierstore.tier.reservation import ChunkState
from tierstore.transfer import Demote, FailureReason, Load, Release, TransferDone

MANIFEST = Manifest.simple("health", chunk_bytes=4096)
SLOT_COUNT = 48
RECORDED = range(1000, 1064)
PAUSE_SECONDS_MAX = 60.0
DEADLINE_SECONDS = 2.0
SETTLING_STEPS = 400
CHUNK_NUMBERS = st.integers(0, 60)


def keys(numbers):
    return make_offload_keys(MANIFEST.namespace, 0, spread_hashes(numbers))


class HealthMachine(RuleBasedStateMachine):
    paths = None

    @initialize(cascade=st.sampled_from(["write_through", "on_evict", "second_touch"]))
    def open(self, cascade):
        self.clock = FakeClock()
        self.mode = "sound"
        self.hung = []
        self.loads = {}
        tier = {"name": "disk", "backend": "file", "path": str(self.paths("health"))}
        config = load_config(
            {
                "version": 1,
                "primary": {"capacity": f"{SLOT_COUNT * 4096}B", "eviction": "lru"},
                "secondary": [tier | {"capacity": "16MiB", "cascade": cascade}],
            }
        )
        self.counters = Counters()
        self.stack = open_stack(
            config, MANIFEST, rank_count=1, counters=self.counters, clock=self.clock
        )
        cascade = self.stack.cascades[0]
        self.demotes, self.health = cascade.demotes, cascade.health
        for first in range(0, len(RECORDED), 8):
            self.keep(RECORDED[first : first + 8])
            self.stack.demote_coldest(SLOT_COUNT)
            self.stack.touch(keys(RECORDED[first : first + 8]))
            self.settle()

    def teardown(self):
        if hasattr(self, "stack"):
            self.mode = "sound"
            self.heal()
            self.finish()
            self.stack.close()

    @rule(number=CHUNK_NUMBERS, count=st.sampled_from([1, 4, 12]))
    def keep_some(self, number, count):
        held_count, limit = self.demotes.queue.held_count(), TRIAL_CHUNKS
        is_writable = self.health.is_writable
        if not self.health.may_write_soon:
            limit = 0
        self.keep(range(number, number + count))
        self.stack.touch(keys(range(number, number + count)))
        assert is_writable or self.demotes.queue.held_count() <= held_count + limit

    @rule(first=st.integers(0, len(RECORDED) - 12), count=st.sampled_from([1, 12]))
    def load(self, first, count):
        self.clock.now += 0.1
        wanted = keys(RECORDED[first : first + count])
        resident = [key for key in wanted if self.stack.primary.locate([key]) != [None]]
        is_readable = self.health.is_readable
        reservation = self.stack.reserve_load([(0, wanted)], partial=True)
        if reservation is None:
            return
        reading = sum(len(promote.keys) for promote in reservation.promotes)
        assert is_readable or reading <= TRIAL_CHUNKS, "more than a trial"
        assert len(reservation.keys[0]) == len(resident) + reading
        self.carry(
            [Load(job_id=reservation.job_id, parts=(), promotes=reservation.promotes)], reservation
        )

    @rule(mode=st.sampled_from(["hang", FailureReason.IO_ERROR, FailureReason.FULL]))
    def break_down(self, mode):
        if not self.hung:
            self.mode = mode

    @rule()
    def heal(self):
        self.mode = "sound"
        hung, self.hung = self.hung, []
        for command in hung:
            assert self.stack.complete(TransferDone(job_id=command.job_id))

    @rule(seconds=st.sampled_from([1.0, 5.0, 11.0, 70.0]))
    def pass_time(self, seconds):
        self.clock.now += seconds
        self.pump()

    @rule()
    def pump(self):
        assert self.stack.secondaries[0].wait(60)
        is_writable, held_count = self.health.is_writable, self.demotes.queue.held_count()
        commands = self.stack.commands()
        written = sum(len(c.keys) for c in commands if isinstance(c, Demote))
        assert is_writable or written <= held_count, "only what was asked for before may be written"
        if not is_writable and not self.health.is_writable:  # not before, and not in between
            assert self.demotes.queue.held_count() <= held_count + TRIAL_CHUNKS, "more than a trial"
        self.carry(commands)

    @invariant()
    def the_tiers_are_sound(self):
        if not hasattr(self, "stack"):
            return
        assert self.stack.primary.check() == []
        shown = self.counters.snapshot()['tier_state{tier="disk"}']
        assert shown in (0, 1, 2)
        if shown == 0:
            assert self.health.is_writable

    def keep(self, numbers):
        reservation = self.stack.reserve_offload(0, keys(numbers))
        self.stack.finish_offload(reservation)

    def carry(self, commands, reservation=None):
        for command in commands:
            if self.mode == "hang":
                self.hung.append(command)
                if not isinstance(command, Load):
                    continue
                failed = dict.fromkeys(range(self.chunk_count(command)), FailureReason.DEADLINE)
                self.clock.now += DEADLINE_SECONDS if failed else 0
                if not failed:
                    self.hung.pop()
            elif self.mode == "sound":
                failed = {}
            else:
                failed = dict.fromkeys(range(self.chunk_count(command)), self.mode)
            is_ok = not failed and (self.mode == "sound" or not isinstance(command, Release))
            done = TransferDone(job_id=command.job_id, ok=is_ok, failed=failed)
            if isinstance(command, Load):
                self.stack.finish_load(reservation, done)
            else:
                assert self.stack.complete(done)

    def chunk_count(self, command):
        if isinstance(command, Load):
            return sum(len(promote.keys) for promote in command.promotes)
        return len(command.keys) if isinstance(command, Demote) else 0

    def settle(self):
        for _ in range(SETTLING_STEPS):
            self.pump()
            if not self.stack.has_work():
                return
        raise AssertionError("it never ends")

    def finish(self):
        """The device is sound: after the longest pause, everything is used as before."""
        for _ in range(4):
            self.clock.now += PAUSE_SECONDS_MAX
            self.settle()
            left = [text for text in self.demotes.complaints() if "queue_full" not in text]
            assert left == [], "what failed was not tried again"
            for number in RECORDED:
                self.load(min(number - RECORDED[0], 52), 1)
            self.settle()
        assert self.health.state is BreakerState.CLOSED
        assert not self.stack.is_healing()
        self.keep(range(200, 204))
        self.stack.touch(keys(range(200, 204)))
        self.stack.demote_coldest(SLOT_COUNT)
        self.settle()
        assert self.demotes.complaints() == []
        assert None not in self.stack.secondaries[0].locate(keys(range(200, 204)))
        assert self.stack.primary.detached_count == 0
        assert self.stack.check() == []
        states = self.stack.states(keys(range(200, 204)))
        assert states == [ChunkState.RESIDENT] * 4


def test_a_release_that_succeeds_lets_a_write_that_failed_before_it_be_tried(tmp_path):
    """Goal: both are signs of the device, so the doubt about writes ends with the release."""
    machine = HealthMachine()
    machine.paths = lambda _name: tmp_path
    machine.open("write_through")
    machine.break_down(FailureReason.IO_ERROR)
    machine.keep_some(number=0, count=1)
    for _ in range(3):
        machine.pump()
    assert machine.demotes.complaints(), "the write, and the release of its place, have failed"
    machine.break_down("hang")
    machine.pump()
    assert [type(command) for command in machine.hung] == [Release]
    machine.teardown()


def test_a_device_that_fails_in_any_order_is_used_again(tmp_path_factory):
    HealthMachine.paths = tmp_path_factory.mktemp
    HealthMachine.TestCase.settings = settings(
        max_examples=25,
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    HealthMachine.TestCase("runTest").runTest()
