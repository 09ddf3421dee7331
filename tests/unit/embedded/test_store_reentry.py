"""A store that is called from within one of its own calls: refused by name, and nothing happens.

Goal: between any two lines of a call, its thread may run a signal handler, a `__del__` or a handler
of log records, which calls the store again, or raises. Method: a trace function does so at the n-th
line that a call executes in the modules that change something. The sampled tests take some n by
chance; those marked `exhaustive` take all.
"""

import asyncio
import contextlib
import logging
import random
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from store_kit import Chunks, config_of

from tierstore import TierStore
from tierstore.backend.opening import open_backend
from tierstore.embedded.planes import Patience
from tierstore.errors import BackendError, ClosedError, ReentryError

CHUNKS = Chunks(16_384)
TRACED = {
    "embedded": (
        "store batched_put pipelined_get planes gate loop idle_carrier flush pace catalog_reader"
    ),
    "tier": "stack promotion locator",
    "tier/memory": "primary",
    "tier/disk": "secondary",
    "tier/write_behind": "cascade failed_demotes",
    "executor": "executor",
    "policy": "arc lru",
    ".": "io_pool",
}
ROOT = Path(__file__).parents[3]
TRACED_FILES = tuple(
    str((ROOT / "tierstore" / room / f"{name}.py").resolve(strict=True))
    for room, names in TRACED.items()
    for name in names.split()
)
# A signal comes between two calls in C or at the start of a function: the gate has neither between
# what belongs together, but a trace function raises there too.
RAISING_FILES = tuple(name for name in TRACED_FILES if not name.endswith("/gate.py"))
SAMPLES = 40
LINES_MAX = 1 << 20


class AtLine:
    """Runs `act` once, at the n-th line that this thread executes in the traced modules.

    Or in the functions of one name there.
    """

    def __init__(self, n, act, function=None, files=TRACED_FILES):
        self.files = files
        self.n = n
        self.act = act
        self.function = function
        self.count = 0

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    @property
    def has_acted(self):
        return self.count >= self.n

    def _call(self, frame, event, argument):
        is_traced = frame.f_code.co_filename.endswith(self.files)
        is_chosen = self.function in (None, frame.f_code.co_name)
        return self._line if is_traced and is_chosen else None

    def _line(self, frame, event, argument):
        if event == "line":
            self.count += 1
            if self.count == self.n:
                sys.settrace(None)
                self.act()
        return self._line


class Life:
    """One store, and what is known of it."""

    def __init__(self, path, cascade="write_through", patience=None):
        self.config = config_of(path, primary="1MiB", capacity="16MiB", cascade=cascade)
        self.patience = patience
        self.stored = []
        self.number = 0
        self.open()

    def open(self):
        self.store = TierStore.open(self.config, CHUNKS.manifest, patience=self.patience)

    def new(self, count=6):
        self.number += count
        return range(self.number - count, self.number)

    def put(self):
        numbers = self.new()
        assert CHUNKS.put(self.store, numbers) == len(numbers)
        self.stored = [*self.stored[-40:], *numbers]

    def get(self):
        asked = [*self.stored[-4:], *self.stored[:12:2], 1 << 40]
        assert CHUNKS.found(self.store, asked) == asked[:-1]

    def flush(self):
        CHUNKS.put(self.store, self.stored[-3:])
        self.store.flush()

    def look(self):
        assert self.store.check() == []
        assert self.store.match_prefix(CHUNKS.keys(self.stored)).chunk_count == len(self.stored)
        self.store.stats()


CALLS = ["put", "get", "flush", "look"]


class Intruder:
    """Calls a store with everything there is, and expects to be refused or served as usual."""

    def __init__(self, life):
        self.life = life
        self.refused_count = 0
        self.served_count = 0

    def __call__(self):
        store, numbers = self.life.store, [2_000_000, 2_000_001]
        keys, rows = CHUNKS.keys(numbers), CHUNKS.array(numbers)
        calls = [
            lambda: store.put(keys, rows),
            lambda: store.get(keys, np.zeros_like(rows)),
            lambda: store.match_prefix(keys),
            store.flush,
            store.stats,
        ]
        for call in random.sample(calls, 3):
            try:
                call()
                self.served_count += 1
            except ReentryError as error:
                assert "under way" in str(error)  # noqa: PT017
                self.refused_count += 1


def lines_of(life, call, files=TRACED_FILES):
    with AtLine(LINES_MAX, lambda: None, files=files) as line:
        getattr(life, call)()
    return line.count


