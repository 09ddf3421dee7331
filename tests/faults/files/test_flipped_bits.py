"""Random flipped bits in any file of a store: never a wrong byte, never a dead process or tier."""

import collections
import random

import pytest
from flipped_store import trials

GOOD = {
    "right",
    "counted miss",
    "missing",  # a key in the catalog of a killed process that reads otherwise now
    "started empty",
    "started empty at the second opening",
    "writes refused",  # until it is opened again
    "refused",  # in words: the row that names the format says another one
}


@pytest.fixture(params=["file", "lmdb"])
def backend(request):
    return request.param


@pytest.fixture(params=["closed", "killed"])
def state(request):
    return request.param


def flip(tmp_path, backend, state, count):
    first = random.randrange(1, 1 << 32)
    seeds = range(first, first + count)
    print(f"seeds from {first}")
    kinds = collections.Counter()
    for seed, trial in zip(seeds, trials(tmp_path, backend, state, seeds), strict=True):
        kinds[trial.kind] += 1
        assert trial.kind in GOOD, (seed, trial)
    print(dict(kinds))
    return kinds


def test_a_sample_of_flipped_bits_ends_in_right_bytes_or_in_a_miss(tmp_path, backend, state):
    kinds = flip(tmp_path, backend, state, 30)
    assert kinds["started empty"], "no flip hit the catalog: the test tests nothing"


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_ten_thousand_stores_with_flipped_bits_end_in_right_bytes_or_in_a_miss(
    tmp_path, backend, state
):
    flip(tmp_path, backend, state, 2500)


def test_a_store_without_flipped_bits_loses_nothing(tmp_path, backend, state):
    (trial,) = trials(tmp_path, backend, state, range(1))
    assert trial.kind == "right"
    assert trial.is_sound
