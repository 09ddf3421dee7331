import gc
import itertools
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tierstore.errors import BackendError
from tierstore.lmdb_env.env import LmdbEnv

TRY_TO_LOCK = textwrap.dedent("""
    import fcntl, sys

    with open(sys.argv[1], "r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        except BlockingIOError:
            print("locked")
""")


def _is_locked(path: Path) -> bool:
    """Return whether another process may not lock the first byte of a file."""
    command = [sys.executable, "-c", TRY_TO_LOCK, str(path)]
    return bool(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


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


def test_nothing_of_the_heap_comes_to_the_disk(tmp_path: Path):
    """Pages are taken from memory that held other things before: prompts, or a key."""
    marker = b"what the heap held before "
    env = LmdbEnv.open(tmp_path, map_bytes=16 << 20)
    for turn in range(20):
        sizes = (4000, 4080, 4096, 8192, 12_288, 20_000)
        blocks = [bytearray(marker * (size // len(marker))) for size in sizes for _ in range(200)]
        del blocks
        with env.write() as txn:
            for item in range(30):
                txn.put(b"%04d%04d" % (turn, item), b"v" * (100 if item % 3 else 5000))
    env.close()
    assert (tmp_path / "data.mdb").read_bytes().count(marker) == 0


def test_a_removed_environment_that_is_still_open_has_no_part_in_the_new_one(tmp_path: Path):
    path = tmp_path / "tier"
    old = LmdbEnv.open(path, map_bytes=1 << 20, sealed=True)
    with old.write() as txn:
        txn.put(b"key", b"old")
    shutil.rmtree(path)
    new = LmdbEnv.open(path, map_bytes=1 << 20, sealed=True)
    assert new is not old
    with new.write() as txn:
        assert txn.get(b"key") is None
    # It must not touch the lock file: that would drop the locks of the new one.
    old.close()
    assert not (path / "seal.bin").exists()
    assert _is_locked(path / "lock.mdb")
    new.close()
    assert not _is_locked(path / "lock.mdb")
    assert (path / "seal.bin").exists()


def test_the_directory_is_the_same_by_whatever_name(tmp_path: Path):
    env = LmdbEnv.open(tmp_path / "tier", map_bytes=1 << 20)
    (tmp_path / "tier").rename(tmp_path / "moved")
    moved = LmdbEnv.open(tmp_path / "moved", map_bytes=1 << 20)
    assert moved is env
    moved.close()
    env.close()


@pytest.mark.parametrize("durable", [True, False])
def test_the_library_flushes_each_commit_of_a_durable_environment_alone(tmp_path, durable):
    env = LmdbEnv.open(tmp_path, map_bytes=1 << 20, durable=durable)
    assert env._env.flags()["sync"] == durable
    env.close()


def _open_with_descriptors(path: Path, count: int) -> BackendError | None:
    """Open and close an environment below a number of descriptors; return why it failed."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some lie above free ones: other tests left them open.
    used = {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}
    unused = (number for number in itertools.count() if number not in used)
    end = next(itertools.islice(unused, count, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (end, before[1]))
    try:
        LmdbEnv.open(path, map_bytes=1 << 20).close()
    except BackendError as error:
        return error
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    return None


def test_an_opening_that_failed_takes_no_locks_from_the_next_one(tmp_path: Path):
    # Whoever keeps its exception keeps the frames that it went through, and what lies in them.
    LmdbEnv.open(tmp_path, map_bytes=1 << 20).close()
    failures = []
    while (failure := _open_with_descriptors(tmp_path, len(failures))) is not None:
        failures.append(failure)
        assert len(failures) < 100
    assert len(failures) > 5
    env = LmdbEnv.open(tmp_path, map_bytes=1 << 20)
    failures.clear()
    gc.collect()
    is_locked = _is_locked(tmp_path / "lock.mdb")
    env.close()
    assert is_locked
