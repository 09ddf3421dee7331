"""The pool's pages come in the background, in order, and while no transfer is under way."""

import ctypes
import mmap
import threading
from collections import deque

import numpy as np
import pytest
from cuda_setup import COMPUTE, Setup
from test_dma_host import offload_reversed, one_layer

from tierstore.dma import host
from tierstore.dma.background import BackgroundTurns, no_io
from tierstore.dma.gpu import engine as engine_module
from tierstore.dma.host import HostCopyEngine
from tierstore.dma.populator import STEP_BYTES, prefault_in_steps
from tierstore.layout import PAGE_BYTES, CanonicalKVCaches, ChunkOrder

POOL_BYTES = 40 << 20


@pytest.fixture
def pool():
    """Return memory without pages, its address, and a count of those that have come."""
    mapping = mmap.mmap(-1, POOL_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    here = (ctypes.c_ubyte * (POOL_BYTES // PAGE_BYTES))()

    def pages():
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        assert mincore(ctypes.c_void_p(address), ctypes.c_size_t(POOL_BYTES), here) == 0
        return bytes(byte & 1 for byte in here)

    def page_count():
        return pages().count(1)

    page_count.here = pages
    return mapping, address, page_count


def no_caches():
    return CanonicalKVCaches(
        tensors=(), group_refs=(), chunk_order=ChunkOrder.LAYER_MAJOR, device="cpu"
    )


def test_the_pool_gets_its_pages_in_the_background_and_keeps_its_bytes(pool):
    mapping, address, page_count = pool
    mapping[:PAGE_BYTES] = b"k" * PAGE_BYTES
    tasks = deque()
    HostCopyEngine(tasks.append).register(no_caches(), 1, address, POOL_BYTES)
    assert page_count() < POOL_BYTES // PAGE_BYTES
    while tasks:
        tasks.popleft()()
    assert page_count() == POOL_BYTES // PAGE_BYTES
    assert mapping[:PAGE_BYTES] == b"k" * PAGE_BYTES


class Looks:
    """What happens at each look whether slots are read or written, and how many pages it saw."""

    def __init__(self, page_count, is_busy_at):
        self.page_counts = []
        self._page_count = page_count
        self._is_busy_at = is_busy_at

    def __call__(self):
        self.page_counts.append(self._page_count())
        return self._is_busy_at(len(self.page_counts))


def populate(looks, address):
    """Populate a pool of POOL_BYTES in this thread, beside an engine that tells `looks`."""
    tasks = deque()
    engine = HostCopyEngine(tasks.append, looks)
    engine.register(no_caches(), 1, address, POOL_BYTES)
    looks.engine = engine
    (task,) = tasks
    task()


def test_no_page_comes_after_the_engine_was_closed(pool):
    _, address, page_count = pool

    def close_at_third_look(number):
        if number == 3:
            looks.engine.close()
        return False

    looks = Looks(page_count, close_at_third_look)
    populate(looks, address)
    assert len(looks.page_counts) == 3
    assert 0 < looks.page_counts[-1] == page_count() < POOL_BYTES // PAGE_BYTES


def test_populating_stops_while_slots_are_read_or_written(pool):
    """It has looked twice when a transfer begins, which is over at the third look after that."""
    _, address, page_count = pool
    looks = Looks(page_count, lambda number: 3 <= number <= 5)
    populate(looks, address)
    before, *while_busy, after = looks.page_counts[1:7]
    assert before < while_busy[0] < after
    assert len(set(while_busy)) == 1, "a page came while slots were read or written"
    assert page_count() == POOL_BYTES // PAGE_BYTES


def test_populating_ends_though_transfers_never_do(pool):
    _, address, page_count = pool
    looks = Looks(page_count, lambda _: True)
    populate(looks, address)
    steps = np.diff([*looks.page_counts, page_count()])
    step_pages = STEP_BYTES // PAGE_BYTES
    assert page_count() == POOL_BYTES // PAGE_BYTES
    assert set(steps.tolist()) == {0, step_pages}
    assert (steps == 0).sum() >= 2 * (steps > 0).sum(), "it looks several times for each step"


def test_populating_stops_while_the_engine_copies(pool, monkeypatch):
    """A copy ends when the populating thread has looked three times since it began."""
    _, address, page_count = pool
    blocks = np.ones((1, PAGE_BYTES), np.uint8)
    memmove = ctypes.memmove
    counts, tasks = [], deque()
    is_copying, is_seen = threading.Event(), threading.Event()

    def slow(*arguments):
        is_copying.set()
        assert is_seen.wait(60.0)
        return memmove(*arguments)

    class WatchedTurns(BackgroundTurns):
        def __init__(self, is_busy):
            def look():
                counts.append((is_busy(), page_count()))
                if len(counts) == 3:
                    is_seen.set()
                    copier.join(60.0)
                return counts[-1][0]

            super().__init__(look)

    monkeypatch.setattr(ctypes, "memmove", slow)
    monkeypatch.setattr(host, "BackgroundTurns", WatchedTurns)
    engine = HostCopyEngine(tasks.append)
    engine.register(one_layer(blocks), 1, address, POOL_BYTES)
    copier = threading.Thread(target=offload_reversed, args=(engine, blocks), daemon=True)
    copier.start()
    assert is_copying.wait(60.0)
    tasks.popleft()()
    assert counts[:3] == [(True, 0)] * 3
    assert not any(is_busy for is_busy, _ in counts[3:])
    assert page_count() == POOL_BYTES // PAGE_BYTES


def test_steps_cover_a_range_and_nothing_beyond_it(pool):
    _, address, page_count = pool
    pages = 2 * STEP_BYTES // PAGE_BYTES + 3
    prefault_in_steps(address, pages * PAGE_BYTES)
    assert page_count.here() == bytes([1]) * pages + bytes(POOL_BYTES // PAGE_BYTES - pages)


def test_the_first_slots_get_their_pages_first(pool):
    _, address, page_count = pool
    firsts = []

    def first_missing(_):
        pages = page_count.here()
        firsts.append(pages.find(0) if 0 in pages else len(pages))
        assert not any(pages[firsts[-1] :])
        return False

    populate(Looks(page_count, first_missing), address)
    assert firsts == sorted(set(firsts))


def test_pinning_is_told_of_copies_to_and_from_a_gpu_until_they_ended(monkeypatch):
    asked = []
    monkeypatch.setattr(
        engine_module, "BackgroundTurns", lambda is_busy: asked.append(is_busy) or turns
    )
    turns = BackgroundTurns(no_io)
    setup = Setup()
    (is_busy,) = asked
    assert not is_busy()
    setup.api.streams.held.add(COMPUTE)
    setup.compute(3, 7)
    setup.offload(1, [3], [5])
    assert is_busy()
    setup.api.streams.held.clear()
    setup.wait(1)
    assert not is_busy()
    setup.engine.close()
    assert not is_busy()
