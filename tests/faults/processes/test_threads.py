"""Eight threads on one store, and a close while they are inside."""

import itertools
import random
import threading

import numpy as np
import pytest
from store_kit import Chunks, config_of

from tierstore.errors import ClosedError

CHUNKS = Chunks(16_384)
NUMBERS = range(600)
CALLS = 40
KEYS, ROWS = CHUNKS.keys(NUMBERS), CHUNKS.array(NUMBERS)


class Worker(threading.Thread):
    """Stores and loads until the store is closed."""

    def __init__(self, store, seed):
        super().__init__()
        self.store = store
        self.dice = random.Random(seed)
        self.worked = threading.Event()
        self.found_count = 0
        self.outcome = None

    def run(self):
        try:
            for call in itertools.count():
                self.play()
                if call == CALLS:
                    self.worked.set()
        except ClosedError:
            self.outcome = "closed"
        except BaseException as error:
            self.outcome = error
            raise
        finally:
            self.worked.set()

    def play(self):
        count = self.dice.randrange(1, 24)
        first = self.dice.randrange(len(NUMBERS) - count)
        self.store.put(KEYS[first : first + count], ROWS[first : first + count])
        first = self.dice.randrange(len(NUMBERS) - count)
        keys, rows = KEYS[first : first + count], ROWS[first : first + count]
        out = np.zeros_like(rows)
        found = np.array(self.store.get(keys, out))
        assert np.array_equal(out[found], rows[found])
        assert not out[~found].any()
        self.found_count += found.sum()
        self.store.match_prefix(keys)
        if self.dice.random() < 0.05:
            assert self.store.check() == []


@pytest.mark.parametrize("cascade", ["write_through", "on_evict"])
@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_eight_threads_get_the_right_bytes_until_the_store_is_closed(tmp_path, backend, cascade):
    config = config_of(tmp_path, backend=backend, primary="2MiB", capacity="16MiB", cascade=cascade)
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    store = CHUNKS.open(config)
    workers = [Worker(store, seed + number) for number in range(8)]
    closers = [threading.Thread(target=store.close) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        assert worker.worked.wait(60)
    for closer in closers:
        closer.start()
    for thread in (*workers, *closers):
        thread.join(60)
    assert [worker.outcome for worker in workers] == ["closed"] * 8
    assert sum(worker.found_count for worker in workers) > 8 * CALLS, "hardly a hit"
    with CHUNKS.open(config) as store:
        assert store.check() == []
