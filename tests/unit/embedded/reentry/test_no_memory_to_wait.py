"""A thread that has nothing to do and no memory to wait for something goes on when it has.

Method: waiting at a condition fails in the threads of one name, as long as a test wants it.
"""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from store_kit import Chunks, config_of
from waiting import within_seconds

from tierstore.io_pool import IoPool, Mailbox

CHUNKS = Chunks(65_536)
SECONDS_MAX = 60


class NoMemory:
    """Of threads whose name begins with a word."""

    def __init__(self, monkeypatch):
        self._wait = threading.Condition.wait
        self.word = None
        self.failure_count = 0
        monkeypatch.setattr(threading.Condition, "wait", self._fail_or_wait())

    def _fail_or_wait(self):
        def wait(condition, timeout=None):
            if self.word and threading.current_thread().name.startswith(self.word):
                self.failure_count += 1
                raise MemoryError
            return self._wait(condition, timeout)

        return wait

    def strike(self, word):
        self.word = word

    def end(self):
        self.word = None


@pytest.fixture
def no_memory(monkeypatch):
    return NoMemory(monkeypatch)


def pool_and_work():
    pool, done = IoPool(1, "starved"), threading.Event()
    return pool, partial(pool.submit_deferred, done.set), done


def mailbox_and_work():
    done = threading.Event()
    mailbox = Mailbox("starved", lambda _: done.set())
    return mailbox, partial(mailbox.put, None), done


@pytest.mark.parametrize("make", [pool_and_work, mailbox_and_work])
def test_who_brings_work_to_a_thread_is_not_kept_by_it(no_memory, make):
    starved, bring, done = make()
    no_memory.strike("starved")
    starved.open()
    assert within_seconds(lambda: no_memory.failure_count > 2)
    caller = ThreadPoolExecutor(1)
    try:
        caller.submit(bring).result(SECONDS_MAX)
        assert done.wait(SECONDS_MAX)
    finally:
        no_memory.end()
        assert starved.close(SECONDS_MAX)
        caller.shutdown()


def test_who_looks_after_a_catalog_goes_on(no_memory, tmp_path):
    path = tmp_path / "tier"
    with CHUNKS.open(config_of(path)) as store:
        no_memory.strike("keeper-")
        assert within_seconds(lambda: no_memory.failure_count > 2)
        no_memory.end()
        shutil.rmtree(path)
        assert within_seconds((path / "catalog" / "data.mdb").exists)
        assert within_seconds(lambda: store.check() == [])


def test_what_is_on_its_way_goes_on_without_a_call(no_memory, tmp_path):
    config = config_of(tmp_path)
    with CHUNKS.open(config) as idle, CHUNKS.open(config) as other:
        no_memory.strike("tierstore-idle")
        assert CHUNKS.put(idle, range(20)) == 20
        assert within_seconds(lambda: no_memory.failure_count > 2)
        no_memory.end()
        assert within_seconds(lambda: other.match_prefix(CHUNKS.keys(range(20))).chunk_count == 20)
