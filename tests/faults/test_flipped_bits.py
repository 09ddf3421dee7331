"""Random flipped bits in any file of a store: never a wrong byte, never a dead process or tier."""

import collections
import os
import random

import pytest
from flipped_store import FlippedStore

GOOD = {
    "right",
    "counted miss",
    "missing",  # a key in the catalog of a killed process that reads otherwise now
    "started anew",
    "started anew at the second opening",
    "writes refused",  # until it is opened again
}


@pytest.fixture(params=["file", "lmdb"])
def backend(request):
    return request.param


@pytest.fixture(params=[True, False], ids=["closed", "killed"])
def store(tmp_path, backend, request):
    return FlippedStore(tmp_path, backend, closed=request.param)


def flip(store, count):
    first = random.randrange(1 << 32)
    print(f"seeds from {first}")
    kinds = collections.Counter()
    for seed in range(first, first + count):
        trial = store.run(seed)
        kinds[trial.kind] += 1
        assert trial.kind in GOOD, (seed, trial)
    print(os.linesep.join(f"{count:6} {kind}" for kind, count in kinds.most_common()))
    return kinds


def test_a_sample_of_flipped_bits_ends_in_right_bytes_or_in_a_miss(store):
    kinds = flip(store, 30)
    assert kinds["started anew"], "no flip hit the catalog: the test tests nothing"


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_ten_thousand_times_flipped_bits_end_in_right_bytes_or_in_a_miss(store):
    flip(store, 2500)


def test_bits_that_are_not_flipped_cost_nothing(store, monkeypatch):
    monkeypatch.setattr("flipped_store._flip", lambda *_: "none")
    trial = store.run(0)
    assert trial.kind == "right"
    assert trial.is_sound
