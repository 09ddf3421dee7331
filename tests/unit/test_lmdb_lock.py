"""The files of locks are input: whatever lies there, an opener finds its way or names it."""

import fcntl
import os
import struct
from pathlib import Path

import pytest

from tierstore.errors import BackendError
from tierstore.lmdb_env import LmdbEnv
from tierstore.lmdb_lock import LOCK_FILE_BYTES, library_lock, opening_lock

MAP_BYTES = 1 << 20


def open_env(path):
    return LmdbEnv.open(path, map_bytes=MAP_BYTES, sealed=True, wait_seconds_max=0)


def use(path):
    env = open_env(path)
    with env.write() as txn:
        txn.put(b"key", b"value")
    with env.read() as txn:
        assert txn.get(b"key") == b"value"
    env.close()


@pytest.mark.parametrize("size", [0, 1, 8192, LOCK_FILE_BYTES, 100_000])
@pytest.mark.parametrize("filled_with", [b"\0", b"\xff", b"\x01"])
def test_whatever_lies_in_the_lock_file_of_the_library_is_started_anew(tmp_path, size, filled_with):
    (tmp_path / "lock.mdb").write_bytes(filled_with * size)
    use(tmp_path)
    use(tmp_path)


def test_a_planted_lock_file_of_a_gigantic_size_takes_no_room(tmp_path):
    with (tmp_path / "lock.mdb").open("wb") as file:
        file.truncate(1 << 40)
    use(tmp_path)
    status = (tmp_path / "lock.mdb").stat()
    assert status.st_size == LOCK_FILE_BYTES
    assert status.st_blocks * 512 <= 2 * LOCK_FILE_BYTES


def test_a_lock_file_that_others_use_keeps_its_size_and_gets_bounded_room(tmp_path):
    with (tmp_path / "lock.mdb").open("w+b") as file:
        file.truncate(1 << 40)
        # As a program that has the environment open; of this process, so by its description.
        shared = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0)
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, shared)
        with library_lock(tmp_path, wait_seconds_max=0) as lock:
            assert not lock.is_alone
            lock.prepare_file()
    status = (tmp_path / "lock.mdb").stat()
    assert status.st_size == 1 << 40
    assert LOCK_FILE_BYTES <= status.st_blocks * 512 <= 2 << 20


@pytest.mark.parametrize("name", ["opening.lock", "lock.mdb", "seal.bin", "distrust", "data.mdb"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "directory"])
def test_what_is_no_file_is_named_and_not_followed(tmp_path, name, kind):
    aim = tmp_path / "aim"
    path = tmp_path / "tier" / name
    path.parent.mkdir()
    if kind == "link":
        aim.write_bytes(b"of somebody else")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(aim)
    with pytest.raises(BackendError, match=f"{name}: is not a regular file"):
        open_env(tmp_path / "tier")
    if kind == "link":
        assert aim.read_bytes() == b"of somebody else"
    assert aim.exists() == (kind == "link")


def test_two_names_of_one_directory_are_one_environment(tmp_path):
    (tmp_path / "other").symlink_to(tmp_path)
    env, other = open_env(tmp_path), open_env(tmp_path / "other")
    assert env is other
    env.close()
    use(tmp_path)
    other.close()


def test_the_files_are_made_for_their_user_alone(tmp_path):
    use(tmp_path)
    names = {"data.mdb", "lock.mdb", "opening.lock", "seal.bin", "writer.lock"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_the_holder_of_the_opening_lock_is_named_while_it_holds_it(tmp_path):
    path = tmp_path / "opening.lock"
    with opening_lock(tmp_path, wait_seconds_max=0):
        assert path.read_text() == str(os.getpid())
        with (
            pytest.raises(BackendError, match=rf"within 0 s: .*process id {os.getpid()}\)"),
            opening_lock(tmp_path, wait_seconds_max=0),
        ):
            pass
        path.write_bytes(b"\xff" * 100_000)
        with (
            pytest.raises(BackendError, match="another process is opening it"),
            opening_lock(tmp_path, wait_seconds_max=0),
        ):
            pass
    assert path.stat().st_size == 0


def test_a_lock_is_given_back_though_a_forked_process_has_a_copy(tmp_path):
    # A process that is started by exec has one for a moment; one that a C library forks, for good.
    with opening_lock(tmp_path, wait_seconds_max=0):
        links = list(Path("/proc/self/fd").iterdir())
        copies = [os.dup(int(link.name)) for link in links if is_lock(link)]
        assert copies
    try:
        with opening_lock(tmp_path, wait_seconds_max=0):
            pass
    finally:
        for copy in copies:
            os.close(copy)


def is_lock(link):
    try:
        return link.readlink().name == "opening.lock"
    except FileNotFoundError:
        return False