def call_at(life, call, n, act, files=TRACED_FILES):
    """Run a call with `act` at its n-th line; return whether it came to that line."""
    with AtLine(n, act, files=files) as line:
        getattr(life, call)()
    return line.has_acted


def sampled_lines(count):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed).sample(range(1, count + 1), min(count, SAMPLES))


def is_quiet(store):
    """Return whether nothing is pinned or on its way."""
    store.flush()
    primary = store._stack.primary
    return not primary._pins and not primary.arriving


@pytest.mark.parametrize("cascade", ["write_through", "on_evict"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_from_within_a_call_is_refused_and_harms_neither(tmp_path, call, cascade):
    life = Life(tmp_path, cascade)
    with life.store as store:
        for _ in range(9):
            life.put()
        intruder = Intruder(life)
        count = lines_of(life, call)
        for _ in range(50):  # how often a call waits varies, and with it how many lines it has
            for n in sampled_lines(count):
                call_at(life, call, n, intruder)
                life.get()
            if intruder.refused_count > SAMPLES:
                break
        assert intruder.refused_count > SAMPLES
        life.look()
        assert is_quiet(store)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cascade", ["write_through", "on_evict"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_from_within_each_line_of_a_call_is_refused(tmp_path, call, cascade):
    life = Life(tmp_path, cascade)
    with life.store as store:
        for _ in range(9):
            life.put()
        intruder = Intruder(life)
        for n in range(1, 2 * lines_of(life, call)):  # how often it waits varies
            call_at(life, call, n, intruder)
            life.get()
        life.look()
        assert is_quiet(store)


def close_at_each(tmp_path, call, lines):
    """Close a store from within a call, at some line; the call ends as usual."""
    for n in lines:
        life = Life(tmp_path / f"{call}-{n}")
        life.put()
        with contextlib.suppress(ClosedError):  # it was closed before the call had begun
            call_at(life, call, n, life.store.close)
        closing = threading.Thread(target=life.store.close)
        closing.start()
        closing.join(60)
        assert not closing.is_alive(), "close hangs"
        with pytest.raises(ClosedError):
            life.store.stats()
        life.open()
        with life.store:
            life.get()
            assert life.store.check() == []


@pytest.mark.parametrize("call", ["put", "flush"])
def test_a_store_that_is_closed_from_within_a_call_closes_when_the_call_ends(tmp_path, call):
    life = Life(tmp_path)
    with life.store:
        life.put()
        count = lines_of(life, call)
    close_at_each(tmp_path, call, sampled_lines(count)[:8])


def close_with_intruder(tmp_path, lines):
    """Call a store from within its close, at some line."""
    for n in lines:
        life = Life(tmp_path / str(n))
        life.put()

        def intrude(life=life):
            with contextlib.suppress(ReentryError, ClosedError):
                life.get()
            life.store.close()

        with AtLine(n, intrude):
            life.store.close()
        with pytest.raises(ClosedError):
            life.store.stats()
        life.open()
        with life.store:
            life.get()


def lines_of_close(tmp_path):
    life = Life(tmp_path)
    life.put()
    with AtLine(LINES_MAX, lambda: None) as line:
        life.store.close()
    return line.count


def test_a_call_from_within_close_is_refused(tmp_path):
    count = lines_of_close(tmp_path / "sound")
    close_with_intruder(tmp_path, sampled_lines(count)[:12])


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_a_call_from_within_each_line_of_close_is_refused(tmp_path):
    close_with_intruder(tmp_path, range(1, lines_of_close(tmp_path / "sound")))


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_a_close_from_within_each_line_of_a_put_comes_when_it_ends(tmp_path):
    life = Life(tmp_path)
    with life.store:
        life.put()
        count = lines_of(life, "put")
    close_at_each(tmp_path, "put", range(1, count))


class LineError(Exception):
    """What a signal handler may raise, a timeout for instance."""


def raise_at_each(tmp_path, call, lines, error=LineError):
    """Raise at some line of a call: the store is right afterwards, or refuses to go on."""
    torn_count = 0
    # Where a lock was about to be left, threads wait for it for ever, and `close` for them.
    life = Life(tmp_path, patience=Patience(close_seconds=1))
    for _ in range(9):
        life.put()
    for n in lines:
        known = list(life.stored)

        def fail():
            raise error

        with contextlib.suppress(error):
            call_at(life, call, n, fail, RAISING_FILES)
        life.stored = known
        try:
            life.get()
            assert life.store.check() == []
        except ClosedError:
            torn_count += 1
            life.store.close()
            life.open()
            CHUNKS.put(life.store, life.stored)  # what was in memory only may be lost
            life.get()
    life.store.close()
    return torn_count


@pytest.mark.parametrize("error", [LineError, KeyboardInterrupt])
@pytest.mark.parametrize("call", ["put", "get"])
def test_an_exception_at_any_line_leaves_a_store_that_is_right_or_refuses(tmp_path, call, error):
    life = Life(tmp_path / "sound")
    with life.store:
        life.put()
        count = lines_of(life, call, RAISING_FILES)
    assert raise_at_each(tmp_path / "torn", call, sampled_lines(count), error) > SAMPLES // 4


class AtLock(AtLine):
    """Acts where a signal would be handled: at the start of a function of `threading`, the n-th."""

    def __enter__(self):
        sys.setprofile(self._enter)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _enter(self, frame, event, argument):
        if event == "call" and frame.f_code.co_filename == threading.__file__:
            self.count += 1
            if self.count == self.n:
                sys.setprofile(None)
                self.act()


@pytest.mark.parametrize("call", ["put", "get"])
def test_an_interruption_leaves_no_lock_that_threads_wait_for(tmp_path, call):
    def interrupt():
        raise KeyboardInterrupt

    life = Life(tmp_path, patience=Patience(close_seconds=60))
    for _ in range(9):
        life.put()
    with AtLock(LINES_MAX, lambda: None) as lock:
        getattr(life, call)()
    for n in sampled_lines(lock.count):
        known = list(life.stored)
        with contextlib.suppress(KeyboardInterrupt), AtLock(n, interrupt):
            getattr(life, call)()
        life.stored = known
        tiers = life.store._executor._tiers
        life.store.close()
        assert not any(thread.is_alive() for tier in tiers for thread in tier.pool._threads), n
        life.open()
        CHUNKS.put(life.store, life.stored)
    life.store.close()


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("call", ["put", "get"])
def test_an_exception_at_each_line_leaves_a_store_that_is_right_or_refuses(tmp_path, call):
    life = Life(tmp_path / "sound")
    with life.store:
        life.put()
        count = lines_of(life, call, RAISING_FILES)
    raise_at_each(tmp_path / "torn", call, range(1, count))


def raise_in_copy(call, function, n):
    """Raise at the n-th line of the copy; return whether it came to that line."""

    def fail():
        raise LineError

    with AtLine(n, fail, function) as line, contextlib.suppress(LineError):
        call()
    return line.has_acted


def test_an_exception_while_bytes_are_copied_out_leaves_all_batches_settled(tmp_path):
    numbers = range(60)
    life = Life(tmp_path, "on_evict")
    with life.store as store:
        assert CHUNKS.put(store, numbers) == 60
    life.open()
    with life.store as store:
        out = np.zeros((60, CHUNKS.chunk_bytes), np.uint8)
        for n in (1, 5, 9, 40, 100):
            assert raise_in_copy(lambda: store.get(CHUNKS.keys(numbers), out), "_copy_out", n)
            assert CHUNKS.put(store, life.new()) == 6
            assert CHUNKS.found(store, numbers) == list(numbers)
            assert is_quiet(store)
        assert store.check() == []


def test_an_exception_while_bytes_are_copied_in_stores_nothing(tmp_path):
    life = Life(tmp_path)
    with life.store as store:
        for n in (1, 3, 5):
            numbers = life.new(4)  # one batch
            assert raise_in_copy(
                lambda numbers=numbers: CHUNKS.put(store, numbers), "_fill_slots", n
            )
            assert CHUNKS.found(store, numbers) == []
            assert CHUNKS.put(store, numbers) == 4
            assert CHUNKS.found(store, numbers) == list(numbers)
        assert is_quiet(store)
        assert store.check() == []


class NosyKeys(Sequence):
    """A sequence of keys that looks into the store while the store looks into it."""

    def __init__(self, life, keys):
        self.life = life
        self.keys = keys

    def __len__(self):
        return len(self.keys)

    def __getitem__(self, index):
        self.life.store.match_prefix(self.keys)
        return self.keys[index]


def test_keys_that_call_the_store_are_refused_and_nothing_is_stored(tmp_path):
    life = Life(tmp_path)
    with life.store as store:
        life.put()
        numbers = life.new()
        rows = CHUNKS.array(numbers)
        keys = NosyKeys(life, CHUNKS.keys(numbers))
        out = np.zeros_like(rows)
        for call in (lambda: store.put(keys, rows), lambda: store.get(keys, out)):
            with pytest.raises(ReentryError, match="nothing was changed"):
                call()
        assert not out.any()
        assert CHUNKS.found(store, numbers) == []
        life.get()
        assert is_quiet(store)


class NosyKey(bytes):
    """A key whose comparison calls the store."""

    __slots__ = ()
    life = None

    def __eq__(self, other):
        self.life.store.stats()
        return bytes(self) == other

    def __hash__(self):
        self.life.store.stats()
        return hash(bytes(self))


def test_keys_of_a_class_of_their_own_are_taken_as_the_bytes_that_they_are(tmp_path):
    life = Life(tmp_path)
    with life.store as store:
        numbers = life.new()
        NosyKey.life = life
        keys = [NosyKey(key) for key in CHUNKS.keys(numbers)]
        assert store.put(keys, CHUNKS.array(numbers)) == [True] * len(numbers)
        assert store.get(keys, np.zeros_like(CHUNKS.array(numbers))) == [True] * len(numbers)
        assert CHUNKS.found(store, numbers) == list(numbers)


class NosyHandler(logging.Handler):
    """A handler of log records that looks into the store."""

    def __init__(self, life):
        super().__init__()
        self.life = life
        self.errors = []
        self.was_called = threading.Event()

    def emit(self, record):
        try:
            self.life.get()
        except Exception as error:  # noqa: BLE001 - the test looks which it was
            self.errors.append(error)
        self.was_called.set()


def test_a_log_handler_that_calls_the_store_from_its_io_threads_is_refused(tmp_path):
    life = Life(tmp_path)
    handler = NosyHandler(life)

    class TalkativeBackend:
        def __init__(self, backend):
            self._backend = backend

        def read(self, records):
            logging.getLogger("tierstore").warning("a slow read")
            return self._backend.read(records)

        def __getattr__(self, name):
            return getattr(self._backend, name)

    with life.store:
        for _ in range(12):
            life.put()
    life.store = TierStore.open(
        life.config,
        CHUNKS.manifest,
        open_backend=lambda *args, **kwargs: TalkativeBackend(open_backend(*args, **kwargs)),
    )
    logger = logging.getLogger("tierstore")
    logger.addHandler(handler)
    try:
        with life.store:
            life.get()
            assert handler.was_called.wait(60)
            assert handler.errors
            assert {type(error) for error in handler.errors} == {ReentryError}
            life.get()
            assert is_quiet(life.store)
    finally:
        logger.removeHandler(handler)


def test_signals_that_call_the_store_again_and_again_are_refused(tmp_path):
    life = Life(tmp_path, "on_evict")
    intruder = Intruder(life)
    with life.store as store:
        for _ in range(9):
            life.put()
        before = signal.signal(signal.SIGALRM, lambda *_: intruder())
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        try:
            for _ in range(2000):
                life.put()
                life.get()
                if intruder.refused_count > 60:
                    break
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert intruder.refused_count > 60
        life.look()
        assert is_quiet(store)


def test_the_calls_of_other_threads_and_of_coroutines_wait_for_their_turn(tmp_path):
    life = Life(tmp_path)

    async def play(numbers):
        for number in numbers:
            assert CHUNKS.put(life.store, [number]) == 1
            await asyncio.sleep(0)
            assert await asyncio.to_thread(CHUNKS.found, life.store, [number]) == [number]

    async def play_all():
        await asyncio.gather(*(play(range(first, first + 10)) for first in (0, 100, 200)))

    with life.store as store:
        asyncio.run(play_all())
        assert is_quiet(store)


def test_an_error_of_a_device_is_no_interruption(tmp_path):
    life = Life(tmp_path)
    life.store.close()

    class FullBackend:
        def __init__(self, backend):
            self._backend = backend

        def sync(self):
            raise BackendError("the device is on strike")

        def __getattr__(self, name):
            return getattr(self._backend, name)

    with TierStore.open(
        life.config,
        CHUNKS.manifest,
        open_backend=lambda *args, **kwargs: FullBackend(open_backend(*args, **kwargs)),
    ) as life.store:
        life.put()
        with pytest.raises(BackendError, match=r"disk: 6 chunks .*: the device is on strike"):
            life.store.flush()
        life.get()
        life.look()
