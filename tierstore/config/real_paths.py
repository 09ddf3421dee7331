"""Resolves links in paths, without waiting for a device that hangs."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tierstore.io_pool import run_side_by_side

__all__ = ["real_paths"]

_SECONDS_MAX = 2.0
"""How long to wait for a device that hangs."""


def real_paths(paths: Sequence[Path]) -> list[Path]:
    """Resolve the links in paths, as far as the paths exist; all of them concurrently.

    In paths whose device does not answer in time, only `.` and `..` are resolved.
    """
    found: dict[Path, Path] = {}

    def follow(path: Path) -> None:
        found[path] = Path(os.path.realpath(path))

    asked = list(dict.fromkeys(paths))
    run_side_by_side([partial(follow, path) for path in asked], "tierstore-paths", _SECONDS_MAX)
    return [found.get(path) or Path(os.path.normpath(path)) for path in paths]
