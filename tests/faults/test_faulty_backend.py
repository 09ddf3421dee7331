"""Backends that fail, die and hang: the store stays right, sound, and useful afterwards.

Method: a scenario that stores, evicts, promotes, flushes and restarts is run with its n-th call of
the backend failing, for n = 1, 2, ... until it runs to its end without a failure.
"""

import contextlib
import math
import threading

import pytest
from store_kit import Chunks, config_of, misses

from tierstore import TierStore
from tierstore.backend.opening import open_backend
from tierstore.errors import BackendError
from tierstore.testing.faults import FaultSchedule, FaultyBackend, faulty_opener
from tierstore.transfer import FailureReason

CHUNKS = Chunks(65_536)


def scenario(config, opener):
    """Store more than both tiers hold, load some of it, flush."""
    with TierStore.open(config, CHUNKS.manifest, open_backend=opener) as store:
        for first in range(0, 160, 20):
            assert CHUNKS.put(store, range(first, first + 20)) == 20
            CHUNKS.found(store, range(first // 2, first // 2 + 10))
        with contextlib.suppress(BackendError):  # where the failing call is the flush
            store.flush()
        assert store.check() == []
        CHUNKS.found(store, range(160))
        assert store.check() == []
        # The tier works again: what is stored now is found after the restart below.
        assert CHUNKS.put(store, range(1000, 1016)) == 16


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_every_single_failure_leaves_a_sound_store(tmp_path, backend):
    for n in range(1, 1000):
        schedule = FaultSchedule(n)
        config = config_of(
            tmp_path / str(n), backend=backend, primary="2MiB", capacity="8MiB", io={"threads": 1}
        )
        scenario(config, faulty_opener(schedule))
        with CHUNKS.open(config) as store:
            assert store.check() == []
            CHUNKS.found(store, range(160))
            assert CHUNKS.put(store, range(2000, 2016)) == 16
            store.flush()
        with CHUNKS.open(config) as store:
            assert CHUNKS.found(store, range(2000, 2016)) == list(range(2000, 2016))
        if not schedule.has_struck:
            break
    assert n > 20, "the scenario makes hardly any call: the test tests nothing"


@pytest.mark.parametrize("reason", [FailureReason.IO_ERROR, FailureReason.FULL])
@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_a_device_that_died_is_used_again_when_it_is_back(tmp_path, backend, reason):
    schedule = FaultSchedule(10, fail_count=math.inf)
    config = config_of(tmp_path / "tier", backend=backend, primary="2MiB", capacity="8MiB")
    opener = faulty_opener(schedule, reason=reason)
    with TierStore.open(config, CHUNKS.manifest, open_backend=opener) as store:
        for first in range(0, 200, 10):
            assert CHUNKS.put(store, range(first, first + 10)) == 10
            CHUNKS.found(store, range(first + 10))
        assert schedule.has_struck
        dropped = [name for name in store.stats().counters if name.startswith("dropped_demotes")]
        assert dropped, "nothing was counted"
        schedule.heal()
        for first in range(3000, 3100, 10):
            assert CHUNKS.put(store, range(first, first + 10)) == 10
        store.flush()
        assert store.check() == []
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, range(3060, 3100)) == list(range(3060, 3100))


class HangingBackend(FaultyBackend):
    """Reads of some chunks wait for `gate`, as on a bad disk, and then fill their slots."""

    gate = threading.Event()
    hung_keys = frozenset(CHUNKS.keys(range(16)))

    def read(self, records):
        if any(record.key in self.hung_keys for record in records):
            self.gate.wait()
        return super().read(records)


def open_hanging(config, manifest, *, rank, rank_count):
    backend = open_backend(config, manifest, rank=rank, rank_count=rank_count)
    return HangingBackend(backend, FaultSchedule(1_000_000))


def test_a_hung_read_misses_its_deadline_and_keeps_its_slot_until_it_ends(tmp_path):
    config = config_of(tmp_path / "tier", primary="4MiB", io={"threads": 1, "deadline": "100ms"})
    with CHUNKS.open(config) as store:
        CHUNKS.put(store, range(32))
    HangingBackend.gate.clear()
    with TierStore.open(config, CHUNKS.manifest, open_backend=open_hanging) as store:
        try:
            assert CHUNKS.found(store, range(16)) == []
            assert misses(store) == {"deadline": 16}
            # The hung read still owns 16 of 64 slots: fill all others over and over.
            for first in range(100, 300, 20):
                CHUNKS.put(store, range(first, first + 20))
                newest = range(first, first + 20)
                assert CHUNKS.found(store, newest) == list(newest)
            assert CHUNKS.found(store, range(16)) == [], "a chunk that is arriving was served"
        finally:
            HangingBackend.gate.set()
        store.flush()
        assert store.check() == []
        assert CHUNKS.found(store, range(100, 300)) == list(range(100, 300))
        assert CHUNKS.found(store, range(32)) == list(range(32))
        assert store.check() == []
