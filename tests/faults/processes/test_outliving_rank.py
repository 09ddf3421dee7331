"""A data plane that outlives its control plane writes only what is accounted for."""

import json
import pickle
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from python_paths import FAULT_PROGRAMS, environment
from store_kit import MIB, Chunks, config_of, du

from tierstore.config import load_config
from tierstore.executor import TransferExecutor
from tierstore.metrics import Counters
from tierstore.transfer import FailureReason

CHUNKS = Chunks(262_144)
COUNT = 64
CAPACITY = 32 * MIB


@pytest.fixture
def config(tmp_path):
    return config_of(tmp_path / "tier", primary="1MiB", capacity="32MiB")


@contextmanager
def data_plane(config):
    executor = TransferExecutor.open(
        load_config(config),
        CHUNKS.manifest,
        rank=0,
        rank_count=1,
        caches=None,
        counters=Counters(),
    )
    try:
        yield executor
    finally:
        executor.close()


@contextmanager
def control_plane(config):
    """Run a control plane that has reserved places; yield it and the demotes."""
    process = subprocess.Popen(
        [sys.executable, FAULT_PROGRAMS / "planning_process.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        job = {"config": config, "chunk_bytes": CHUNKS.chunk_bytes, "count": COUNT}
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        yield process, pickle.loads(bytes.fromhex(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.communicate()


def carry_out(executor, demotes):
    executor.submit(demotes)
    return {reason for done in executor.drain(60) for reason in done.failed.values()}


def store_and_check(config, path):
    """Fill the tier with a store of its own; what is on disk is charged, all the time."""
    with CHUNKS.open(config) as store:
        for first in range(1000, 1200, 10):
            CHUNKS.put(store, range(first, first + 10))
            store.flush()
            assert du(path) <= store.stats().secondary["disk"].charged_bytes <= CAPACITY
        assert store.check() == []


def test_a_rank_that_writes_on_keeps_its_owner_alive(tmp_path, config):
    path = tmp_path / "tier"
    with data_plane(config) as executor:
        with control_plane(config) as (process, demotes):
            assert carry_out(executor, demotes[:4]) == set()
            kill(process)
        store_and_check(config, path)
        assert carry_out(executor, demotes[4:]) == set(), "its places are its own still"
        assert du(path) <= CAPACITY
        store_and_check(config, path)
    assert list((path / "owners").iterdir()) == [], "the last one who leaves removes the file"
    with CHUNKS.open(config) as store:
        store.flush()
        assert store.check() == []
        stats = store.stats().secondary["disk"]
        assert du(path) <= stats.charged_bytes
    store_and_check(config, path)


def test_a_rank_that_comes_too_late_writes_nothing(tmp_path, config):
    path = tmp_path / "tier"
    with data_plane(config) as executor:
        with control_plane(config) as (process, demotes):
            kill(process)
        store_and_check(config, path)
        before = du(path / "rank0")
        assert carry_out(executor, demotes) == {FailureReason.IO_ERROR}
        assert du(path / "rank0") == before
    store_and_check(config, path)


def test_segments_that_nobody_knows_are_charged_and_removed(tmp_path, config):
    path = tmp_path / "tier"
    with CHUNKS.open(config) as store:
        CHUNKS.put(store, range(40))
    (path / "rank0" / "00ffffff.seg").write_bytes(bytes(12 * MIB))
    (path / "rank0" / "00000fff.seg").write_bytes(bytes(4 * MIB))
    with CHUNKS.open(config) as store:
        until = time.monotonic() + 60
        while list((path / "rank0").glob("00*fff.seg")):
            store.match_prefix(CHUNKS.keys([39]))  # carries what is on its way
            assert time.monotonic() < until
        assert CHUNKS.found(store, [39]) == [39]
        assert store.check() == []
    store_and_check(config, path)
