"""Calls that an exception ends, at any line: the store is right afterwards, or refuses to go on.

Method: `reentry_kit`. The sampled tests take some lines by chance; those marked `exhaustive` take
all.
"""

import contextlib
import sys
import threading

import numpy as np
import pytest
from reentry_kit import (
    CHUNKS,
    LINES_MAX,
    RAISING_FILES,
    SAMPLES,
    AtLine,
    Life,
    call_at,
    is_quiet,
    lines_of,
    sampled_lines,
)

from tierstore import TierStore
from tierstore.backend.opening import open_backend
from tierstore.embedded.planes import Patience
from tierstore.errors import BackendError, ClosedError


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
