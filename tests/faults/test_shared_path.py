"""Stores of several models come, go and are killed on one path: nobody is wrong, or beyond it."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sharing_process import STEPS
from store_kit import MIB, Chunks, config_of, du

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
CAPACITY = 24 * MIB
ALIVE = 4
PROCESSES = 24


def start(path, backend, seed):
    command = [sys.executable, FOLDER / "sharing_process.py", path, backend, "24MiB", str(seed)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{FOLDER}"},
    )


def follow(process, step_count):
    """Wait until a process has done so many steps, or ends."""
    for line in process.stdout:
        if int(line) >= step_count:
            return


def end(process):
    _, errors = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), errors
    assert "damaged" not in errors, errors


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_stores_that_come_go_and_are_killed_share_a_path(tmp_path, backend):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    path = tmp_path / "tier"
    processes = []
    for number in range(PROCESSES):
        processes.append(start(path, backend, seed + number))
        follow(processes[-1], dice.randrange(STEPS // 4))
        assert du(path) <= CAPACITY
        if len(processes) == ALIVE:
            leaving = processes.pop(dice.randrange(ALIVE))
            follow(leaving, dice.randrange(STEPS))
            if dice.random() < 0.5:
                leaving.kill()
            end(leaving)
            assert du(path) <= CAPACITY
    for process in processes:
        end(process)
    chunks = Chunks(65_536)
    config = config_of(path, backend=backend, primary="4MiB", capacity="24MiB")
    with chunks.open(config) as store:
        assert store.check() == []
        for first in range(0, 600, 40):
            chunks.put(store, range(first, first + 40))
            store.flush()
            assert du(path) <= CAPACITY
        assert len(chunks.found(store, range(600))) > 200
        assert store.check() == []
