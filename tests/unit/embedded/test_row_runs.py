"""Which rows of a caller's array a call reads and fills, in any order of keys, with gaps."""

import random

import numpy as np
import pytest
from store_kit import Chunks

CHUNKS = Chunks(chunk_bytes=5000)
STORED = range(0, 60, 2)
UNTOUCHED = 0xA5


@pytest.fixture
def store():
    config = {"version": 1, "primary": {"capacity": "4MiB"}}
    with CHUNKS.open(config) as store:
        yield store


def rows_like(array, kind):
    return array if kind == "matrix" else [bytearray(row) for row in array]


@pytest.mark.parametrize("kind", ["matrix", "buffers"])
@pytest.mark.parametrize("seed", range(8))
def test_each_row_gets_the_bytes_of_its_key_or_stays_as_it_is(store, kind, seed):
    """Keys that are repeated, absent, in runs, and in any order."""
    dice = random.Random(seed)
    numbers = list(STORED)
    for _ in range(3):  # so that slots are in another order than keys
        dice.shuffle(numbers)
        assert CHUNKS.put(store, numbers[:10]) == 10
    assert all(store.put(CHUNKS.keys(numbers), rows_like(CHUNKS.array(numbers), kind)))
    first = dice.randrange(20)
    wanted = [*range(first, first + 25), *dice.choices(range(70), k=25), *STORED]
    out = rows_like(np.full((len(wanted), CHUNKS.chunk_bytes), UNTOUCHED, np.uint8), kind)
    found = store.get(CHUNKS.keys(wanted), out)
    assert found == [number in STORED for number in wanted]
    expected = CHUNKS.array(wanted)
    expected[~np.array(found)] = UNTOUCHED
    assert all(bytes(row) == bytes(right) for row, right in zip(out, expected, strict=True))


def test_a_put_of_chunks_of_which_some_are_there_takes_the_others_rows(store):
    assert CHUNKS.put(store, [3, 4, 9]) == 3
    assert CHUNKS.put(store, range(12)) == 12
    assert CHUNKS.found(store, range(12)) == list(range(12))
