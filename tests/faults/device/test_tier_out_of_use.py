"""A tier whose device hangs, refuses or is full: memory goes on, and the tier is used again.

Method: a device with a switch below a real store. What a hung tier may cost is counted in reads
and writes that reach the device, and in waits of a deadline, never in seconds that pass quickly.
"""

import contextlib
import re
import threading
import time

import pytest
from store_kit import Chunks, config_of
from waiting import within_seconds

from tierstore import TierStore
from tierstore.backend.opening import open_backend
from tierstore.embedded.planes import Patience
from tierstore.errors import BackendError
from tierstore.testing.faults import ReadFaults, unreadable_opener
from tierstore.transfer import FailureReason

CHUNKS = Chunks(65_536)
SLOT_COUNT = 32
DEADLINE_SECONDS = 1.0
BREAKER = {"failures": 3, "retry_after": "200ms", "retry_after_max": "800ms"}
PATIENCE = Patience(put_seconds=60, flush_seconds=60, close_seconds=1)
IO_ERROR, FULL = FailureReason.IO_ERROR, FailureReason.FULL


class Device:
    """Works, refuses for a reason, or hangs; counts what reaches it."""

    def __init__(self):
        self.reason = None
        self.gate = None
        self.read_count = self.write_count = self.release_count = 0
        self.reads_fail = True

    def open(self, config, manifest, **ranks):
        self.backend = open_backend(config, manifest, **ranks)
        return self

    def hang(self):
        self.gate = threading.Event()

    def heal(self):
        gate, self.gate, self.reason = self.gate, None, None
        if gate is not None:
            gate.set()

    def _reason(self):
        gate = self.gate
        if gate is not None:
            gate.wait()
        return self.reason

    def read(self, records):
        self.read_count += 1
        reason = self._reason()
        if reason is not None and self.reads_fail:
            return dict.fromkeys(range(len(records)), reason)
        return self.backend.read(records)

    def write(self, records):
        self.write_count += 1
        reason = self._reason()
        if reason is not None:
            return dict.fromkeys(range(len(records)), reason)
        return self.backend.write(records)

    def release(self, runs, empty_segments):
        self.release_count += 1
        return self._reason() or self.backend.release(runs, empty_segments)

    def __getattr__(self, name):
        return getattr(self.backend, name)


def small_store(
    path, *, cascade="write_through", backend="file", breaker=BREAKER, capacity="32MiB"
):
    io = {"threads": 8, "deadline": f"{DEADLINE_SECONDS:g}s", "breaker": breaker}
    config = config_of(
        path / "tier", backend=backend, primary="2MiB", capacity=capacity, cascade=cascade, io=io
    )
    config["primary"]["eviction"] = "lru"
    return config


@contextlib.contextmanager
def opened(config, device, patience=PATIENCE):
    """Open a store over a device that works again when the test ends."""
    store = TierStore.open(config, CHUNKS.manifest, open_backend=device.open, patience=patience)
    try:
        yield store
    finally:
        device.heal()
        store.close()


def fill(config, numbers):
    """Let a tier have chunks that no memory has."""
    tiers = [tier | {"cascade": "write_through"} for tier in config["secondary"]]
    with CHUNKS.open(config | {"secondary": tiers}) as store:
        for first in range(0, len(numbers), 8):
            CHUNKS.put(store, numbers[first : first + 8])
            store.flush()


def state(store):
    return store.stats().counters['tier_state{tier="disk"}']


def trips(store):
    return store.stats().counters['tier_trips_total{tier="disk"}']


def held_slots(store):
    primary = store._stack.primary
    return len(primary.arriving) + primary.detached_count


