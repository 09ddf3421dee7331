"""A device that really hangs, in the kernel: memory goes on, every call ends, all is used again.

Method: the tier lies in a directory whose server is stopped (`fuse_directory`). What is claimed to
go on is compared with a call that still waits, not with a clock, as far as that is possible.
"""

import threading
import time
from functools import partial

import pytest
from fuse_directory import why_there_is_none
from store_kit import Chunks, config_of
from waiting import within_seconds

from tierstore import TierStore
from tierstore.embedded.planes import Patience
from tierstore.errors import BackendError, TierStoreError

pytestmark = [
    pytest.mark.skipif(bool(why_there_is_none()), reason=f"no FUSE: {why_there_is_none()}"),
    pytest.mark.timeout(600),
]

CHUNKS = Chunks(65_536)
SLOTS = 64
RECORDED = range(100)
RESIDENT = range(90, 100)
ON_DISK = range(30)
CROWD = range(2000, 2000 + SLOTS)
FRESH = range(1000, 1000 + SLOTS // 2)
DEADLINE_SECONDS = 8
"""Long enough for what must not wait to be done meanwhile, on a busy machine too."""
SECONDS_MAX = 60
IMPATIENT = Patience(put_seconds=2, flush_seconds=4, close_seconds=4)


@pytest.fixture(params=["file", "lmdb"])
def backend(request):
    return request.param


def open_store(directory, backend, **io):
    config = config_of(
        directory.path / "tier",
        backend=backend,
        primary=f"{SLOTS * 64}KiB",
        capacity="32MiB",
        io={"threads": 2, "deadline": f"{DEADLINE_SECONDS}s", **io},
    )
    return TierStore.open(config, CHUNKS.manifest, patience=IMPATIENT)


def fill(store):
    """Have all recorded, and a few in memory: the others have left it."""
    assert CHUNKS.put(store, RECORDED) == len(RECORDED)
    assert CHUNKS.put(store, CROWD) == len(CROWD)
    store.flush()
    assert CHUNKS.found(store, RESIDENT) == list(RESIDENT)


class Call(threading.Thread):
    """A call in a thread of its own, and what came of it."""

    def __init__(self, function, *arguments, **options):
        super().__init__(daemon=True)
        self._function = partial(function, *arguments, **options)
        self.answer = None
        self.seconds = None
        self.start()

    def run(self):
        began_at = time.monotonic()
        try:
            self.answer = self._function()
        except TierStoreError as error:
            self.answer = error
        self.seconds = time.monotonic() - began_at

    def result(self):
        self.join(SECONDS_MAX)
        assert not self.is_alive(), "the call does not end"
        return self.answer


def test_memory_is_hit_and_filled_while_another_call_waits_for_the_device(directory, backend):
    with open_store(directory, backend) as store:
        fill(store)
        directory.hang()
        waiting = Call(CHUNKS.found, store, ON_DISK)
        time.sleep(0.2)  # it has begun to wait
        for _ in range(20):
            assert CHUNKS.found(store, RESIDENT) == list(RESIDENT)
        assert store.match_prefix(CHUNKS.keys(RESIDENT)).chunk_count == len(RESIDENT)
        assert waiting.is_alive(), "memory was hit only after the device had been waited for"
        assert set(waiting.result()) <= set(ON_DISK)
        directory.heal()


def test_resident_chunks_stay_and_new_ones_are_taken(directory, backend):
    with open_store(directory, backend, deadline="500ms") as store:
        fill(store)
        directory.hang()
        for first in range(0, 30, 5):
            CHUNKS.found(store, range(first, first + 5))
        assert CHUNKS.found(store, RESIDENT) == list(RESIDENT)
        assert CHUNKS.put(store, FRESH) == len(FRESH)
        assert CHUNKS.found(store, FRESH) == list(FRESH)
        directory.heal()


def test_only_the_first_callers_wait(directory, backend):
    """Each would wait for a deadline; together they wait for few."""
    with open_store(directory, backend, deadline="1s") as store:
        fill(store)
        directory.hang()
        CHUNKS.found(store, [0])
        CHUNKS.found(store, [1])
        CHUNKS.found(store, [2])
        began_at = time.monotonic()
        for number in ON_DISK:
            CHUNKS.found(store, [number])
        assert time.monotonic() - began_at < len(ON_DISK) / 3
        directory.heal()


def test_flush_and_close_end_and_say_what_is_lost(directory, backend, caplog):
    store = open_store(directory, backend, deadline="1s")
    fill(store)
    directory.hang()
    assert CHUNKS.put(store, FRESH) == len(FRESH)
    flush = Call(store.flush)
    error = flush.result()
    assert isinstance(error, BackendError)
    assert "tier disk" in str(error)
    close = Call(store.close)
    close.result()
    assert flush.seconds < SECONDS_MAX / 2
    assert close.seconds < SECONDS_MAX / 2
    assert "disk" in caplog.text
    directory.heal()


def test_the_tier_is_used_again_when_its_device_answers(directory, backend):
    with open_store(directory, backend, deadline="500ms") as store:
        fill(store)
        directory.hang()
        CHUNKS.found(store, ON_DISK)
        CHUNKS.put(store, FRESH)
        directory.heal()

        def is_flushed():
            try:
                store.flush()
            except BackendError:
                return False
            return True

        assert within_seconds(is_flushed)
        assert within_seconds(lambda: CHUNKS.found(store, ON_DISK) == list(ON_DISK))
        assert store.check() == []
    with open_store(directory, backend) as store:
        assert set(CHUNKS.found(store, FRESH)) == set(FRESH)
        assert store.check() == []


def test_a_tier_is_opened_beside_one_whose_device_hangs(directory, backend, tmp_path):
    open_store(directory, backend).close()
    config = config_of(directory.path / "tier", backend=backend, capacity="32MiB")
    other = config["secondary"][0] | {"name": "other", "path": str(tmp_path / "other")}
    config["secondary"].append(other)
    directory.hang()
    store = Call(TierStore.open, config, CHUNKS.manifest, patience=IMPATIENT).result()
    assert CHUNKS.put(store, FRESH) == len(FRESH)
    with pytest.raises(BackendError, match="tier disk"):
        store.flush()
    assert store.stats().secondary["other"].record_count == len(FRESH)
    Call(store.close).result()
    directory.heal()


def test_a_store_opens_or_says_why_not_on_a_device_that_hangs(directory, backend):
    open_store(directory, backend).close()
    directory.hang()
    opening = Call(open_store, directory, backend)
    store = opening.result()
    if isinstance(store, TierStore):
        assert CHUNKS.put(store, RESIDENT) == len(RESIDENT)
        assert CHUNKS.found(store, RESIDENT) == list(RESIDENT)
        Call(store.close).result()
    else:
        assert isinstance(store, TierStoreError)
    directory.heal()
