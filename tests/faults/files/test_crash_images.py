"""What a kill or a power cut leaves, at every write: images that open, and serve right bytes."""

import random

import pytest
from campaign import run_campaign
from crashes import CrashedStores

GRAVE = ("wrong bytes", "crashes", "hangs", "exceptions", "refused")


@pytest.fixture(params=["file", "lmdb"])
def backend(request):
    return request.param


def problems_of(stores, lengths, seed=None):
    """Use the images at some lengths; with a seed, power was cut."""
    problems = {}
    for length in lengths:
        dice = None if seed is None else random.Random(f"{seed}/{length}")
        answer = stores.use_image(length, dice)
        if answer["problems"]:
            problems[length] = answer["problems"]
    return problems


def test_a_killed_store_keeps_what_was_flushed_and_stores_again(tmp_path, backend):
    stores = CrashedStores(tmp_path, backend)
    lengths = random.sample(range(stores.recorder.length + 1), 10)
    assert problems_of(stores, [*lengths, 0, stores.recorder.length]) == {}


def test_a_power_cut_leaves_a_store_that_opens_and_serves_no_wrong_byte(tmp_path, backend):
    first = random.randrange(1, 1 << 32)
    print(f"seeds from {first}")
    found = run_campaign(f"crash-{backend}", range(first, first + 16), folder=tmp_path)
    assert {name: found.counts[name] for name in GRAVE} == dict.fromkeys(GRAVE, 0), found.failures


def test_a_power_cut_leaves_a_sound_tier_within_its_capacity(tmp_path, backend):
    found = run_campaign(f"crash-{backend}", range(1, 41), folder=tmp_path)
    assert found.failures == []


def test_what_a_durable_tier_has_flushed_survives_a_power_cut(tmp_path, backend):
    found = run_campaign(f"cut-{backend}", range(1, 41), folder=tmp_path)
    assert found.counts["lost"] == 0
    assert found.failures == []


@pytest.mark.exhaustive
@pytest.mark.timeout(14_400)
def test_a_store_that_is_killed_at_any_write_keeps_what_was_flushed(tmp_path, backend):
    stores = CrashedStores(tmp_path, backend)
    assert problems_of(stores, range(stores.recorder.length + 1)) == {}


@pytest.mark.exhaustive
@pytest.mark.timeout(14_400)
def test_a_power_cut_at_any_write_leaves_a_sound_store(tmp_path, backend):
    stores = CrashedStores(tmp_path, backend)
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    assert problems_of(stores, range(stores.recorder.length + 1), seed) == {}
