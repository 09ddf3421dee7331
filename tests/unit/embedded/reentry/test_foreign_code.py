"""A caller's code that looks into a store amid a call: keys, log handlers, signals, tasks."""

import asyncio
import logging
import signal
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from reentry_kit import CHUNKS, Intruder, Life, is_quiet

from tierstore import TierStore
from tierstore.backend.opening import open_backend
from tierstore.errors import ReentryError


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
