"""kill -9 in the middle of storing: the next process opens, finds order, and no wrong byte."""

import json
import random
import signal
import subprocess
import sys

import pytest
from python_paths import FAULT_PROGRAMS, environment
from store_kit import MIB, Chunks, config_of, du

CHUNK_BYTES = 65_536


def store_until_killed(config, first, seconds):
    """Start a writer, kill it so many seconds after its first put; return how far it came."""
    process = subprocess.Popen(
        [sys.executable, FAULT_PROGRAMS / "writing_process.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        process.stdin.write(
            json.dumps({"config": config, "chunk_bytes": CHUNK_BYTES, "first": first})
        )
        process.stdin.close()
        progress = process.stdout.readline()
        assert progress, f"the writer ended by itself: {process.wait()}"
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        lines = process.stdout.read().split()
        assert process.wait() == -signal.SIGKILL, "the writer ended before it was killed"
        return int([progress, *lines][-1])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_after_each_of_25_kills_the_store_is_sound_and_right(tmp_path, backend):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    chunks = Chunks(CHUNK_BYTES)
    config = config_of(tmp_path / "tier", backend=backend, primary="8MiB", capacity="32MiB")
    reached = 0
    found_count = 0
    for _ in range(25):
        reached = store_until_killed(config, reached, dice.uniform(0.02, 0.4))
        assert du(tmp_path / "tier") <= 32 * MIB
        with chunks.open(config) as store:
            assert store.check() == []
            found_count += len(chunks.found(store, range(700)))
            assert store.check() == []
            assert chunks.put(store, [5000]) == 1
            store.flush()
        with chunks.open(config) as store:
            assert chunks.found(store, [5000]) == [5000]
    assert found_count > 25 * 50, "hardly anything survived: the test tests nothing"
