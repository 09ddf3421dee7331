"""Processes open one environment at once, are killed or stopped meanwhile, or share a pid."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from python_paths import FAULT_PROGRAMS, environment

from tierstore.errors import BackendError
from tierstore.lmdb_env.env import LmdbEnv

MAP_BYTES = 1 << 22
PATIENCE_SECONDS = 300
"""For processes that hang if the test is right; a slow machine needs some of it."""

USER = """
import os, signal, sys
from pathlib import Path
import lmdb
from tierstore.lmdb_env.env import LmdbEnv

def say(word):
    print(word, flush=True)
    sys.stdin.readline()

path, what = Path(sys.argv[1]), sys.argv[2]
if what.startswith("signal"):
    # On the way: the files are verified, the library has not opened them.
    lmdb.open = lambda *_, **__: os.kill(os.getpid(), int(what.split()[1]))
env = LmdbEnv.open(path, map_bytes=1 << 22, sealed=True)
if what == "write":
    with env.write() as txn:
        txn.put(b"of a transaction", b"that ends with its process")
        say("ready")
if what == "read":
    with env.read() as txn:
        txn.get(b"a")
        say("ready")
        if sys.argv[3:] == ["die"]:
            os.kill(os.getpid(), signal.SIGKILL)
say("ready")
env.close()
"""


@contextmanager
def running(path, *what, wrapper=()):
    """Run a process that uses the environment, up to the point that `what` says."""
    process = subprocess.Popen(
        [*wrapper, sys.executable, "-c", USER, path, *what],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()


@contextmanager
def using(path, *what, wrapper=()):
    with running(path, *what, wrapper=wrapper) as process:
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        yield process


def open_at_once(path, *, count, seed, delay_seconds):
    """Let so many processes open, use and close the environment; return what they complain of."""
    job = {"path": str(path), "count": count, "seed": seed, "delay_seconds": delay_seconds}
    process = subprocess.Popen(
        [sys.executable, FAULT_PROGRAMS / "openers_process.py"],
        env=environment(),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        complaints = process.communicate(json.dumps(job), PATIENCE_SECONDS)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"openers hang: {process.communicate()[1]}")
    return complaints if process.returncode else ""


def fill(path):
    env = LmdbEnv.open(path, map_bytes=MAP_BYTES, sealed=True)
    with env.write() as txn:
        for number in range(200):
            txn.put(b"%03d" % number, b"a" * 60)
    env.close()


def openers_that_were_here(path):
    env = LmdbEnv.open(path, map_bytes=MAP_BYTES, sealed=True)
    try:
        assert env.findings.damage == ""
        with env.read() as txn:
            return sum(key.startswith(b"opener") for key, _ in txn.cursor())
    finally:
        env.close()


@pytest.fixture
def power_cut(tmp_path):
    """What is on the disk after a power cut inside a write transaction: its mutex is held."""
    path = tmp_path / "before"
    fill(path)
    with using(path, "write"):
        shutil.copytree(path, tmp_path / "after")
    return tmp_path / "after"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_forty_staggered_openers_of_a_fresh_path_all_succeed(tmp_path, seed):
    assert open_at_once(tmp_path, count=40, seed=seed, delay_seconds=0.02) == ""
    assert openers_that_were_here(tmp_path) == 40


@pytest.mark.parametrize("count", [2, 8])
def test_openers_of_what_a_power_cut_left_inside_a_transaction_all_succeed(power_cut, count):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    assert open_at_once(power_cut, count=count, seed=seed, delay_seconds=0.1) == ""
    assert openers_that_were_here(power_cut) == count


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_an_opener_that_dies_on_the_way_leaves_nothing_that_blocks_the_next(power_cut, number):
    for _ in range(2):
        with running(power_cut, f"signal {int(number)}") as process:
            assert process.wait(PATIENCE_SECONDS) == -number
        (power_cut / "seal.bin").unlink(missing_ok=True)
    env = LmdbEnv.open(power_cut, map_bytes=MAP_BYTES, wait_seconds_max=0)
    with env.write() as txn:
        assert txn.get(b"007") == b"a" * 60
    env.close()


def test_an_opener_that_is_stopped_is_named_to_those_who_wait(tmp_path):
    fill(tmp_path / "stuck")
    with running(tmp_path / "stuck", f"signal {int(signal.SIGSTOP)}") as process:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        expected = rf"{tmp_path}/stuck: .* \(process id {process.pid}\) is opening it"
        with pytest.raises(BackendError, match=expected):
            LmdbEnv.open(tmp_path / "stuck", map_bytes=MAP_BYTES, wait_seconds_max=0.05)
        # Whoever uses another path is not concerned.
        LmdbEnv.open(tmp_path / "other", map_bytes=MAP_BYTES, wait_seconds_max=0).close()
    LmdbEnv.open(tmp_path / "stuck", map_bytes=MAP_BYTES, wait_seconds_max=0).close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_thread_that_waits_for_an_opener_stops_neither_other_paths_nor_forked_children(tmp_path):
    fill(tmp_path / "stuck")
    with running(tmp_path / "stuck", f"signal {int(signal.SIGSTOP)}") as process:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        thread = threading.Thread(target=lambda: fill(tmp_path / "stuck"), daemon=True)
        thread.start()
        fill(tmp_path / "other")
        child = os.fork()
        if child == 0:
            signal.alarm(PATIENCE_SECONDS)
            fill(tmp_path / "other")
            with pytest.raises(BackendError, match="is opening it"):
                LmdbEnv.open(tmp_path / "stuck", map_bytes=MAP_BYTES, wait_seconds_max=0.05)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert thread.is_alive()
    thread.join(PATIENCE_SECONDS)
    assert (tmp_path / "stuck" / "seal.bin").exists(), "the thread came to its turn"


def test_who_closes_beside_a_stopped_opener_neither_waits_for_long_nor_seals(tmp_path):
    env = LmdbEnv.open(tmp_path, map_bytes=MAP_BYTES, sealed=True)
    with running(tmp_path, f"signal {int(signal.SIGSTOP)}") as process:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        env.close()
        assert not (tmp_path / "seal.bin").exists()


def test_a_program_that_holds_the_byte_of_the_library_is_named_to_those_who_wait(tmp_path):
    fill(tmp_path)
    holds = (
        "import fcntl, sys; file = open(sys.argv[1], 'r+b'); fcntl.lockf(file, fcntl.LOCK_EX, 1); "
        "print('ready', flush=True); sys.stdin.readline()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holds, tmp_path / "lock.mdb"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(BackendError, match=rf"process id {process.pid}\) prepares lock.mdb"):
            LmdbEnv.open(tmp_path, map_bytes=MAP_BYTES, wait_seconds_max=0.05)
    finally:
        process.kill()
        process.communicate()


def test_a_forked_child_does_not_keep_the_lock_of_an_opener_that_died(tmp_path):
    forks = """
