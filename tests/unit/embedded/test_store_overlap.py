"""Calls of several threads that overlap where one of them waits for a tier.

Goal: what is in memory is had at once, whatever a call of another thread waits for; two calls that
want the same chunk both get it; and whoever ends a call that waits leaves nothing behind.

Method: reads and writes that hang until they are told to go on. A call that came back while another
one still hangs did not wait for it, however long that took.
"""

import signal
import threading

import numpy as np
import pytest
from store_kit import Chunks, config_of
from waiting import within_seconds

from tierstore import TierStore
from tierstore.backend.opening import open_backend
from tierstore.embedded.gate import Gate
from tierstore.embedded.planes import Patience
from tierstore.errors import ClosedError, ReentryError
from tierstore.testing.faults import ReadFaults, unreadable_opener

CHUNKS = Chunks(65_536)
SECONDS_MAX = 60
ENDLESS = 3600
"""Of patience: who waited for what hangs would not come back within the test."""
RECORDED, RESIDENT, NEW = range(8), range(100, 108), range(200, 208)
PATIENCE = Patience(
    put_seconds=ENDLESS, flush_seconds=ENDLESS, check_seconds=ENDLESS, close_seconds=1
)


class Call(threading.Thread):
    """One call in a thread of its own."""

    def __init__(self, call):
        super().__init__(daemon=True)
        self._call = call
        self.answer = None
        self.error = None
        self.start()

    def run(self):
        try:
            self.answer = self._call()
        except BaseException as error:  # noqa: BLE001 - the test looks which it was
            self.error = error

    def result(self):
        """Return its answer, which must come soon."""
        self.join(SECONDS_MAX)
        assert not self.is_alive(), "the call does not come back"
        if self.error is not None:
            raise self.error
        return self.answer

    def waits(self):
        """Return whether it has not come back after a moment in which it could."""
        return not within_seconds(lambda: not self.is_alive(), 0.3)


class HungWrites:
    """Lets writes hang until they are told to go on."""

    def __init__(self):
        self.goes_on = threading.Event()
        self.began = threading.Event()

    def open(self, config, manifest, **ranks):
        return _HungBackend(open_backend(config, manifest, **ranks), self)


class _HungBackend:
    def __init__(self, backend, hung):
        self._backend = backend
        self._hung = hung

    def write(self, records):
        self._hung.began.set()
        self._hung.goes_on.wait()
        return self._backend.write(records)

    def __getattr__(self, name):
        return getattr(self._backend, name)


class Reading:
    """A store with chunks on disk, whose reads can be made to hang, and others in memory."""

    def __init__(self, path, *, deadline="3600s", cascade="write_through", **options):
        self.config = config_of(
            path, cascade=cascade, io={"threads": 4, "deadline": deadline}, **options
        )
        with CHUNKS.open(self.config) as store:
            assert CHUNKS.put(store, RECORDED) == len(RECORDED)
        self.faults = ReadFaults()
        self.store = TierStore.open(
            self.config,
            CHUNKS.manifest,
            open_backend=unreadable_opener({"disk": self.faults}),
            patience=PATIENCE,
        )
        assert CHUNKS.put(self.store, RESIDENT) == len(RESIDENT)
        self.calls = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.faults.heal()
        self.store.close()

    def hang(self, numbers=RECORDED):
        self.faults.hang(CHUNKS.keys(numbers))

    def begin_get(self, numbers=RECORDED):
        """Start a `get`, and wait until its first read has begun."""
        call = Call(lambda: CHUNKS.found(self.store, numbers))
        assert within_seconds(
            lambda: any(self.faults.read_count(key) for key in CHUNKS.keys(numbers))
        )
        return call

    def assert_settled(self):
        primary = self.store._stack.primary
        assert within_seconds(lambda: not primary.arriving and not self.store._loop.load_count)
        self.store.flush()
        assert not primary._pins
        assert self.store.check() == []


def use_memory(store):
    """Use what needs no tier, by every call that can do without."""
    assert CHUNKS.put(store, RESIDENT) == len(RESIDENT)
    assert CHUNKS.found(store, RESIDENT) == list(RESIDENT)
    assert store.match_prefix(CHUNKS.keys(RESIDENT)).chunk_count == len(RESIDENT)
    assert store.stats().primary_chunk_count >= len(RESIDENT)
    return True


