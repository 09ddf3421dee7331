"""The rows of a catalog are verified in steps, while nobody else can open it or waits to write."""

import subprocess
import sys

import pytest
from catalog_harness import MIB, Harness
from python_paths import environment

from tierstore.catalog.catalog import Catalog
from tierstore.device.directory import Directory
from tierstore.errors import ClosedError, ConfigError
from tierstore.lmdb_env.env import LmdbEnv
from tierstore.lmdb_env.pace import VerifyPace
from tierstore.lmdb_env.turns import WriterLock

RECORD_COUNT = 4000
BATCH = 500

OPENER = """
import sys
from pathlib import Path
from tierstore.errors import BackendBusyError
from tierstore.lmdb_env.env import LmdbEnv
try:
    LmdbEnv.open(Path(sys.argv[1]), map_bytes=1 << 38, wait_seconds_max=0).close()
except BackendBusyError:
    sys.exit(3)
"""


@pytest.fixture
def killed(tmp_path):
    """A catalog with records, as a killed process leaves it."""
    harness = Harness(tmp_path / "tier", capacity=64 * MIB, chunk=4096)
    for first in range(0, RECORD_COUNT, BATCH):
        harness.store(*range(first, first + BATCH))
    harness.catalog.close()
    (tmp_path / "tier" / "catalog" / "seal.bin").unlink()
    return harness


def open_with(harness, pace):
    return Catalog.open(harness.config, harness.manifest, rank_count=1, pace=pace)


class Probe:
    """Is called at each step of a verification; `look` is what it does."""

    def __init__(self, look):
        self.step_count = 0
        self._look = look

    def __call__(self):
        self.step_count += 1
        self._look()
        return False


def steps_of(harness):
    probe = Probe(lambda: None)
    open_with(harness, VerifyPace(probe)).close()
    return probe.step_count


def test_rows_are_verified_in_steps(killed):
    unsealed_count = steps_of(killed)
    # A seal proves the records, which are not looked at then.
    assert unsealed_count >= steps_of(killed) + RECORD_COUNT // 1024


def test_nobody_waits_for_the_write_lock_while_rows_are_verified(killed):
    free_count = 0

    def write():
        nonlocal free_count
        with Directory.open(killed.config.path / "catalog") as directory:
            lock = WriterLock(directory, wait_seconds_max=0)
            try:
                lock.acquire()
                lock.release()
                free_count += 1
            finally:
                lock.close()

    probe = Probe(write)
    open_with(killed, VerifyPace(probe)).close()
    assert free_count == probe.step_count > RECORD_COUNT // 1024


def test_no_other_process_opens_what_is_being_verified(killed):
    """Goal: nobody changes rows, or relies on them, before they are known to be sound."""
    answers = []

    def open_in_another_process():
        if probe.step_count % 3 == 0:
            command = [sys.executable, "-c", OPENER, str(killed.config.path / "catalog")]
            answers.append(subprocess.run(command, env=environment(), check=False).returncode)

    probe = Probe(open_in_another_process)
    open_with(killed, VerifyPace(probe)).close()
    assert len(answers) > 2
    assert set(answers) == {3}


def test_a_verification_that_is_ended_leaves_nothing_open(killed):
    path = killed.config.path / "catalog"
    last = steps_of(killed)
    killed.reopen()
    killed.catalog.close()
    for end in (1, last // 2, last):
        (path / "seal.bin").unlink(missing_ok=True)
        probe = Probe(lambda: None)
        with pytest.raises(ClosedError):
            open_with(killed, VerifyPace(lambda p=probe, end=end: p() or p.step_count >= end))
        assert probe.step_count == end
    LmdbEnv.open(path, map_bytes=1 << 38, wait_seconds_max=0).close()
    killed.open()
    assert killed.located(*range(100)) == [True] * 100
    killed.catalog.close()


def test_only_a_long_verification_is_announced(killed):
    told = []
    open_with(killed, VerifyPace(on_long=told.append)).close()
    assert told == []
    (killed.config.path / "catalog" / "seal.bin").unlink()
    open_with(killed, VerifyPace(on_long=told.append, long_bytes=0)).close()
    assert told == sorted(told, reverse=True)
    assert len(told) == 2


def test_a_catalog_that_is_refused_stays_sealed(tmp_path):
    """Goal: who opens it next need not verify all pages and rows."""
    harness = Harness(tmp_path)
    harness.catalog.close()
    before = (tmp_path / "catalog" / "seal.bin").read_bytes()
    with pytest.raises(ConfigError, match="another backend"):
        Harness(tmp_path, backend="lmdb")
    assert (tmp_path / "catalog" / "seal.bin").read_bytes() == before
