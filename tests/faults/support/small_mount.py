"""A file system of 40 MiB that one process alone sees, made without being root."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

__all__ = ["on_small_mount"]

_IN_A_NAMESPACE = ("unshare", "--map-root-user", "--mount", "sh", "-c")
_MOUNT = 'mount -t tmpfs -o size=40m,mode=0700 none "$0"'


def on_small_mount(path: Path, command: Sequence[str | Path]) -> list[str | Path]:
    """Return a command that runs `command` with the file system at `path`.

    The test is skipped where the system does not allow that.
    """
    try:
        tried = subprocess.run([*_IN_A_NAMESPACE, _MOUNT, path], check=False, capture_output=True)
    except FileNotFoundError:
        pytest.skip("this system has no unshare")
    if tried.returncode:
        pytest.skip("this system does not let us mount a file system of our own")
    return [*_IN_A_NAMESPACE, _MOUNT + ' && exec "$@"', path, *command]