@pytest.mark.parametrize("cascade", ["write_through", "on_evict", "second_touch"])
def test_memory_goes_on_while_a_disk_hangs_and_the_disk_is_used_again(tmp_path, cascade):
    config = small_store(tmp_path, cascade=cascade)
    fill(config, range(200, 280))
    device = Device()
    with opened(config, device) as store:
        assert state(store) == 0
        resident = range(16)
        assert CHUNKS.put(store, resident) == 16
        with contextlib.suppress(BackendError):
            store.flush()
        device.hang()
        started = time.monotonic()
        for first in range(200, 280, 8):
            assert CHUNKS.found(store, range(first, first + 8)) == []
        # One deadline for the first of them, and perhaps some for trials; not one for each.
        assert time.monotonic() - started < 8 * DEADLINE_SECONDS
        assert trips(store) == 1
        assert held_slots(store) <= SLOT_COUNT // 4
        assert CHUNKS.found(store, resident) == list(resident)
        assert CHUNKS.put(store, range(100, 108)) == 8
        assert CHUNKS.found(store, [*resident, *range(100, 108)]) == [*resident, *range(100, 108)]
        for first in range(300, 400, 20):
            assert CHUNKS.put(store, range(first, first + 20)) == 20
            assert CHUNKS.found(store, range(first, first + 20)) == list(range(first, first + 20))
        device.heal()
        assert within_seconds(lambda: state(store) == 0)
        assert within_seconds(
            lambda: all(CHUNKS.found(store, [n]) == [n] for n in range(200, 280, 8))
        )
        store.flush()
        assert held_slots(store) == 0
        assert store.check() == []


@pytest.mark.parametrize("ends", ["before it is noticed", "after that"])
@pytest.mark.parametrize("cascade", ["write_through", "second_touch"])
def test_what_waits_for_a_device_that_hangs_is_written_without_a_call_when_it_is_back(
    tmp_path, cascade, ends
):
    device = Device()
    config = small_store(tmp_path, cascade=cascade)
    config["secondary"][0]["io"]["deadline"] = "50ms" if ends == "after that" else "1s"
    patience = Patience(put_seconds=0.1, close_seconds=1)
    numbers = range(24)
    with opened(config, device, patience) as store:
        device.hang()
        for number in numbers:  # more than the write queue holds
            assert CHUNKS.put(store, [number]) == 1
            assert CHUNKS.put(store, [number]) == 1
        if ends == "after that":
            assert within_seconds(lambda: state(store) == 2)
            assert CHUNKS.found(store, numbers) == list(numbers)
        else:
            begun = time.monotonic()
            assert within_seconds(lambda: time.monotonic() - begun > 2)
        device.heal()
        recorded = store._stack.secondaries[0].locate
        assert within_seconds(lambda: None not in recorded(CHUNKS.keys(numbers)))
        assert within_seconds(lambda: state(store) == 0)
        store.flush()
        assert store.check() == []


@pytest.mark.parametrize("reason", [IO_ERROR, FULL])
@pytest.mark.parametrize("cascade", ["write_through", "on_evict", "second_touch"])
def test_what_a_device_refused_is_written_without_a_call_when_it_is_back(tmp_path, cascade, reason):
    device = Device()
    config = small_store(tmp_path, cascade=cascade)
    with opened(config, device) as store:
        device.reason = reason
        numbers = range(20)
        for number in numbers:
            assert CHUNKS.put(store, [number]) == 1
            assert CHUNKS.put(store, [number]) == 1
        with pytest.raises(BackendError, match=f"tier disk: .*{reason.value}") as caught:
            store.flush()
        # Some may have found the write queue full before.
        assert sum(map(int, re.findall(r"(\d+) chunks", str(caught.value)))) == 20
        for first in range(0, 40, 2):  # more reasons to fail
            CHUNKS.put(store, [first % 20])
        with contextlib.suppress(BackendError):
            store.flush()
        device.heal()
        recorded = store._stack.secondaries[0].locate
        assert within_seconds(lambda: None not in recorded(CHUNKS.keys(numbers)))
        assert within_seconds(lambda: state(store) == 0)
        store.flush()
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, numbers) == list(numbers)


def test_a_device_that_refuses_is_asked_at_the_pace_of_trials_only(tmp_path):
    breaker = {"failures": 3, "retry_after": "60s", "retry_after_max": "60s"}
    config = small_store(tmp_path, breaker=breaker)
    fill(config, range(200, 240))
    device = Device()
    with opened(config, device) as store:
        device.reason = IO_ERROR
        CHUNKS.found(store, range(200, 240))
        assert within_seconds(lambda: state(store) == 2)
        assert trips(store) == 1
        for first in range(100):
            CHUNKS.put(store, [first])
        # A write, or a release, is tried at once: perhaps it was a trouble of reads alone.
        assert within_seconds(lambda: not store._stack.has_work())
        CHUNKS.put(store, [500])
        asked = device.read_count, device.write_count
        for first in range(100):
            assert CHUNKS.put(store, [1000 + first]) == 1
            assert CHUNKS.found(store, range(200, 240)) == []
        assert (device.read_count, device.write_count) == asked
        assert store.match_prefix(CHUNKS.keys(range(200, 240))).chunk_count == 0


