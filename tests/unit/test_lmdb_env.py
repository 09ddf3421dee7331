import os
from pathlib import Path

import pytest

from tierstore.errors import BackendError
from tierstore.lmdb_env import LmdbEnv


def test_the_lock_file_has_no_holes(tmp_path: Path):
    # The library writes to it through a mapping: a hole on a full device would end the process.
    env = LmdbEnv.open(tmp_path, map_bytes=1 << 20)
    status = (tmp_path / "lock.mdb").stat()
    env.close()
    assert status.st_blocks * 512 >= status.st_size > 0


def test_a_device_without_room_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(BackendError, match="no space left"):
        LmdbEnv.open(tmp_path, map_bytes=1 << 20)
