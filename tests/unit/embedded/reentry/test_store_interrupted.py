"""Calls that end others that wait for a tier: interruptions, and a close from elsewhere or within.

Goal: whoever ends a call that waits leaves nothing behind. Method: `overlap_kit`.
"""

import signal
import threading

import pytest
from overlap_kit import (
    CHUNKS,
    PATIENCE,
    RECORDED,
    RESIDENT,
    SECONDS_MAX,
    Call,
    HungBackend,
    HungWrites,
    Reading,
    use_memory,
)
from store_kit import config_of
from waiting import within_seconds

from tierstore import TierStore
from tierstore.embedded.call_gate import Gate
from tierstore.errors import ClosedError, ReentryError
from tierstore.testing.faults import ReadFaults, unreadable_opener

KEY = CHUNKS.keys(RECORDED)[0]


@pytest.mark.parametrize("call", ["get", "put", "flush"])
def test_a_close_ends_calls_of_others_that_wait(tmp_path, call):
    with Reading(tmp_path) as reading:
        reading.hang()
        waiting = [reading.begin_get()]
        if call != "get":
            hung = {
                "put": lambda: CHUNKS.put(reading.store, RECORDED),
                "flush": reading.store.flush,
            }
            waiting.append(Call(hung[call]))
        closers = [Call(reading.store.close) for _ in range(2)]
        for closer in closers:
            closer.result()
        for each in waiting:
            each.join(SECONDS_MAX)
            assert not each.is_alive()
            assert each.error is None or isinstance(each.error, ClosedError)
        with pytest.raises(ClosedError):
            reading.store.stats()


def interrupted(call, act, seconds=0.3):
    """Run a call in this thread; `act` comes in a signal handler while it waits."""

    def handle(_, frame):
        if _waits_outside(frame):
            act()
        else:  # a busy machine: it has not come so far yet
            signal.setitimer(signal.ITIMER_REAL, 0.05)

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _waits_outside(frame):
    """Return whether a thread waits, and lets others in meanwhile."""
    if frame.f_code is not threading.Condition.wait.__code__:
        return False
    while frame is not None and frame.f_code is not Gate.step_out.__code__:
        frame = frame.f_back
    return frame is not None


@pytest.mark.parametrize("call", ["get", "put", "flush"])
def test_an_interruption_of_a_call_that_waits_leaves_a_store_that_is_right(tmp_path, call):
    def interrupt():
        raise KeyboardInterrupt

    hung = HungWrites()
    io = {"write_queue": "512KiB", "deadline": "3600s"}
    config = config_of(tmp_path, primary="4MiB", io=io)
    with CHUNKS.open(config) as store:
        CHUNKS.put(store, RECORDED)
    faults = ReadFaults()
    faults.hang(CHUNKS.keys(RECORDED))

    def opener(*args, **kwargs):
        return HungBackend(unreadable_opener({"disk": faults})(*args, **kwargs), hung)

    store = TierStore.open(config, CHUNKS.manifest, open_backend=opener, patience=PATIENCE)
    calls = {
        "get": lambda: CHUNKS.found(store, RECORDED),
        "put": lambda: CHUNKS.put(store, range(300, 340)),
        "flush": store.flush,
    }
    try:
        CHUNKS.put(store, RESIDENT)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                interrupted(calls[call], interrupt)
            assert Call(lambda: CHUNKS.found(store, RESIDENT)).result() == list(RESIDENT)
            assert CHUNKS.put(store, RESIDENT) == len(RESIDENT)
        faults.heal()
        hung.goes_on.set()
        assert CHUNKS.found(store, [*RECORDED, *RESIDENT]) == [*RECORDED, *RESIDENT]
        store.flush()
        primary = store._stack.primary
        assert not primary.arriving
        assert not primary._pins
        assert store.check() == []
    finally:
        faults.heal()
        hung.goes_on.set()
        store.close()


def test_a_call_from_within_a_call_that_waits_is_refused_and_a_close_comes_at_its_end(tmp_path):
    with Reading(tmp_path) as reading:
        reading.hang()
        errors = []

        def intrude():
            try:
                use_memory(reading.store)
            except ReentryError as error:
                errors.append(error)
            reading.store.close()
            reading.faults.heal()

        begun = Call(lambda: within_seconds(lambda: reading.faults.read_count(KEY) > 0))
        assert interrupted(lambda: CHUNKS.found(reading.store, RECORDED), intrude) == list(RECORDED)
        assert begun.result()
        assert [type(error) for error in errors] == [ReentryError]
        with pytest.raises(ClosedError):
            reading.store.stats()