@pytest.mark.parametrize("cascade", ["write_through", "on_evict"])
def test_memory_is_used_while_a_get_waits_for_a_read(tmp_path, cascade):
    with Reading(tmp_path, cascade=cascade) as reading:
        reading.hang()
        waiting = reading.begin_get()
        assert Call(lambda: use_memory(reading.store)).result()
        assert Call(lambda: CHUNKS.put(reading.store, NEW)).result() == len(NEW)
        assert Call(lambda: CHUNKS.found(reading.store, NEW)).result() == list(NEW)
        assert waiting.is_alive()
        reading.faults.heal()
        assert waiting.result() == list(RECORDED)
        reading.assert_settled()


WAITS = {
    "put": lambda store: CHUNKS.put(store, range(300, 340)) == 40,
    "flush": lambda store: store.flush() is None,
    "check": lambda store: store.check() == [],
}


@pytest.mark.parametrize("cascade", ["write_through", "on_evict"])
@pytest.mark.parametrize("call", WAITS)
def test_memory_is_used_while_a_call_waits_for_a_write(tmp_path, call, cascade):
    hung = HungWrites()
    config = config_of(tmp_path, primary="2MiB", cascade=cascade, io={"write_queue": "512KiB"})
    store = TierStore.open(config, CHUNKS.manifest, open_backend=hung.open, patience=PATIENCE)
    try:
        assert CHUNKS.put(store, RESIDENT) == len(RESIDENT)
        if cascade == "on_evict" and call == "check":
            Call(store.flush)
            assert hung.began.wait(SECONDS_MAX)  # something is on its way
        waiting = Call(lambda: WAITS[call](store))
        assert hung.began.wait(SECONDS_MAX)
        assert waiting.waits()
        kept = [
            number for number in RESIDENT if store.match_prefix(CHUNKS.keys([number])).chunk_count
        ]
        assert Call(lambda: CHUNKS.found(store, kept)).result() == kept
        assert Call(lambda: CHUNKS.put(store, kept)).result() == len(kept)
        assert Call(store.stats).result().primary_chunk_count >= len(kept)
        assert waiting.is_alive()
        hung.goes_on.set()
        assert waiting.result()
        store.flush()
        assert store.check() == []
    finally:
        hung.goes_on.set()
        store.close()


def test_two_gets_of_one_recorded_chunk_both_find_it_by_one_read(tmp_path):
    with Reading(tmp_path) as reading:
        reading.hang()
        first = reading.begin_get()
        second = Call(lambda: CHUNKS.found(reading.store, [*RECORDED, *RESIDENT]))
        assert second.waits(), "it answered before the chunks had come"
        reading.faults.heal()
        assert first.result() == list(RECORDED)
        assert second.result() == [*RECORDED, *RESIDENT]
        assert [reading.faults.read_count(key) for key in CHUNKS.keys(RECORDED)] == [1] * 8
        reading.assert_settled()


def test_gets_that_want_each_others_chunks_do_not_wait_for_each_other(tmp_path):
    with Reading(tmp_path) as reading:
        reading.hang()
        gets = [
            reading.begin_get(RECORDED[:4]),
            reading.begin_get(RECORDED[4:]),
            Call(lambda: CHUNKS.found(reading.store, RECORDED)),
            Call(lambda: CHUNKS.found(reading.store, RECORDED[::-1])),
        ]
        assert all(get.waits() for get in gets)
        reading.faults.heal()
        assert [sorted(get.result()) for get in gets] == [
            *(list(RECORDED[:4]), list(RECORDED[4:])),
            *(list(RECORDED), list(RECORDED)),
        ]
        reading.assert_settled()


def test_a_read_that_is_known_to_hang_is_not_waited_for_again(tmp_path):
    with Reading(tmp_path, deadline="200ms") as reading:
        reading.hang()
        first = reading.begin_get()
        second = Call(lambda: CHUNKS.found(reading.store, RECORDED))
        assert first.result() == []
        assert second.result() == []
        reads = [reading.faults.read_count(key) for key in CHUNKS.keys(RECORDED)]
        for _ in range(20):
            assert CHUNKS.found(reading.store, [*RECORDED, *RESIDENT]) == list(RESIDENT)
        assert reads == [reading.faults.read_count(key) for key in CHUNKS.keys(RECORDED)]
        assert max(reads) == 1
        reading.faults.heal()
        assert within_seconds(lambda: CHUNKS.found(reading.store, RECORDED) == list(RECORDED))
        reading.assert_settled()


