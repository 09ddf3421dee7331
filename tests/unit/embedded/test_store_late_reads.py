"""Reads that miss their deadline, with several outcomes in one batch, while a `get` goes on.

Method: a backend in front of a real one, whose calls are slow by chance and whose records fail by
chance. Nothing may be raised, no byte may be wrong, and nothing may stay reserved or pinned.
"""

import random
import threading
import time

import pytest
from store_kit import Chunks, config_of
from waiting import within_seconds

from tierstore import TierStore
from tierstore.backend.opening import open_backend
from tierstore.embedded.planes import Patience
from tierstore.testing.faults import ReadFaults, unreadable_opener
from tierstore.transfer import FailureReason

CHUNKS = Chunks(65_536)
DEADLINE_SECONDS = 0.05
SECONDS_MAX = 60


class UnsteadyBackend:
    """A device of which some calls are slow, and some records cannot be read."""

    def __init__(self, backend, seed):
        self._backend = backend
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        self._is_healed = threading.Event()
        self.late_count = 0

    def heal(self):
        self._is_healed.set()

    def _draw(self, choices, weights):
        with self._lock:
            return self._dice.choices(choices, weights)[0]

    def _linger(self):
        if self._draw([True, False], [1, 2]):
            self.late_count += 1
            self._is_healed.wait(self._draw([1.5, 2.5, 4], [1, 1, 1]) * DEADLINE_SECONDS)

    def read(self, records):
        failed = self._backend.read(records)
        if not self._is_healed.is_set():
            self._linger()
            for i, record in enumerate(records):
                reason = self._draw([None, FailureReason.IO_ERROR], [7, 1])
                if reason is not None:
                    record.slot[:] = b"\xee" * len(record.slot)
                    failed[i] = reason
        return failed

    def write(self, records):
        if not self._is_healed.is_set():
            self._linger()
        return self._backend.write(records)

    def __getattr__(self, name):
        return getattr(self._backend, name)


def held(store):
    """Count slots that are arriving, pins in memory and pins of records."""
    primary = store._stack.primary
    record_pins = sum(len(tier.pins) for tier in store._stack.secondaries)
    return len(primary.arriving), len(primary._pins), record_pins


@pytest.mark.parametrize("cascade", ["on_evict", "write_through"])
@pytest.mark.parametrize("number", range(2))
def test_reads_that_end_late_harm_no_get(tmp_path, cascade, number):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    backends = []

    def open_unsteady(*args, **kwargs):
        backends.append(UnsteadyBackend(open_backend(*args, **kwargs), seed))
        return backends[-1]

    io = {"threads": 4, "deadline": f"{DEADLINE_SECONDS * 1000:.0f}ms"}
    config = config_of(tmp_path, primary="4MiB", cascade=cascade, io=io)
    numbers = range(256)
    with CHUNKS.open(config) as store:
        for first in numbers[::32]:
            assert CHUNKS.put(store, range(first, first + 32)) == 32
    with TierStore.open(config, CHUNKS.manifest, open_backend=open_unsteady) as store:
        for first in (0, 128, 64):
            # Their writes are carried on between the batches of the `get`, with all that is late.
            CHUNKS.put(store, range(2000 + first, 2064 + first))
            CHUNKS.found(store, range(first, first + 128))
        assert backends[0].late_count > 4, "hardly a call was late: the test tests nothing"
        backends[0].heal()
        assert within_seconds(lambda: store.check() == [] and held(store) == (0, 0, 0))
        store.flush()
        assert CHUNKS.put(store, range(1000, 1032)) == 32
        store.flush()
        assert CHUNKS.found(store, range(1000, 1032)) == list(range(1000, 1032))
        assert store.check() == []
        assert "stray_answers_total" not in store.stats().counters
    with CHUNKS.open(config_of(tmp_path, primary="4MiB", cascade=cascade)) as store:
        assert set(range(1000, 1032)) <= set(CHUNKS.found(store, [*numbers, *range(1000, 1032)]))


@pytest.mark.parametrize("cascade", ["on_evict", "write_through"])
def test_a_read_that_hangs_holds_up_neither_flush_nor_close(tmp_path, cascade):
    # One thread hangs, the other writes.
    config = config_of(tmp_path, cascade=cascade, io={"threads": 2, "deadline": "100ms"})
    with CHUNKS.open(config) as store:
        assert CHUNKS.put(store, range(4)) == 4
    faults = ReadFaults()
    faults.hang(CHUNKS.keys(range(4)))
    opener = unreadable_opener({"disk": faults})
    patience = Patience(close_seconds=0.3)
    store = TierStore.open(config, CHUNKS.manifest, open_backend=opener, patience=patience)
    try:
        assert CHUNKS.found(store, [1]) == []
        assert CHUNKS.put(store, range(100, 120)) == 20
        store.flush()
        assert CHUNKS.found(store, range(100, 120)) == list(range(100, 120))
        started = time.monotonic()
        store.close()
        assert time.monotonic() - started < SECONDS_MAX / 2
    finally:
        faults.go_on()
        store.close()
    with CHUNKS.open(config_of(tmp_path, cascade=cascade)) as store:
        assert CHUNKS.found(store, [*range(4), *range(100, 120)]) == [*range(4), *range(100, 120)]
