"""The files of locks are input: whatever lies there, an opener finds its way or names it."""

import fcntl
import os
import stat
import struct
import threading
from pathlib import Path

import pytest
from planted import plant

from tierstore.device.directory import Directory
from tierstore.errors import BackendError
from tierstore.lmdb_env import lock as lmdb_lock
from tierstore.lmdb_env.env import LmdbEnv
from tierstore.lmdb_env.lock import LOCK_FILE_BYTES, library_lock, opening_lock

MAP_BYTES = 1 << 20


def open_env(path):
    return LmdbEnv.open(path, map_bytes=MAP_BYTES, sealed=True, wait_seconds_max=0)


def set_lock(file, kind, start, count=1):
    wanted = struct.pack("hhqqi4x", kind, os.SEEK_SET, start, count, 0)
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, wanted)


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
        set_lock(file, fcntl.F_RDLCK, 0)
        set_lock(file, fcntl.F_WRLCK, 1_000_000)
        with library_lock(Directory.open(tmp_path), wait_seconds_max=0) as lock:
            assert not lock.is_alone
            lock.prepare_file()
    status = (tmp_path / "lock.mdb").stat()
    assert status.st_size == 1 << 40
    assert LOCK_FILE_BYTES <= status.st_blocks * 512 <= 2 << 20


NAMES = ["opening.lock", "lock.mdb", "seal.bin", "distrust", "data.mdb"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "kind", ["link", "dangling link", "hard link", "pipe", "socket", "empty directory", "device"]
)
def test_what_is_no_file_of_ours_is_not_followed_and_gives_way(tmp_path, name, kind):
    aim, path = tmp_path / "aim", tmp_path / "tier"
    aim.write_bytes(b"of somebody else" * 1000)
    path.mkdir()
    plant(path / name, kind, aim)
    use(path)
    use(path)
    assert aim.read_bytes() == b"of somebody else" * 1000
    assert aim.stat().st_nlink == 1
    assert not (tmp_path / "nothing").exists()
    assert all(stat.S_ISREG(file.lstat().st_mode) for file in path.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_a_directory_with_content_in_the_place_of_a_file_is_refused_by_name(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "theirs").write_bytes(b"x")
    with pytest.raises(BackendError, match=f"{name}: is a directory with content .* move it away"):
        open_env(tmp_path)
    assert (tmp_path / name / "theirs").read_bytes() == b"x"


@pytest.mark.parametrize("byte", ["the first", "all"])
def test_locks_of_somebody_who_can_only_read_keep_nobody_from_verifying(tmp_path, byte):
    use(tmp_path)
    content = bytearray((tmp_path / "data.mdb").read_bytes())
    content[8192:] = b"\xff" * (len(content) - 8192)
    (tmp_path / "data.mdb").write_bytes(content)
    with (tmp_path / "lock.mdb").open("rb") as reader:
        set_lock(reader, fcntl.F_RDLCK, 0, 1 if byte == "the first" else 0)
        env = open_env(tmp_path)
        assert env.findings.damage
        with env.write() as txn:
            txn.put(b"key", b"value")
        env.close()
        env = open_env(tmp_path)
        assert not env.findings.damage
        with env.read() as txn:
            assert txn.get(b"key") == b"value"
        env.close()


@pytest.mark.parametrize("kind", ["flock", "byte", "both"])
def test_an_opening_lock_of_somebody_who_can_only_read_is_replaced(tmp_path, kind):
    use(tmp_path)
    with (tmp_path / "opening.lock").open("rb") as reader:
        if kind != "byte":
            fcntl.flock(reader, fcntl.LOCK_EX)
        if kind != "flock":
            set_lock(reader, fcntl.F_RDLCK, 0, 0)
        use(tmp_path)
        assert not os.path.samestat(os.fstat(reader.fileno()), (tmp_path / "opening.lock").stat())
        with (
            opening_lock(Directory.open(tmp_path), wait_seconds_max=0),
            pytest.raises(BackendError, match=f"process id {os.getpid()}"),
            opening_lock(Directory.open(tmp_path), wait_seconds_max=0),
        ):
            pass


def test_an_opening_lock_of_an_earlier_release_is_waited_for(tmp_path):
    use(tmp_path)
    with (tmp_path / "opening.lock").open("r+b") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        holder.write(b"%d" % os.getpid())
        holder.flush()
        with (
            pytest.raises(BackendError, match=f"process id {os.getpid()}"),
            opening_lock(Directory.open(tmp_path), wait_seconds_max=0.5),
        ):
            pass
    use(tmp_path)


def test_who_stands_still_while_it_takes_its_turn_loses_it_to_nobody(tmp_path, monkeypatch):
    """Between its two locks. The other one would replace the file, a moment too late."""
    lock_byte, unlink = fcntl.fcntl, Directory.unlink
    stands_still, would_replace, is_inside = (threading.Event() for _ in range(3))
    inside, inside_max = set(), []

    def lock_late(descriptor, command, *rest):
        if threading.current_thread().name == "slow" and command == fcntl.F_OFD_SETLK:
            stands_still.set()
            would_replace.wait(10 * lmdb_lock._BLOCKED_SECONDS)
        return lock_byte(descriptor, command, *rest)

    def unlink_late(directory, name):
        would_replace.set()
        is_inside.wait(60)
        unlink(directory, name)

    def take_turn():
        name = threading.current_thread().name
        with opening_lock(Directory.open(tmp_path), wait_seconds_max=60):
            inside.add(name)
            inside_max.append(len(inside))
            if name == "slow":
                is_inside.set()
                threads[1].join(10 * lmdb_lock._BLOCKED_SECONDS)
            inside.discard(name)

    monkeypatch.setattr(fcntl, "fcntl", lock_late)
    monkeypatch.setattr(Directory, "unlink", unlink_late)
    threads = [threading.Thread(target=take_turn, name=name) for name in ("slow", "quick")]
    threads[0].start()
    stands_still.wait(60)
    threads[1].start()
    for thread in threads:
        thread.join(60)
    assert inside_max == [1, 1]


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
    with opening_lock(Directory.open(tmp_path), wait_seconds_max=0):
        assert path.read_text() == str(os.getpid())
        with (
            pytest.raises(BackendError, match=rf"within 0 s: .*process id {os.getpid()}\)"),
            opening_lock(Directory.open(tmp_path), wait_seconds_max=0),
        ):
            pass
        path.write_bytes(b"\xff" * 100_000)
        with (
            pytest.raises(BackendError, match="another process is opening it"),
            opening_lock(Directory.open(tmp_path), wait_seconds_max=0),
        ):
            pass
    assert path.stat().st_size == 0


def test_a_lock_is_given_back_though_a_forked_process_has_a_copy(tmp_path):
    # A process that is started by exec has one for a moment; one that a C library forks, for good.
    with opening_lock(Directory.open(tmp_path), wait_seconds_max=0):
        links = list(Path("/proc/self/fd").iterdir())
        copies = [os.dup(int(link.name)) for link in links if is_lock(link)]
        assert copies
    try:
        with opening_lock(Directory.open(tmp_path), wait_seconds_max=0):
            pass
    finally:
        for copy in copies:
            os.close(copy)


def is_lock(link):
    try:
        return link.readlink().name == "opening.lock"
    except FileNotFoundError:
        return False