def test_a_put_of_chunks_that_another_get_brings_has_them_when_they_have_come(tmp_path):
    with Reading(tmp_path) as reading:
        reading.hang()
        get = reading.begin_get()
        put = Call(lambda: CHUNKS.put(reading.store, [*RECORDED, *NEW]))
        assert put.waits()
        reading.faults.heal()
        assert put.result() == len(RECORDED) + len(NEW)
        assert get.result() == list(RECORDED)
        reading.assert_settled()


def test_gets_find_room_that_others_hold_in_a_small_memory(tmp_path):
    with Reading(tmp_path, primary="640KiB") as reading:  # ten slots
        reading.hang(RECORDED[:4])
        first = reading.begin_get(RECORDED[:4])
        others = [Call(lambda: CHUNKS.found(reading.store, RECORDED)) for _ in range(6)]
        assert all(get.waits() for get in others)
        reading.faults.heal()
        assert first.result() == list(RECORDED[:4])
        assert [get.result() for get in others] == [list(RECORDED)] * 6
        reading.assert_settled()


def test_a_reset_while_a_get_waits_leaves_nothing_to_be_found(tmp_path):
    with Reading(tmp_path) as reading:
        reading.hang()
        get = reading.begin_get()
        Call(reading.store.reset).result()
        assert CHUNKS.found(reading.store, RESIDENT) == []
        put = Call(lambda: CHUNKS.put(reading.store, RECORDED))
        reading.faults.heal()
        assert set(get.result()) <= set(RECORDED)
        assert put.result() == len(RECORDED)
        assert CHUNKS.found(reading.store, [*RECORDED, *RESIDENT]) == list(RECORDED)
        reading.assert_settled()


def test_a_flush_while_a_get_waits_writes_what_there_is(tmp_path):
    with Reading(tmp_path) as reading:
        reading.hang()
        get = reading.begin_get()
        CHUNKS.put(reading.store, NEW)
        Call(reading.store.flush).result()
        assert get.is_alive()
        places = reading.store._stack.secondaries[0].locate(CHUNKS.keys(NEW))
        assert None not in places
        reading.faults.heal()
        assert get.result() == list(RECORDED)


@pytest.mark.parametrize("cascade", ["write_through", "on_evict"])
def test_a_flush_ends_while_others_go_on_storing(tmp_path, cascade):
    config = config_of(tmp_path, primary="4MiB", cascade=cascade)
    with CHUNKS.open(config) as store:
        stops = threading.Event()

        def store_on(first):
            for number in range(first, first + 100_000, 4):
                if stops.is_set():
                    return
                CHUNKS.put(store, range(number, number + 4))

        writers = [Call(lambda first=first: store_on(first)) for first in (1000, 500_000)]
        try:
            for _ in range(3):
                CHUNKS.put(store, NEW)
                Call(store.flush).result()
        finally:
            stops.set()
        for writer in writers:
            writer.result()


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
        return _HungBackend(unreadable_opener({"disk": faults})(*args, **kwargs), hung)

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


KEY = CHUNKS.keys(RECORDED)[0]


def test_a_caller_that_waits_has_its_turn_among_callers_that_never_do(tmp_path):
    with Reading(tmp_path) as reading:
        stops = threading.Event()
        rows, out = CHUNKS.array(RESIDENT), np.zeros((8, CHUNKS.chunk_bytes), np.uint8)
        keys = CHUNKS.keys(RESIDENT)

        def hammer():
            while not stops.is_set():
                reading.store.put(keys, rows)
                reading.store.get(keys, out.copy())

        callers = [Call(hammer) for _ in range(4)]
        try:
            assert Call(lambda: CHUNKS.found(reading.store, RECORDED)).result() == list(RECORDED)
            Call(reading.store.flush).result()
            assert Call(reading.store.check).result() == []
        finally:
            stops.set()
        for caller in callers:
            caller.result()
