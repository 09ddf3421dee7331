"""Foreign code at the n-th line that a call executes in the modules that change something.

Between any two lines of a call, its thread may run a signal handler, a `__del__` or a handler of
log records, which calls the store again, or raises. A trace function does so here.
"""

import random
import sys

import numpy as np
from python_paths import ROOT
from store_kit import Chunks, config_of

from tierstore import TierStore
from tierstore.errors import ReentryError

CHUNKS = Chunks(16_384)
TRACED = {
    "embedded": (
        "store batched_put pipelined_get planes call_gate loop idle_carrier flush "
        "tier_pace catalog_reader"
    ),
    "tier": "stack loads promotion next_victims intake locator stale uses cascade",
    "tier/admission": "admitted on_evict write_through",
    "tier/memory": "primary arrivals eviction pin_counts slot_pool",
    "tier/disk": "tier flushes resets served_catalog",
    "tier/write_behind": "demotes write_queue retries failed_demotes",
    "executor": "executor jobs copies tasks",
    "policy": "arc arc_misses lru",
    ".": "io_pool",
}

TRACED_FILES = tuple(
    str((ROOT / "tierstore" / room / f"{name}.py").resolve(strict=True))
    for room, names in TRACED.items()
    for name in names.split()
)


# A signal comes between two calls in C or at the start of a function: the gate has neither between
# what belongs together, but a trace function raises there too.
RAISING_FILES = tuple(name for name in TRACED_FILES if not name.endswith("/call_gate.py"))
SAMPLES = 40
LINES_MAX = 1 << 20


class AtLine:
    """Runs `act` once, at the n-th line that this thread executes in the traced modules.

    Or in the functions of one name there.
    """

    def __init__(self, n, act, function=None, files=TRACED_FILES):
        self.files = files
        self.n = n
        self.act = act
        self.function = function
        self.count = 0

    def __enter__(self):
        self.before = sys.gettrace()  # a measurement of coverage, which goes on afterwards
        sys.settrace(self._call)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    @property
    def has_acted(self):
        return self.count >= self.n

    def _call(self, frame, event, argument):
        is_traced = frame.f_code.co_filename.endswith(self.files)
        is_chosen = self.function in (None, frame.f_code.co_name)
        return self._line if is_traced and is_chosen else None

    def _line(self, frame, event, argument):
        if event == "line":
            self.count += 1
            if self.count == self.n:
                sys.settrace(self.before)
                self.act()
        return self._line


class Life:
    """One store, and what is known of it."""

    def __init__(self, path, cascade="write_through", patience=None):
        self.config = config_of(path, primary="1MiB", capacity="16MiB", cascade=cascade)
        self.patience = patience
        self.stored = []
        self.number = 0
        self.open()

    def open(self):
        self.store = TierStore.open(self.config, CHUNKS.manifest, patience=self.patience)

    def new(self, count=6):
        self.number += count
        return range(self.number - count, self.number)

    def put(self):
        numbers = self.new()
        assert CHUNKS.put(self.store, numbers) == len(numbers)
        self.stored = [*self.stored[-40:], *numbers]

    def get(self):
        asked = [*self.stored[-4:], *self.stored[:12:2], 1 << 40]
        assert CHUNKS.found(self.store, asked) == asked[:-1]

    def flush(self):
        CHUNKS.put(self.store, self.stored[-3:])
        self.store.flush()

    def look(self):
        assert self.store.check() == []
        assert self.store.match_prefix(CHUNKS.keys(self.stored)).chunk_count == len(self.stored)
        self.store.stats()


class Intruder:
    """Calls a store with everything there is, and expects to be refused or served as usual."""

    def __init__(self, life):
        self.life = life
        self.refused_count = 0
        self.served_count = 0

    def __call__(self):
        store, numbers = self.life.store, [2_000_000, 2_000_001]
        keys, rows = CHUNKS.keys(numbers), CHUNKS.array(numbers)
        calls = [
            lambda: store.put(keys, rows),
            lambda: store.get(keys, np.zeros_like(rows)),
            lambda: store.match_prefix(keys),
            store.flush,
            store.stats,
        ]
        for call in random.sample(calls, 3):
            try:
                call()
                self.served_count += 1
            except ReentryError as error:
                assert "under way" in str(error)  # noqa: PT017
                self.refused_count += 1


def lines_of(life, call, files=TRACED_FILES):
    with AtLine(LINES_MAX, lambda: None, files=files) as line:
        getattr(life, call)()
    return line.count


def call_at(life, call, n, act, files=TRACED_FILES):
    """Run a call with `act` at its n-th line; return whether it came to that line."""
    with AtLine(n, act, files=files) as line:
        getattr(life, call)()
    return line.has_acted


def sampled_lines(count):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed).sample(range(1, count + 1), min(count, SAMPLES))


def is_quiet(store):
    """Return whether nothing is pinned or on its way."""
    store.flush()
    primary = store._stack.primary
    return not primary._pins and not primary.arriving
