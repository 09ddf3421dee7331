"""A really full device loses nothing, and is in use again without a restart once it is free.

On a file system of its own, in a mount namespace of its own, where the system allows that.
"""

import subprocess
import sys

import pytest
from python_paths import FAULT_PROGRAMS, environment
from small_mount import on_small_mount


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_a_full_device_loses_nothing_and_is_used_again_once_it_is_free(tmp_path, backend):
    process = [sys.executable, FAULT_PROGRAMS / "full_device_process.py", tmp_path, backend]
    run = subprocess.run(
        on_small_mount(tmp_path, process),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "sound\n", run.stdout + run.stderr
