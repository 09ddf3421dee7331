"""Modes and owners of what lies below a path: closed to others, and refused if another user's."""

import os
import stat

import pytest
from small_tier import BACKENDS, CHUNKS, FEW, configured, fill, is_refused, store_and_find


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", [0o000, 0o777, 0o022])
def test_modes_keep_others_out_whatever_the_mask(tmp_path, backend, mask):
    path = tmp_path / "deep" / "tier"
    before = os.umask(mask)
    try:
        config = configured(path, backend)
        fill(config)
    finally:
        os.umask(before)
    assert_closed_to_others(tmp_path / "deep")
    store_and_find(config, path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_modes_that_an_earlier_release_left_are_tightened(tmp_path, backend):
    path = tmp_path / "tier"
    config = configured(path, backend)
    fill(config)
    for file in [path, *path.rglob("*")]:
        file.chmod(0o755 if file.is_dir() else 0o644)
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, FEW) == list(FEW)
        assert_closed_to_others(path)
    assert_closed_to_others(path)


def assert_closed_to_others(path):
    for file in [path, *path.rglob("*")]:
        mode = 0o700 if file.is_dir() else 0o600
        assert stat.S_IMODE(file.lstat().st_mode) == mode, file


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_belongs_to_another_user_is_refused_by_name(tmp_path, backend):
    path = tmp_path / "tier"
    config = configured(path, backend)
    fill(config)
    names = ["", "catalog", "owners", "rank0", "catalog/data.mdb", ".tierstore"]
    names.append("rank0/payload" if backend == "lmdb" else next(path.glob("rank0/*.seg")).name)
    for name in names:
        theirs = path / ("rank0" if name.endswith(".seg") else "") / name
        os.chown(theirs, 12345, -1)
        assert is_refused(config, str(theirs), "12345", "chown"), name
        assert theirs.stat().st_uid == 12345
        os.chown(theirs, os.geteuid(), -1)
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, FEW) == list(FEW)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_user_without_privileges_works_under_any_mask(tmp_path, backend):
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == 0 and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgid(54321)
            os.setuid(54321)
            os.umask(0o777)
            path = tmp_path / "a" / "tier"
            store_and_find(configured(path, backend), path)
            assert_closed_to_others(tmp_path / "a")
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, "the child failed, see its output"
