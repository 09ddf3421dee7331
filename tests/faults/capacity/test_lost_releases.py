"""Blocks that were given back, and are there again: a power cut came before the device knew."""

import os
import shutil

import pytest
from store_kit import MIB, Chunks, config_of, du

PAGE = 4096
CAPACITY = 8 * MIB
CHUNKS = Chunks(65_536)
MANY = range(300)
"""More than the tier holds: the older half is evicted, and its pages are holes."""


@pytest.fixture
def tier(tmp_path):
    """Return the path of a tier that was full and is closed, and its configuration."""
    config = config_of(tmp_path / "tier", primary="1MiB", capacity="8MiB", io={"threads": 1})
    with CHUNKS.open(config) as store:
        for first in range(0, len(MANY), 10):
            CHUNKS.put(store, MANY[first : first + 10])
            store.flush()
        CHUNKS.found(store, MANY[200:210])  # used: they stay, and holes come around them
        CHUNKS.put(store, range(1000, 1040))
        store.flush()
    return tmp_path / "tier", config


def held(config):
    with CHUNKS.open(config) as store:
        return CHUNKS.found(store, [*MANY, *range(1000, 1040)])


def fill_holes(path):
    """Allocate all of every segment, as if no hole was ever punched; return what that added."""
    before = du(path)
    for file in path.rglob("*.seg"):
        with file.open("r+b") as opened:
            os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)
    return du(path) - before


def test_holes_that_the_device_lost_are_punched_again_before_anybody_writes(tier):
    path, config = tier
    kept = held(config)
    added = fill_holes(path)
    assert added > 64 * PAGE
    filled = du(path)
    with CHUNKS.open(config) as store:
        assert du(path) <= min(CAPACITY, filled - added + 16 * PAGE)
        assert store.check() == []
        assert CHUNKS.found(store, kept) == kept


def test_segments_whose_removal_the_device_lost_do_not_stay_beyond_the_capacity(tier):
    path, config = tier
    kept = held(config)
    some = max(path.rglob("*.seg"))
    for number in range(1, 400):
        shutil.copyfile(some, some.with_name(f"{int(some.stem, 16) - 10_000 - number:08x}.seg"))
    for file in path.rglob("*.seg"):
        file.chmod(0o600)
    assert du(path) > 2 * CAPACITY
    with CHUNKS.open(config) as store:
        assert du(path) <= CAPACITY
        # A fresh owner may make room for its first segment.
        assert len(CHUNKS.found(store, kept)) >= len(kept) - 8
        assert store.check() == []
