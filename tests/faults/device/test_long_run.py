"""Tens of thousands of chunks with evictions and faults: what a process holds stays the same.

Method: `long_run`, in a process of its own; by hand it runs with a million chunks.
"""

import json
import subprocess
import sys

import pytest
from filesystems import mounted
from long_run import LongRun
from python_paths import FAULT_SUPPORT, environment
from store_kit import MIB

SECONDS_MAX = 900
CHUNKS = 60_000
FAULT_EVERY = 60
"""Batches between two faults."""
MEMORY_GROWTH_MAX = 6 * MIB
DESCRIPTOR_GROWTH_MAX = 64 + 4
"""The file backend keeps up to 64 segments open, and opens them one by one."""
THREAD_GROWTH_MAX = 2
"""A thread that hung may still be ending."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * SECONDS_MAX)]


def ran(path, backend, *more):
    options = {"--backend": backend, "--chunks": CHUNKS, "--fault-every": FAULT_EVERY}
    run = subprocess.run(
        [
            sys.executable,
            FAULT_SUPPORT / "long_run.py",
            path,
            *[str(word) for pair in options.items() for word in pair],
            *more,
        ],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS_MAX,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return LongRun(**json.loads(run.stdout.splitlines()[-1]))


def require_sound(seen):
    assert seen.problems == []
    assert seen.over_quota_bytes == 0
    assert seen.is_back
    assert seen.sample_count > 100
    assert seen.faults > 3
    assert seen.strikes > 0
    assert seen.evicted > CHUNKS / 20


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_memory_descriptors_and_threads_stay_as_they_are(tmp_path, backend):
    seen = ran(tmp_path, backend)
    require_sound(seen)
    assert seen.growth(seen.memory_bytes) < MEMORY_GROWTH_MAX
    assert seen.growth(seen.descriptors) < DESCRIPTOR_GROWTH_MAX
    assert seen.growth(seen.threads) <= THREAD_GROWTH_MAX


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_the_capacity_holds_where_punches_give_nothing_back(tmp_path, backend):
    kind = "tmpfs-huge"
    with mounted(kind, 64 * MIB, below=tmp_path):
        pass  # skipped here, with the reason, where there is none
    require_sound(ran(tmp_path, backend, "--file-system", kind))
