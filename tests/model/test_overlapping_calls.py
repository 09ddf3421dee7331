"""Calls that overlap, against a model: which chunks are stored, and which reads hang.

Method: a state machine starts gets in threads of their own, whose reads hang until a rule lets them
go on, one record after the other, well or not. Whatever else is called meanwhile comes back at
once; a get that ends has the right bytes, and has all that could be read.
"""

import shutil
import tempfile
import threading
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from store_kit import Chunks, config_of
from waiting import within_seconds

from tierstore import TierStore
from tierstore.backend.opening import open_backend
from tierstore.embedded.planes import Patience
from tierstore.transfer import FailureReason

CHUNKS = Chunks(16_384, model="overlap")
COUNT = 24
NUMBERS = st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=8, unique=True)
SECONDS_MAX = 60
CALLS_MAX = 4


class Device:
    """Reads wait for their turn, which the test gives them."""

    def __init__(self):
        self._changed = threading.Condition()
        self._waiting = []
        self._outcomes = {}
        self._is_free = False

    def open(self, config, manifest, **ranks):
        return _Backend(open_backend(config, manifest, **ranks), self)

    @property
    def waiting_count(self):
        with self._changed:
            return len(self._waiting)

    def ask(self):
        """Wait for a turn; return whether the read shall work."""
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            self._changed.wait_for(lambda: self._is_free or turn in self._outcomes)
            self._waiting.remove(turn)
            return self._outcomes.pop(turn, True)

    def let_go(self, index, *, works):
        with self._changed:
            turns = [turn for turn in self._waiting if turn not in self._outcomes]
            if turns:
                self._outcomes[turns[index % len(turns)]] = works
                self._changed.notify_all()

    def free(self):
        with self._changed:
            self._is_free = True
            self._changed.notify_all()


class _Backend:
    def __init__(self, backend, device):
        self._backend = backend
        self._device = device

    def read(self, records):
        if self._device.ask():
            return self._backend.read(records)
        for record in records:
            record.slot[:] = b"\xee" * len(record.slot)
        return dict.fromkeys(range(len(records)), FailureReason.IO_ERROR)

    def __getattr__(self, name):
        return getattr(self._backend, name)


class Get(threading.Thread):
    """A get in a thread of its own."""

    def __init__(self, store, numbers):
        super().__init__(daemon=True)
        self.store = store
        self.numbers = numbers
        self.found = None
        self.error = None

    def run(self):
        try:
            self.found = CHUNKS.found(self.store, self.numbers)
        except BaseException as error:  # noqa: BLE001 - the machine looks
            self.error = error


class Overlaps(RuleBasedStateMachine):
    """One store in whose memory half of the chunks have room."""

    def __init__(self):
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="tierstore-overlap-"))
        self.device = Device()
        self.gets = []
        self.stored = set()
        self.doubtful = set()
        """Chunks of which a read failed, or that a reset came over."""

    @initialize(cascade=st.sampled_from(["write_through", "on_evict"]))
    def start(self, cascade):
        io = {"threads": 8, "deadline": "3600s"}
        config = config_of(self.path, primary="192KiB", capacity="16MiB", cascade=cascade, io=io)
        with CHUNKS.open(config) as store:
            CHUNKS.put(store, range(COUNT // 2))
        self.stored.update(range(COUNT // 2))
        patience = Patience(put_seconds=0.2, check_seconds=0.2)
        self.store = TierStore.open(
            config, CHUNKS.manifest, open_backend=self.device.open, patience=patience
        )

    @precondition(lambda self: len(self.gets) < CALLS_MAX)
    @rule(numbers=NUMBERS)
    def begin_get(self, numbers):
        get = Get(self.store, numbers)
        get.stored = self.stored & set(numbers)
        self.gets.append(get)
        get.start()
        within_seconds(lambda: self.device.waiting_count or not get.is_alive(), 0.05)

    @rule(numbers=NUMBERS)
    def put(self, numbers):
        count = CHUNKS.put(self.store, numbers)
        assert count <= len(numbers)
        self.stored.update(numbers)
        if count < len(numbers):
            self.doubtful.update(numbers)

    @rule(index=st.integers(0, 7), works=st.booleans())
    def let_go(self, index, works):
        if not works:
            self.doubtful.update(range(COUNT))
        self.device.let_go(index, works=works)

    @rule()
    def reset(self):
        self.store.reset()
        self.stored.clear()
        self.doubtful.update(range(COUNT))
        assert self.store.match_prefix(CHUNKS.keys([0])).chunk_count == 0

    @rule()
    def flush(self):
        self.store.flush()

    @rule(number=st.integers(0, COUNT - 1))
    def use_memory(self, number):
        slots = self.store._stack.primary.locate(CHUNKS.keys([number]))
        if slots != [None] and number in self.stored:
            assert self.store.match_prefix(CHUNKS.keys([number])).chunk_count == 1
            self.store.stats()

    @rule()
    def collect(self):
        for get in [get for get in self.gets if not get.is_alive()]:
            self.end(get)

    def end(self, get):
        self.gets.remove(get)
        get.join(SECONDS_MAX)
        assert not get.is_alive(), "a get does not end"
        assert get.error is None, get.error
        missing = get.stored - set(get.found) - self.doubtful
        assert not missing, f"{missing} could have been read"

    def teardown(self):
        try:
            self.device.free()
            for get in list(self.gets):
                self.end(get)
            primary = self.store._stack.primary
            assert within_seconds(lambda: not primary.arriving)
            self.store.flush()
            assert not primary._pins
            assert self.store.check() == []
        finally:
            self.device.free()
            self.store.close()
            shutil.rmtree(self.path, ignore_errors=True)


TestOverlaps = Overlaps.TestCase
TestOverlaps.settings = settings(max_examples=25, stateful_step_count=25)
