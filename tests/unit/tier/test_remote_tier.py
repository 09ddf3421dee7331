"""A stack over a tier that has no catalog, with its data plane behind the real executor."""

import numpy as np
import pytest
from opened_stack import ABSENT, ARRIVING, MANIFEST, RECORDED, RESIDENT, keys
from remote_tier import RemoteOpener, RemoteStore, RemoteTier
from waiting import within_seconds

from tierstore import load_config
from tierstore.clock import MonotonicClock
from tierstore.embedded.loop import PlaneLoop
from tierstore.executor import TransferExecutor
from tierstore.layout import PAGE_BYTES
from tierstore.metrics import Counters
from tierstore.tier.opening import open_stack

SLOT_COUNT = 4
MANY = 20


class Engine:
    """Both planes over one remote store; the bytes of a chunk are a function of its number."""

    def __init__(self, path):
        self.store = RemoteStore(capacity_count=64)
        config = load_config(
            {
                "version": 1,
                "primary": {"capacity": f"{SLOT_COUNT * PAGE_BYTES}B", "eviction": "lru"},
                "secondary": [
                    {
                        "name": "remote",
                        "backend": "file",
                        "path": str(path / "unused"),
                        "capacity": "16MiB",
                    }
                ],
            }
        )
        self.counters = Counters()
        self.stack = open_stack(
            config,
            MANIFEST,
            rank_count=1,
            counters=self.counters,
            make_tier=lambda config, manifest, **_: RemoteTier(self.store),
        )
        self.executor = TransferExecutor.open(
            config,
            MANIFEST,
            rank=0,
            rank_count=1,
            caches=None,
            counters=self.counters,
            open_backend=RemoteOpener(self.store),
        )
        self.loop = PlaneLoop(self.stack, self.executor, MonotonicClock())

    def close(self):
        self.store.may_answer.set()
        self.executor.close()
        self.stack.close()

    def slot(self, slot):
        return self.executor.pool.array[slot * PAGE_BYTES : (slot + 1) * PAGE_BYTES]

    def keep(self, *numbers):
        """Store chunks in memory, from where they go down."""
        reservation = self.stack.reserve_offload(0, keys(*numbers))
        for key, slot in zip(reservation.keys, reservation.slots.tolist(), strict=True):
            self.slot(slot)[:] = payload_of(key)
        self.stack.finish_offload(reservation)

    def store_all(self, *numbers):
        for first in range(0, len(numbers), SLOT_COUNT):
            self.keep(*numbers[first : first + SLOT_COUNT])
            self.loop.flush()

    def load(self, *numbers):
        """Load chunks from wherever they are; return the numbers of those that came, compared."""
        reservation = self.stack.reserve_load([(0, keys(*numbers))], partial=True)
        load = self.loop.start_load(reservation)
        failed = self.loop.wait_for(load)
        came = []
        (held,), (slots,) = reservation.keys, reservation.slots
        for key, slot in zip(held, slots.tolist(), strict=True):
            if slot not in failed:
                assert np.array_equal(self.slot(slot), payload_of(key)), "wrong bytes"
                came.append(key)
        self.loop.finish_load(load)
        return [number for number in numbers if keys(number)[0] in came]

    def states_in_the_end(self, *numbers):
        """Ask step after step, as a scheduler does, until everything is known."""

        def is_known():
            self.loop.pump()
            return ARRIVING not in self.stack.states_in_step(keys(*numbers))

        assert within_seconds(is_known)
        return self.stack.states_in_step(keys(*numbers))


def payload_of(key):
    seed = int.from_bytes(key[-8:], "big")
    return np.random.default_rng(seed).integers(0, 256, PAGE_BYTES, np.uint8)


@pytest.fixture
def engine(tmp_path):
    made = Engine(tmp_path)
    yield made
    made.close()


def test_chunks_go_down_and_come_up_again_with_their_bytes(engine):
    engine.store_all(*range(1, 9))
    assert engine.states_in_the_end(1, 2, 8, 99) == [RECORDED, RECORDED, RESIDENT, ABSENT]
    assert engine.load(1, 2, 3) == [1, 2, 3]
    assert engine.stack.states(keys(1, 2, 3)) == [RESIDENT] * 3
    assert engine.load(1, 8) == [1, 8]
    assert engine.stack.check() == []


def test_a_step_does_not_wait_for_a_network_that_does_not_answer(engine):
    engine.store_all(*range(1, 9))
    for _ in range(10):  # answers are kept for a few steps
        engine.loop.pump()
    with engine.store.held():
        assert engine.stack.states_in_step(keys(1, 2, 99)) == [ARRIVING] * 3
        assert engine.stack.states_of_run(keys(1, 2, 99))[0] is ARRIVING
        engine.loop.pump()
        assert engine.stack.reserve_load([(0, keys(1, 2))]) is None
    assert engine.states_in_the_end(1, 2, 99) == [RECORDED, RECORDED, ABSENT]
    assert engine.load(1, 2) == [1, 2]


def test_a_record_that_the_store_evicts_after_it_was_found_is_a_miss(engine):
    engine.store_all(*range(1, 9))
    assert engine.states_in_the_end(1, 2) == [RECORDED, RECORDED]
    reservation = engine.stack.reserve_load([(0, keys(1, 2))])
    engine.store.drop([reservation.promotes[0].places[0].tobytes()])
    load = engine.loop.start_load(reservation)
    assert len(engine.loop.wait_for(load)) == 1
    engine.loop.finish_load(load)
    assert engine.stack.states(keys(1, 2)).count(RESIDENT) == 1
    assert engine.counters.snapshot()['misses_total{reason="absent"}'] == 1
    engine.store_all(1, 2, 3, 4)  # and all slots can be had
    assert engine.stack.check() == []


def test_after_a_reset_nothing_is_found_and_new_chunks_are(engine):
    engine.store_all(*range(1, 9))
    engine.stack.reset(MANIFEST)
    assert engine.states_in_the_end(*range(1, 9)) == [ABSENT] * 8
    engine.store_all(1, *range(11, 15))
    assert engine.load(1, 2) == [1]
    assert engine.stack.check() == []


def test_more_than_the_store_holds_is_evicted_by_the_store(engine):
    numbers = range(1, 81)
    engine.store_all(*numbers)
    states = engine.states_in_the_end(*numbers)
    assert states[0] is ABSENT
    assert states[-1] is RESIDENT
    assert engine.load(*numbers[-SLOT_COUNT:]) == list(numbers[-SLOT_COUNT:])
    assert len(engine.store.published) == engine.store.capacity_count


def test_whoever_opens_the_data_plane_is_told_where_the_slots_lie(engine):
    (backend,) = engine.store.backends
    pool = engine.executor.pool
    assert (backend.pool.address, backend.pool.length) == (pool.address, pool.size_bytes)
    assert pool.size_bytes == SLOT_COUNT * PAGE_BYTES
    assert backend.pool.address == pool.array.ctypes.data
