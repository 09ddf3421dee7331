"""Two, four and eight processes on one path: no wrong byte, no byte too many, and all serve.

Goal: engines of three models with unequal chunks share a path while they are started, reset, closed
and killed at random. Method: `shared_path`, which also runs by hand for as long as one likes.
"""

import random

import pytest
from filesystems import mounted
from shared_path import Plan, run

SECONDS = 5
SECONDS_BY_HAND = 100


def share(path, backend, engine_count, seconds):
    plan = Plan(
        path=path / "tier",
        backend=backend,
        engine_count=engine_count,
        seconds=seconds,
        seed=random.randrange(1 << 32),
    )
    tally = run(plan)
    assert tally.starts >= engine_count
    assert tally.found_by_others == engine_count
    assert tally.samples
    return tally


@pytest.mark.slow
@pytest.mark.parametrize("engine_count", [2, 4, 8])
@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_engines_that_share_a_path_stay_right_within_its_capacity(tmp_path, backend, engine_count):
    share(tmp_path, backend, engine_count, SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ext4-bigalloc", "ext4-no-extents", "tmpfs-huge"])
@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_engines_share_a_path_whatever_units_its_file_system_frees(tmp_path, kind, backend):
    with mounted(kind, 512 << 20, below=tmp_path) as mount:
        share(mount, backend, 4, SECONDS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine_count", [2, 4, 8])
@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_engines_that_share_a_path_for_long(tmp_path, backend, engine_count):
    tally = share(tmp_path, backend, engine_count, SECONDS_BY_HAND)
    assert tally.kills
    assert tally.hits
