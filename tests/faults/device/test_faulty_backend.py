"""Backends that die and hang: the store stays right, sound, and useful afterwards."""

import contextlib
import math
import time

import pytest
from store_kit import Chunks, config_of, misses

from tierstore import TierStore
from tierstore.embedded.planes import Patience
from tierstore.errors import BackendError
from tierstore.testing.faults import (
    FaultSchedule,
    ReadFaults,
    faulty_opener,
    unreadable_opener,
)
from tierstore.transfer import FailureReason

CHUNKS = Chunks(65_536)
SECONDS_MAX = 120


@pytest.mark.parametrize("reason", [FailureReason.IO_ERROR, FailureReason.FULL])
@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_a_device_that_died_is_used_again_when_it_is_back(tmp_path, backend, reason):
    schedule = FaultSchedule(10, fail_count=math.inf)
    config = config_of(tmp_path / "tier", backend=backend, primary="2MiB", capacity="8MiB")
    opener = faulty_opener(schedule, reason=reason)
    with TierStore.open(config, CHUNKS.manifest, open_backend=opener) as store:
        for first in range(0, 200, 10):
            assert CHUNKS.put(store, range(first, first + 10)) > 0  # one part displaces another
            CHUNKS.found(store, range(first + 10))
        assert schedule.has_struck
        dropped = [name for name in store.stats().counters if name.startswith("dropped_demotes")]
        assert dropped, "nothing was counted"
        schedule.heal()
        store.flush()  # the queue moves again; until then a put would rather drop than wait
        for first in range(3000, 3100, 10):
            assert CHUNKS.put(store, range(first, first + 10)) == 10
        store.flush()
        assert store.check() == []
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, range(3060, 3100)) == list(range(3060, 3100))


@pytest.mark.parametrize("reason", [FailureReason.IO_ERROR, FailureReason.FULL])
def test_a_write_that_fails_is_dropped_by_its_reason_and_records_nothing(tmp_path, reason):
    schedule = FaultSchedule(1_000_000, fail_count=math.inf)
    config = config_of(tmp_path / "tier", backend="file", primary="2MiB", capacity="8MiB")
    opener = faulty_opener(schedule, reason=reason)
    with TierStore.open(config, CHUNKS.manifest, open_backend=opener) as store:
        schedule.fail_from_now()
        assert CHUNKS.put(store, range(8)) == 8
        with contextlib.suppress(BackendError):
            store.flush()
        counters = store.stats().counters
        assert counters[f'dropped_demotes_total{{reason="{reason.value}"}}'] == 8
        assert not counters.get('demoted_chunks_total{tier="disk"}')
    schedule.heal()
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, range(8)) == []
        assert misses(store) == {}


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_a_device_that_could_not_be_opened_is_used_once_it_can(tmp_path, backend):
    schedule = FaultSchedule(1, fail_count=math.inf)
    config = config_of(tmp_path / "tier", backend=backend, primary="2MiB", capacity="8MiB")
    with CHUNKS.open(config) as store:
        CHUNKS.put(store, range(8))
    with TierStore.open(config, CHUNKS.manifest, open_backend=faulty_opener(schedule)) as store:
        assert CHUNKS.found(store, range(8)) == []
        assert CHUNKS.put(store, range(200, 210)) == 10
        schedule.heal()
        until = time.monotonic() + SECONDS_MAX
        while CHUNKS.found(store, range(8)) != list(range(8)):  # they are tried again soon
            assert time.monotonic() < until, "the records of a device that is back are not found"
        assert CHUNKS.put(store, range(300, 310)) == 10
        store.flush()
        assert store.check() == []
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, range(300, 310)) == list(range(300, 310))


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_a_device_that_refuses_is_not_waited_for(tmp_path, backend):
    schedule = FaultSchedule(1_000_000, fail_count=math.inf)
    config = config_of(tmp_path / "tier", backend=backend, primary="2MiB", capacity="8MiB")
    waits = Patience(
        put_seconds=2 * SECONDS_MAX, flush_seconds=2 * SECONDS_MAX, close_seconds=2 * SECONDS_MAX
    )
    opener = faulty_opener(schedule)
    started = time.monotonic()
    with TierStore.open(config, CHUNKS.manifest, open_backend=opener, patience=waits) as store:
        CHUNKS.put(store, range(130))
        schedule.fail_from_now()
        CHUNKS.put(store, range(200, 300))  # the tier is full: evictions cannot be carried out
        with pytest.raises(BackendError, match="refuses"):
            store.flush()
    assert time.monotonic() - started < SECONDS_MAX


def test_a_hung_read_misses_its_deadline_and_keeps_its_slot_until_it_ends(tmp_path):
    config = config_of(tmp_path / "tier", primary="4MiB", io={"threads": 8, "deadline": "2s"})
    config["primary"]["eviction"] = "lru"  # what came last stays, for nothing is read meanwhile
    with CHUNKS.open(config) as store:
        CHUNKS.put(store, range(32))
    faults = ReadFaults()
    faults.hang(CHUNKS.keys(range(16)))
    opener = unreadable_opener({"disk": faults})
    with TierStore.open(config, CHUNKS.manifest, open_backend=opener) as store:
        try:
            assert CHUNKS.found(store, range(16)) == []
            missed = misses(store)
            assert sum(missed.values()) == 16
            assert missed.keys() <= {"deadline", "stalled"}, "one thread is left to writes"
            # The hung read still owns 16 of 64 slots: fill all others over and over.
            for first in range(100, 300, 20):
                CHUNKS.put(store, range(first, first + 20))
                store.flush()  # or chunks would leave before it is known that writes go through
                newest = range(first, first + 20)
                assert CHUNKS.found(store, newest) == list(newest)
            assert CHUNKS.found(store, range(16)) == [], "a chunk that is arriving was served"
        finally:
            faults.go_on()
        store.flush()
        assert store.check() == []
        assert CHUNKS.found(store, range(100, 300)) == list(range(100, 300))
        assert CHUNKS.found(store, range(32)) == list(range(32))
        assert store.check() == []
