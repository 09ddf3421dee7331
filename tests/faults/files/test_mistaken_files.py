"""Database files in each other's place: sound, and not what belongs there."""

import itertools
import shutil

import pytest
from store_kit import MIB, Chunks, config_of, du

CHUNKS = Chunks(65_536)
SOME = range(24)
NEW = range(100, 124)
NAMES = ["catalog/data.mdb", "rank0/payload/data.mdb"]


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(NAMES)))
@pytest.mark.parametrize("is_killed", [True, False])
def test_a_database_in_the_place_of_another_is_started_anew(tmp_path, source, target, is_killed):
    config = config_of(tmp_path / "tier", backend="lmdb", primary="4MiB", capacity="8MiB")
    with CHUNKS.open(config) as store:
        CHUNKS.put(store, range(1000, 1060))
        CHUNKS.put(store, SOME)
        store.flush()
        shutil.copytree(tmp_path / "tier", tmp_path / "killed")
    if is_killed:
        shutil.rmtree(tmp_path / "tier")
        (tmp_path / "killed").rename(tmp_path / "tier")
    path = tmp_path / "tier"
    shutil.copyfile(path / source, path / target)
    for _ in range(2):
        with CHUNKS.open(config) as store:
            CHUNKS.found(store, SOME)
            CHUNKS.put(store, NEW)
            store.flush()
            assert store.check() == []
        with CHUNKS.open(config) as store:
            assert CHUNKS.found(store, NEW) == list(NEW)
        assert du(path) <= 8 * MIB
