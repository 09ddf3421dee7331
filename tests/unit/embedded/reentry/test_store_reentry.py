"""A store that is called from within one of its own calls: refused by name, and nothing happens.

Method: `reentry_kit`. The sampled tests take some lines by chance; those marked `exhaustive` take
all.
"""

import contextlib
import threading

import pytest
from reentry_kit import (
    LINES_MAX,
    SAMPLES,
    AtLine,
    Intruder,
    Life,
    call_at,
    is_quiet,
    lines_of,
    sampled_lines,
)

from tierstore.errors import ClosedError, ReentryError

CALLS = ["put", "get", "flush", "look"]


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
