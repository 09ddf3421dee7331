"""The pages that a reader touches before the library does."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from tierstore.device.directory import Directory
from tierstore.lmdb_env.env import LmdbEnv
from tierstore.lmdb_env.reach import ReachedPages


@pytest.mark.parametrize(("name", "size"), [("data.mdb", 0), ("data.mdb", 4096), ("lock.mdb", 0)])
def test_a_file_that_is_cut_short_while_it_is_opened_is_an_error_of_the_device(
    tmp_path: Path, name: str, size: int
):
    LmdbEnv.open(tmp_path, map_bytes=1 << 20).close()
    os.truncate(tmp_path / name, size)
    files, pages = Directory.open(tmp_path), ReachedPages()
    with pytest.raises(OSError, match="was cut short"):
        pages.map(files)
    pages.close()
    files.close()


@pytest.mark.parametrize("kind", ["read", "read_views"])
def test_a_reading_that_ends_badly_has_touched_the_readers_as_well(tmp_path, kind, monkeypatch):
    env = LmdbEnv.open(tmp_path, map_bytes=1 << 20)
    touched = []
    monkeypatch.setattr(ReachedPages, "reach_readers", lambda _pages: touched.append(1))
    with suppress(LookupError), getattr(env, kind)():
        touched.clear()
        raise LookupError
    env.close()
    assert touched == [1]
