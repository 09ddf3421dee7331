"""A process that is stopped within a transaction, and the others on its path."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
from python_paths import FAULT_PROGRAMS, environment
from store_kit import Chunks, config_of
from waiting import within_seconds

from tierstore import TierStore
from tierstore.embedded.planes import Patience
from tierstore.errors import BackendError

CHUNKS = Chunks(4096)
PATIENCE = Patience(put_seconds=0.2, flush_seconds=1, close_seconds=20)

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("backend", ["file", "lmdb"])]


def config(path, backend):
    return config_of(path, backend=backend, primary="1MiB", capacity="16MiB")


def opened(path, backend):
    return TierStore.open(config(path, backend), CHUNKS.manifest, patience=PATIENCE)


@contextmanager
def neighbour(path, backend, point):
    process = subprocess.Popen(
        [sys.executable, FAULT_PROGRAMS / "stopping_process.py", path, backend, point],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "open\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def stop(process):
    process.stdin.write("\n")
    process.stdin.flush()
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def let_go(process):
    process.send_signal(signal.SIGCONT)
    assert process.stdout.readline() == "ended\n"


def is_used(store, numbers):
    """Return whether the store's tier records chunks again."""
    CHUNKS.put(store, numbers)
    try:
        store.flush()
    except BackendError:
        return False
    return True


@pytest.mark.parametrize("point", ["write", "commit"])
def test_who_opens_the_path_of_a_stopped_process_uses_memory_and_is_told_its_name(
    tmp_path, backend, point, caplog
):
    with neighbour(tmp_path, backend, point) as process:
        stop(process)
        with opened(tmp_path, backend) as store:
            assert not store.stats().secondary["disk"].is_open
            assert f"process id {process.pid} has held" in caplog.text
            assert CHUNKS.put(store, range(16)) == 16
            assert CHUNKS.found(store, range(16)) == list(range(16))
            with pytest.raises(BackendError, match="tier disk"):
                store.flush()
            assert f"process id {process.pid}" in "".join(store.check())
            let_go(process)
            assert within_seconds(lambda: store.stats().secondary["disk"].is_open)
            assert within_seconds(lambda: is_used(store, range(16)))
            assert store.check() == []
    with opened(tmp_path, backend) as store:
        assert CHUNKS.found(store, range(16)) == list(range(16))


@pytest.mark.parametrize("point", ["write", "commit"])
def test_who_has_the_path_of_a_stopped_process_open_goes_on_with_what_it_has(
    tmp_path, backend, point, caplog
):
    with neighbour(tmp_path, backend, point) as process, opened(tmp_path, backend) as store:
        assert is_used(store, range(16))
        stop(process)
        assert CHUNKS.put(store, range(16, 32)) == 16
        with pytest.raises(BackendError, match="tier disk"):
            store.flush()
        assert within_seconds(lambda: f"process id {process.pid} has held" in caplog.text)
        assert CHUNKS.found(store, range(32)) == list(range(32))
        assert store.match_prefix(CHUNKS.keys(range(32))).chunk_count == 32
        let_go(process)
        assert within_seconds(lambda: is_used(store, range(32)))
        assert store.check() == []


def test_a_stopped_process_does_not_keep_others_from_closing(tmp_path, backend, caplog):
    with neighbour(tmp_path, backend, "commit") as process:
        store = opened(tmp_path, backend)
        stop(process)
        CHUNKS.put(store, range(16))
        store.close()
        assert f"process id {process.pid} has held" in caplog.text
        assert "catalog thread hangs" not in caplog.text


def test_another_tier_is_not_concerned(tmp_path, backend):
    settings = config(tmp_path / "stuck", backend)
    other = config(tmp_path / "other", backend)["secondary"][0] | {"name": "other"}
    settings["secondary"].append(other)
    with neighbour(tmp_path / "stuck", backend, "commit") as process:
        stop(process)
        with TierStore.open(settings, CHUNKS.manifest, patience=PATIENCE) as store:
            CHUNKS.put(store, range(16))
            with pytest.raises(BackendError, match="tier disk"):
                store.flush()
            assert store.stats().secondary["other"].record_count == 16
