"""A really full device loses nothing, and is in use again without a restart once it is free.

On a file system of its own, in a mount namespace of its own, where the system allows that.
"""

import subprocess
import sys

import pytest
from python_paths import FAULT_PROGRAMS, environment

MOUNT = [
    "unshare",
    "--map-root-user",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs -o size=40m,mode=0700 none "$0"',
]


def can_mount(path):
    try:
        return subprocess.run([*MOUNT, path], check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_a_full_device_loses_nothing_and_is_used_again_once_it_is_free(tmp_path, backend):
    if not can_mount(tmp_path):
        pytest.skip("this system does not let us mount a file system of our own")
    process = [sys.executable, FAULT_PROGRAMS / "full_device_process.py", tmp_path, backend]
    run = subprocess.run(
        [*MOUNT[:-1], MOUNT[-1] + ' && exec "$@"', tmp_path, *process],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "sound\n", run.stdout + run.stderr
