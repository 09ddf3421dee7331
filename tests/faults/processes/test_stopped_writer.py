"""Processes that are stopped within a transaction, and processes that all write at once."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from python_paths import environment

from tierstore.errors import BackendBusyError
from tierstore.lmdb_env.env import LmdbEnv

MAP_BYTES = 1 << 22

STOPPING = """
import os, signal, sys
from pathlib import Path
from tierstore.lmdb_env.env import LmdbEnv
from tierstore.device.system import DatabasePoint, SystemCalls

class Stopping(SystemCalls):
    def reach(self, point):
        if point is DatabasePoint(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGSTOP)

env = LmdbEnv.open(Path(sys.argv[1]), map_bytes=1 << 22, system=Stopping())
with env.write() as txn:
    txn.put(b"stopped", b"and went on")
print("ended", flush=True)
"""

WRITING = """
import json, sys, time
from pathlib import Path
from tierstore.lmdb_env.env import LmdbEnv

env = LmdbEnv.open(Path(sys.argv[1]), map_bytes=1 << 22)
print("open", flush=True)
sys.stdin.readline()
longest = count = 0
until = time.monotonic() + float(sys.argv[2])
while time.monotonic() < until:
    began = time.monotonic()
    with env.write() as txn:
        longest = max(longest, time.monotonic() - began)
        for number in range(20):
            txn.put(b"%03d" % number, bytes(100))
    count += 1
env.close()
print(json.dumps([count, longest]), flush=True)
"""


def started(program, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def stopped(path, point):
    """Stop a process at a point of its write transaction."""
    process = started(STOPPING, path, point)
    try:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        yield process
    finally:
        process.kill()
        process.communicate()


def opened(path, seconds_max=0.1):
    return LmdbEnv.open(path, map_bytes=MAP_BYTES, writer_seconds_max=seconds_max)


def write(env):
    with env.write() as txn:
        txn.put(b"written", b"by us")


@pytest.mark.parametrize("point", ["write", "commit"])
def test_a_writer_names_the_process_that_was_stopped_within_a_transaction(tmp_path, point):
    with stopped(tmp_path, point) as process:
        env = opened(tmp_path)
        for _ in range(2):
            with pytest.raises(BackendBusyError, match=rf"process id {process.pid} has held"):
                write(env)
        with pytest.raises(BackendBusyError, match=rf"process id {process.pid} has held"):
            env.database(b"that does not exist yet")
        with env.read() as txn:
            assert txn.get(b"stopped") is None
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == "ended\n"
        write(env)
        with env.read() as txn:
            assert txn.get(b"stopped") == b"and went on"
        env.close()


def test_a_writer_waits_but_once_for_a_process_that_does_not_let_go(tmp_path):
    with stopped(tmp_path, "commit"):
        env = opened(tmp_path, seconds_max=600)
        env._writer._wait_seconds_max = 1
        with pytest.raises(BackendBusyError):
            write(env)
        env._writer._wait_seconds_max = 600  # a wait to the end would be seen
        for _ in range(20):
            with pytest.raises(BackendBusyError):
                write(env)
        env.close()


def test_a_killed_process_leaves_the_lock_to_others(tmp_path):
    with stopped(tmp_path, "commit") as process:
        env = opened(tmp_path, seconds_max=600)
        thread = threading.Thread(target=write, args=[env])
        thread.start()
        process.kill()
        thread.join()
        with env.read() as txn:
            assert txn.get(b"written") == b"by us"
        env.close()


def test_a_thread_waits_a_bounded_time_for_another_one(tmp_path):
    env = opened(tmp_path)
    complaints = []

    def complain():
        try:
            write(env)
        except BackendBusyError as error:
            complaints.append(str(error))

    with env.write():
        thread = threading.Thread(target=complain)
        thread.start()
        thread.join()
    assert "another thread of this process has held the database" in complaints[0]
    write(env)
    env.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    env = opened(tmp_path)
    with env.write():
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        other = started(WRITING, tmp_path, 0)
        assert other.communicate("\n")[0].startswith("open\n")
        process = started(STOPPING, tmp_path, "sync")
        assert process.communicate()[0] == "ended\n"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    env.close()


@pytest.mark.slow
def test_nobody_starves_where_four_processes_write_without_a_pause(tmp_path):
    processes = [started(WRITING, tmp_path, 3) for _ in range(4)]
    try:
        for process in processes:
            assert process.stdout.readline() == "open\n"
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        results = [json.loads(process.communicate()[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    print(results)
    counts = [count for count, _ in results]
    assert min(counts) >= sum(counts) / 40, results


def test_the_lock_takes_no_block_of_the_device(tmp_path):
    env = opened(tmp_path)
    write(env)
    assert (tmp_path / "writer.lock").stat().st_blocks == 0
    env.close()
