"""Calls that wait for a tier: reads and writes that hang until they are told to go on.

A call that came back while another one still hangs did not wait for it, however long that took.
"""

import threading

from store_kit import Chunks, config_of
from waiting import within_seconds

from tierstore import TierStore
from tierstore.backend.opening import open_backend
from tierstore.embedded.planes import Patience
from tierstore.testing.faults import ReadFaults, unreadable_opener

CHUNKS = Chunks(65_536)
SECONDS_MAX = 60
ENDLESS = 3600
"""Of patience: who waited for what hangs would not come back within the test."""
RECORDED, RESIDENT, NEW = range(8), range(100, 108), range(200, 208)
PATIENCE = Patience(
    put_seconds=ENDLESS, flush_seconds=ENDLESS, check_seconds=ENDLESS, close_seconds=1
)


class Call(threading.Thread):
    """One call in a thread of its own."""

    def __init__(self, call):
        super().__init__(daemon=True)
        self._call = call
        self.answer = None
        self.error = None
        self.start()

    def run(self):
        try:
            self.answer = self._call()
        except BaseException as error:  # noqa: BLE001 - the test looks which it was
            self.error = error

    def result(self):
        """Return its answer, which must come soon."""
        self.join(SECONDS_MAX)
        assert not self.is_alive(), "the call does not come back"
        if self.error is not None:
            raise self.error
        return self.answer

    def waits(self):
        """Return whether it has not come back after a moment in which it could."""
        return not within_seconds(lambda: not self.is_alive(), 0.3)


class HungWrites:
    """Lets writes hang until they are told to go on."""

    def __init__(self):
        self.goes_on = threading.Event()
        self.began = threading.Event()

    def open(self, config, manifest, **ranks):
        return HungBackend(open_backend(config, manifest, **ranks), self)


class HungBackend:
    def __init__(self, backend, hung):
        self._backend = backend
        self._hung = hung

    def write(self, records):
        self._hung.began.set()
        self._hung.goes_on.wait()
        return self._backend.write(records)

    def __getattr__(self, name):
        return getattr(self._backend, name)


class Reading:
    """A store with chunks on disk, whose reads can be made to hang, and others in memory."""

    def __init__(self, path, *, deadline="3600s", cascade="write_through", **options):
        self.config = config_of(
            path, cascade=cascade, io={"threads": 4, "deadline": deadline}, **options
        )
        with CHUNKS.open(self.config) as store:
            assert CHUNKS.put(store, RECORDED) == len(RECORDED)
        self.faults = ReadFaults()
        self.store = TierStore.open(
            self.config,
            CHUNKS.manifest,
            open_backend=unreadable_opener({"disk": self.faults}),
            patience=PATIENCE,
        )
        assert CHUNKS.put(self.store, RESIDENT) == len(RESIDENT)
        self.calls = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.faults.heal()
        self.store.close()

    def hang(self, numbers=RECORDED):
        self.faults.hang(CHUNKS.keys(numbers))

    def begin_get(self, numbers=RECORDED):
        """Start a `get`, and wait until its first read has begun."""
        call = Call(lambda: CHUNKS.found(self.store, numbers))
        assert within_seconds(
            lambda: any(self.faults.read_count(key) for key in CHUNKS.keys(numbers))
        )
        return call

    def assert_settled(self):
        primary = self.store._stack.primary
        assert within_seconds(lambda: not primary.arriving and not self.store._loop.load_count)
        self.store.flush()
        assert not primary._pins
        assert self.store.check() == []


def use_memory(store):
    """Use what needs no tier, by every call that can do without."""
    assert CHUNKS.put(store, RESIDENT) == len(RESIDENT)
    assert CHUNKS.found(store, RESIDENT) == list(RESIDENT)
    assert store.match_prefix(CHUNKS.keys(RESIDENT)).chunk_count == len(RESIDENT)
    assert store.stats().primary_chunk_count >= len(RESIDENT)
    return True
