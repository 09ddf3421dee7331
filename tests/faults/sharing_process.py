"""One of several stores on a path: `python sharing_process.py PATH BACKEND CAPACITY SEED`.

Stores, loads, resets and checks chunks of one of a few models of unequal chunk size, all of it as
the seed says; prints a line per step.
"""

import random
import sys

from store_kit import Chunks, config_of

SIZES = (4096, 65_536, 1 << 20)
STEPS = 120
NUMBERS = 1500


def main(path, backend, capacity, seed):
    dice = random.Random(seed)
    size = dice.choice(SIZES)
    chunks = Chunks(size, model=f"model {size} {dice.randrange(2)}")
    count = max(1, min(40, (1 << 20) // size))
    config = config_of(path, backend=backend, primary="4MiB", capacity=capacity)
    with chunks.open(config) as store:
        for step in range(STEPS):
            first = dice.randrange(NUMBERS)
            kind = dice.random()
            if kind < 0.5:
                chunks.put(store, range(first, first + count))
            elif kind < 0.9:
                chunks.found(store, range(first, first + count))  # compares every byte
            elif kind < 0.95:
                store.flush()
            elif kind < 0.97:
                store.reset()
            else:
                assert store.check() == []
            print(step, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
