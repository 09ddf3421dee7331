"""Calls of several threads that overlap where one of them waits for a tier.

Goal: what is in memory is had at once, whatever a call of another thread waits for, and two calls
that want the same chunk both get it. Method: `overlap_kit`.
"""

import threading

import numpy as np
import pytest
from overlap_kit import (
    CHUNKS,
    NEW,
    PATIENCE,
    RECORDED,
    RESIDENT,
    SECONDS_MAX,
    Call,
    HungWrites,
    Reading,
    use_memory,
)
from store_kit import config_of
from waiting import within_seconds

from tierstore import TierStore


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