@pytest.mark.parametrize("reason", [IO_ERROR, FULL])
def test_a_device_that_takes_no_writes_is_still_read(tmp_path, reason):
    config = small_store(tmp_path)
    numbers = range(200, 280)
    fill(config, numbers)
    device = Device()
    device.reads_fail = False
    with opened(config, device) as store:
        device.reason = reason
        for number in range(20):
            assert CHUNKS.put(store, [number]) == 1
        assert within_seconds(lambda: state(store) >= 1)
        write_count = device.write_count
        for first in range(200, 280, 8):
            assert CHUNKS.found(store, range(first, first + 8)) == list(range(first, first + 8))
        assert device.write_count - write_count < 10


def test_one_record_that_always_fails_trips_nothing(tmp_path):
    config = small_store(tmp_path)
    numbers = range(200, 280)
    fill(config, numbers)
    faults = ReadFaults()
    faults.fail(CHUNKS.keys(numbers[:1]), IO_ERROR)
    faults.fail(CHUNKS.keys(numbers[1:30]), FailureReason.CORRUPT)
    faults.fail(CHUNKS.keys(numbers[30:50]), FailureReason.ABSENT)
    opener = unreadable_opener({"disk": faults})
    with TierStore.open(config, CHUNKS.manifest, open_backend=opener) as store:
        for number in numbers:
            CHUNKS.found(store, [number])
        assert (state(store), trips(store)) == (0, 0)
        assert CHUNKS.found(store, numbers[50:]) == list(numbers[50:])


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("share", [0.125, 0.25, 1])
def test_hung_reads_hold_no_more_than_their_share_from_the_first_moment(tmp_path, threads, share):
    config = small_store(tmp_path)
    config["secondary"][0]["io"] |= {"threads": threads, "deadline": "300ms"}
    config["secondary"][0]["io"]["breaker"] = BREAKER | {"hung_share": share}
    fill(config, range(200, 280))
    device = Device()
    with opened(config, device) as store:
        device.hang()
        for _ in range(3):
            assert CHUNKS.found(store, range(200, 280)) == []
            assert held_slots(store) <= SLOT_COUNT * share
        device.heal()
        assert within_seconds(lambda: held_slots(store) == 0)
        assert store.check() == []


def test_one_line_is_logged_when_a_tier_goes_and_one_when_it_comes_back(tmp_path, caplog):
    breaker = {"failures": 3, "retry_after": "100ms", "retry_after_max": "60s"}
    config = small_store(tmp_path, breaker=breaker)
    fill(config, range(200, 280))
    device = Device()
    with opened(config, device) as store:
        device.reason = IO_ERROR
        for _ in range(20):
            for first in range(200, 280, 8):
                CHUNKS.found(store, range(first, first + 8))
        device.heal()
        assert within_seconds(lambda: CHUNKS.found(store, [200, 210]) and state(store) == 0)
    lines = [
        r.getMessage() for r in caplog.records if r.name == "tierstore.tier.health.tier_health"
    ]
    loud = [line for line in lines if "tier=disk" in line]
    assert loud[0].startswith("tier out of use: tier=disk reads=open")
    assert "cause=io_error" in loud[0]
    assert "retry_seconds=0.1" in loud[0]
    assert loud[-1].startswith("tier in use: tier=disk")
    assert len(loud) < 20


def test_a_tier_that_hangs_leaves_the_other_to_answer(tmp_path):
    config = small_store(tmp_path)
    (first,) = config["secondary"]
    config["secondary"].append(first | {"name": "second", "path": str(tmp_path / "second")})
    numbers = range(200, 240)
    fill(config, numbers)
    faults = ReadFaults()
    faults.hang(CHUNKS.keys(numbers))
    opener = unreadable_opener({"disk": faults})
    with TierStore.open(config, CHUNKS.manifest, open_backend=opener) as store:
        try:
            found = [
                n
                for first in range(200, 240, 8)
                for n in CHUNKS.found(store, range(first, first + 8))
            ]
            assert found == list(numbers)
            assert store.stats().counters['tier_state{tier="second"}'] == 0
            assert state(store) > 0
        finally:
            faults.heal()
