"""Eight threads on one store, and a close while they are inside."""

import random
import threading

import numpy as np
import pytest
from store_kit import Chunks, config_of

from tierstore.errors import ClosedError

CHUNKS = Chunks(16_384)
NUMBERS = range(600)
CALLS = 40


@pytest.mark.parametrize("cascade", ["write_through", "on_evict"])
@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_eight_threads_get_the_right_bytes_until_the_store_is_closed(tmp_path, backend, cascade):
    config = config_of(tmp_path, backend=backend, primary="2MiB", capacity="16MiB", cascade=cascade)
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    keys, rows = CHUNKS.keys(NUMBERS), CHUNKS.array(NUMBERS)
    store = CHUNKS.open(config)
    done, outcomes, found_counts = threading.Semaphore(0), [], []

    def work(dice, out):
        calls = 0
        try:
            while True:
                first, count = dice.randrange(len(NUMBERS) - 24), dice.randrange(1, 24)
                chosen = slice(first, first + count)
                store.put(keys[chosen], rows[chosen])
                first = dice.randrange(len(NUMBERS) - 24)
                chosen = slice(first, first + count)
                found = np.array(store.get(keys[chosen], out[:count]))
                assert np.array_equal(out[:count][found], rows[chosen][found])
                found_counts.append(found.sum())
                store.match_prefix(keys[chosen])
                if dice.random() < 0.05:
                    assert store.check() == []
                calls += 1
                if calls == CALLS:
                    done.release()
        except ClosedError:
            outcomes.append("closed")
        except BaseException as error:
            outcomes.append(error)
            done.release()
            raise

    threads = [
        threading.Thread(
            target=work, args=(random.Random(seed + i), np.zeros((24, 16_384), np.uint8))
        )
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for _ in threads:
        done.acquire()
    closers = [threading.Thread(target=store.close) for _ in range(2)]
    for thread in closers:
        thread.start()
    for thread in (*threads, *closers):
        thread.join(60)
    assert outcomes == ["closed"] * 8
    assert sum(found_counts) > 8 * CALLS, "hardly a hit: the test tests nothing"
    with CHUNKS.open(config) as store:
        assert store.check() == []
