"""Data files between two users: sealed, verified, replaced."""

import os
import signal
import subprocess
import sys
from random import Random

import pytest
from python_paths import environment

from tierstore.device.directory import Directory
from tierstore.errors import BackendError
from tierstore.lmdb_env.env import LmdbEnv
from tierstore.lmdb_env.lock import library_lock

MAP_BYTES = 1 << 22

HOLDER = """
import sys
from pathlib import Path
from tierstore.lmdb_env.env import LmdbEnv
env = LmdbEnv.open(Path(sys.argv[1]), map_bytes=1 << 22, sealed=True)
with env.write() as txn:
    txn.put(b"held", b"by another")
print("open", flush=True)
sys.stdin.readline()
env.close()
"""


def open_env(path):
    return LmdbEnv.open(path, map_bytes=MAP_BYTES, sealed=True)


def fill(path):
    """Write two generations of some pages; the older one stays in the file as free pages."""
    env = open_env(path)
    for value in (b"a", b"b"):
        with env.write() as txn:
            for number in range(200):
                txn.put(b"%03d" % number, value * 60)
    env.close()


def get(path, key=b"007"):
    env = open_env(path)
    try:
        with env.read() as txn:
            return env.findings, txn.get(key)
    finally:
        env.close()


def flip(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def start_holder(path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, path],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "open\n"
    return process


@pytest.fixture
def path(tmp_path):
    fill(tmp_path)
    return tmp_path


def root_page_at(path):
    """Return where the page begins that is the root of the main database."""
    content = (path / "data.mdb").read_bytes()
    transactions = [int.from_bytes(content[at + 144 : at + 152], "little") for at in (0, 4096)]
    meta = 4096 * (transactions[1] > transactions[0])
    return 4096 * int.from_bytes(content[meta + 128 : meta + 136], "little")


def test_a_closed_environment_opens_without_suspicion(path):
    assert (path / "seal.bin").exists()
    admission, value = get(path)
    assert (admission.damage, admission.is_suspect, value) == ("", False, b"b" * 60)


def test_a_seal_is_broken_as_long_as_the_environment_is_open(path):
    env = open_env(path)
    assert not (path / "seal.bin").exists()
    env.close()
    assert (path / "seal.bin").exists()


def test_any_bit_that_differs_from_what_was_left_raises_suspicion(path):
    content = (path / "data.mdb").read_bytes()
    flip(path / "data.mdb", content.index(b"b" * 60))
    admission, _ = get(path)
    assert (admission.damage, admission.is_suspect) == ("", True)


def test_a_suspicion_survives_a_kill_and_concerns_all_who_come_before_it_is_settled(path):
    content = (path / "data.mdb").read_bytes()
    flip(path / "data.mdb", content.index(b"b" * 60))
    for _ in range(2):
        holder = start_holder(path)
        try:
            assert get(path)[0].is_suspect
        finally:
            holder.kill()
            holder.communicate()
    admission, _ = get(path)
    assert (admission.damage, admission.is_suspect) == ("", True)
    assert not get(path)[0].is_suspect


def test_a_damaged_structure_starts_anew_sealed_or_not(path, caplog):
    for _ in range(2):
        flip(path / "data.mdb", root_page_at(path))
        admission, value = get(path)
        assert "page header" in admission.damage
        assert value is None
        assert "replaced by an empty one" in caplog.text
        caplog.clear()
        fill(path)
        (path / "seal.bin").unlink()


def test_a_damaged_seal_is_ignored(path):
    flip(path / "seal.bin", 3)
    admission, value = get(path)
    assert (admission.damage, admission.is_suspect, value) == ("", False, b"b" * 60)


def test_a_file_that_is_in_use_is_neither_verified_nor_sealed(path):
    holder = start_holder(path)
    try:
        # Damage in a page that is read by nobody here, under the eyes of its user.
        flip(path / "data.mdb", root_page_at(path) + 4095)
        admission, value = get(path, b"held")
        assert (admission.damage, admission.is_suspect, value) == ("", False, b"by another")
        assert not (path / "seal.bin").exists()
        holder.communicate("\n", timeout=60)
        assert (path / "seal.bin").exists()
    finally:
        holder.kill()
        holder.communicate()


def test_after_a_kill_the_file_is_verified_without_a_seal(path):
    holder = start_holder(path)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert get(path, b"held")[1] == b"by another"
    holder = start_holder(path)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    flip(path / "data.mdb", root_page_at(path))
    admission, value = get(path)
    assert "page header" in admission.damage
    assert value is None


def test_a_distrusted_environment_is_not_sealed_and_starts_anew(path):
    env = open_env(path)
    env.distrust("its rows contradict each other")
    env.close()
    assert not (path / "seal.bin").exists()
    admission, value = get(path)
    assert admission.damage == "its rows contradict each other"
    assert value is None
    assert get(path)[0].damage == ""


def test_others_who_use_a_distrusted_environment_are_not_disturbed(path):
    holder = start_holder(path)
    try:
        env = open_env(path)
        env.distrust("its rows contradict each other")
        env.close()
        assert get(path, b"held")[1] == b"by another"
        holder.communicate("\n", timeout=60)
        assert get(path, b"held")[1] is None
    finally:
        holder.kill()
        holder.communicate()


def other_version(content):
    """Return the file as another version of the library would have marked it."""
    changed = bytearray(content)
    for meta in (0, 4096):
        changed[meta + 20 : meta + 24] = (7).to_bytes(4, "little")
    return bytes(changed)


def other_page_size(content):
    changed = bytearray(content)
    for meta in (0, 4096):
        changed[meta + 40 : meta + 44] = (8192).to_bytes(4, "little")
    return bytes(changed)


DAMAGES = {
    "zeros": lambda content: bytes(len(content)),
    "one byte": lambda _: b"x",
    "random": lambda content: Random(1).randbytes(len(content)),
    "text": lambda _: b"x" * 65_536,
    "one page": lambda content: content[:4096],
    "both metas": lambda content: bytes(8192) + content[8192:],
    "first meta": lambda content: bytes(4096) + content[4096:],
    "second meta": lambda content: content[:4096] + bytes(4096) + content[8192:],
    "cut in a meta": lambda content: content[:5000],
    "cut behind the metas": lambda content: content[:8192],
    "cut in a page": lambda content: content[:-5000],
    "other version": other_version,
    "other page size": other_page_size,
}


@pytest.mark.parametrize("is_sealed", [True, False])
@pytest.mark.parametrize("name", DAMAGES)
def test_a_file_that_is_no_database_is_started_anew(path, name, is_sealed):
    data = path / "data.mdb"
    data.write_bytes(DAMAGES[name](data.read_bytes()))
    if not is_sealed:
        (path / "seal.bin").unlink()
    admission, value = get(path)
    assert admission.damage
    assert value is None
    fill(path)
    admission, value = get(path)
    assert (admission.damage, value) == ("", b"b" * 60)


def test_a_data_file_that_is_truncated_at_any_byte_is_whole_or_started_anew(path):
    content = (path / "data.mdb").read_bytes()
    for size in [*range(0, 400, 7), *Random(2).sample(range(len(content)), 60)]:
        (path / "data.mdb").write_bytes(content[:size])
        admission, value = get(path)
        assert value in {None, b"b" * 60}
        assert bool(admission.damage) == (value is None and size > 0)
        (path / "seal.bin").unlink(missing_ok=True)


def test_an_enormous_data_file_with_holes_is_not_read(path):
    os.truncate(path / "data.mdb", 1 << 40)
    assert get(path)[0].damage
    with (path / "data.mdb").open("wb") as file:
        file.truncate(1 << 42)
    assert get(path)[0].damage
    fill(path)
    assert get(path)[1] == b"b" * 60


@pytest.mark.parametrize("name", ["seal.bin", "distrust"])
def test_small_files_of_enormous_size_are_not_read(path, name):
    with (path / name).open("wb") as file:
        file.truncate(1 << 40)
    get(path)
    fill(path)
    assert get(path)[1] == b"b" * 60
    assert sum(file.stat().st_size for file in path.iterdir()) < 1 << 20


def test_a_file_that_is_damaged_under_its_user_is_refused_until_he_has_ended(path):
    holder = start_holder(path)
    try:
        with (path / "data.mdb").open("r+b") as file:
            file.write(bytes(8192))
        with pytest.raises(BackendError, match="once the process that has it open has ended"):
            get(path)
    finally:
        holder.kill()
        holder.communicate()
    assert get(path)[0].damage
    fill(path)
    assert get(path)[1] == b"b" * 60


def test_a_data_file_that_is_gone_under_its_user_is_refused_to_others(path):
    holder = start_holder(path)
    try:
        (path / "data.mdb").unlink()
        with pytest.raises(BackendError, match="while another process has it open"):
            get(path)
        assert not (path / "data.mdb").exists()
    finally:
        holder.kill()
        holder.communicate()
    assert get(path)[0].damage == ""


def test_the_library_of_another_process_waits_while_a_file_is_verified(path):
    # The library asks for the lock of the first byte, and waits for it.
    asks = (
        "import fcntl, sys; file = open(sys.argv[1], 'r+b'); "
        "fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)"
    )
    command = [sys.executable, "-c", asks, path / "lock.mdb"]
    with library_lock(Directory.open(path), wait_seconds_max=0) as lock:
        assert lock.is_alone
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "BlockingIOError" in refused.stderr
    subprocess.run(command, check=True)
