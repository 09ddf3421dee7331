"""What a call leaves on its way goes on without a further call."""

import threading
import time

import pytest
from store_kit import Chunks, config_of
from waiting import within_seconds

from tierstore.embedded.call_gate import Gate
from tierstore.embedded.idle_carrier import IdleCarrier

CHUNKS = Chunks(65_536)
SECONDS_MAX = 120


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_chunks_of_an_idle_store_are_written(tmp_path, backend):
    config = config_of(tmp_path, backend=backend)
    with CHUNKS.open(config) as idle, CHUNKS.open(config) as other:
        assert CHUNKS.put(idle, range(20)) == 20
        assert within_seconds(lambda: other.match_prefix(CHUNKS.keys(range(20))).chunk_count == 20)
        assert CHUNKS.found(other, range(20)) == list(range(20))


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_what_an_idle_store_evicted_or_forgot_is_given_back(tmp_path, backend):
    config = config_of(tmp_path, backend=backend, primary="4MiB", capacity="16MiB")
    with CHUNKS.open(config) as idle:
        catalog = idle._stack.secondaries[0]._threads.opened.catalog

        def nothing_is_pending():
            with catalog._env.read(catalog._databases.pending) as txn:
                return txn.stat(db=catalog._databases.pending)["entries"] == 0

        for first in range(0, 320, 20):
            assert CHUNKS.put(idle, range(first, first + 20)) == 20
        assert within_seconds(nothing_is_pending)
        assert catalog.stats().evicted_count > 0
        idle.reset()
        assert within_seconds(lambda: catalog.stats().record_count == 0)
        assert within_seconds(nothing_is_pending)
        assert idle.check() == []


def test_an_idle_store_with_nothing_on_its_way_sleeps(tmp_path):
    with CHUNKS.open(config_of(tmp_path)) as store:
        CHUNKS.put(store, range(20))
        assert within_seconds(lambda: not store._planes.idle._is_awake)
        store.flush()
        CHUNKS.found(store, range(20))
        assert within_seconds(lambda: not store._planes.idle._is_awake)


def test_close_does_not_wait_for_the_idle_thread(tmp_path, monkeypatch):
    monkeypatch.setattr("tierstore.embedded.idle_carrier._CLOSE_SECONDS", 2 * SECONDS_MAX)
    for _ in range(5):
        store = CHUNKS.open(config_of(tmp_path))
        CHUNKS.put(store, range(20))
        started = time.monotonic()
        store.close()
        assert time.monotonic() - started < SECONDS_MAX, "each waited for the other"


class StumblingLoop:
    """Stands in for a loop that has something to carry, and fails at it a few times."""

    def __init__(self):
        self.failures_left = 3
        self.is_done = threading.Event()

    def has_messages(self):
        return not self.is_done.is_set()

    def pump(self):
        if self.failures_left:
            self.failures_left -= 1
            raise RuntimeError("a bug")
        self.is_done.set()
        return True


def test_an_exception_does_not_end_the_idle_thread(caplog):
    loop = StumblingLoop()
    carrier = IdleCarrier(loop, Gate(), lambda: None)
    carrier.open()
    carrier.wake()
    assert loop.is_done.wait(SECONDS_MAX)
    assert within_seconds(lambda: not carrier._is_awake)
    assert len(caplog.records) == 1, "logged once per cause"
    carrier.close()