import os, signal, sys
from pathlib import Path
import lmdb
from tierstore.lmdb_env.env import LmdbEnv

def fork_and_die(*_, **__):
    if os.fork() == 0:
        print("ready", flush=True)
        sys.stdin.readline()
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)

lmdb.open = fork_and_die
LmdbEnv.open(Path(sys.argv[1]), map_bytes=1 << 22)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", forks, tmp_path],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    assert process.wait() == -signal.SIGKILL
    LmdbEnv.open(tmp_path, map_bytes=MAP_BYTES, wait_seconds_max=0).close()
    process.communicate("\n")


NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
BEHIND_A_SHELL = (*NAMESPACE, "sh", "-c", '"$@"; exit $?', "sh")
"""The process id 1 is the shell's."""

namespaces = pytest.mark.skipif(
    subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode != 0,
    reason="needs pid namespaces",
)


@namespaces
def test_a_process_with_the_same_id_in_another_pid_namespace_is_refused_by_name(tmp_path):
    fill(tmp_path)
    with using(tmp_path, "open", wrapper=NAMESPACE):
        with running(tmp_path, "open", wrapper=NAMESPACE) as second:
            complaint = second.communicate()[1]
        assert second.returncode != 0
        assert "same process id, 1, in another pid namespace" in complaint
        assert "--pid=host" in complaint
        assert "hostPID: true" in complaint
    LmdbEnv.open(tmp_path, map_bytes=MAP_BYTES).close()


def test_whoever_has_the_byte_of_our_process_id_is_taken_for_a_namesake(tmp_path):
    fill(tmp_path)
    holds = (
        "import fcntl, sys; file = open(sys.argv[1], 'r+b'); "
        "fcntl.lockf(file, fcntl.LOCK_EX, 1, int(sys.argv[2])); "
        "print('ready', flush=True); sys.stdin.readline()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holds, tmp_path / "lock.mdb", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        with pytest.raises(BackendError, match=f"same process id, {os.getpid()}"):
            LmdbEnv.open(tmp_path, map_bytes=MAP_BYTES)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    finally:
        process.communicate("\n")
    LmdbEnv.open(tmp_path, map_bytes=MAP_BYTES).close()


@namespaces
def test_a_reader_of_another_pid_namespace_is_not_taken_for_dead(tmp_path):
    # Its number is of its namespace: the library asks for its lock, not for a process of ours.
    with using(tmp_path, "read", wrapper=BEHIND_A_SHELL):
        env = LmdbEnv.open(tmp_path, map_bytes=MAP_BYTES)
        assert env.forget_dead_readers() == 0
        env.close()


@namespaces
def test_processes_of_two_pid_namespaces_share_a_path_with_a_warning(tmp_path):
    with using(tmp_path, "open", wrapper=NAMESPACE):
        with running(tmp_path, "open", wrapper=BEHIND_A_SHELL) as second:
            complaint = second.communicate("\n")[1]
        assert second.returncode == 0
        assert "share the pid namespace" in complaint


@namespaces
def test_the_snapshot_of_a_killed_namesake_does_not_keep_pages_from_reuse(tmp_path):
    env = LmdbEnv.open(tmp_path, map_bytes=1 << 20)
    with using(tmp_path, "read", "die", wrapper=BEHIND_A_SHELL) as first:
        first.communicate("\n")
        assert first.returncode == 128 + signal.SIGKILL
    with using(tmp_path, "open", wrapper=BEHIND_A_SHELL):
        for generation in range(40):
            with env.write() as txn:
                for number in range(40):
                    txn.put(b"%03d" % number, bytes([generation]) * 2000)
    env.close()
