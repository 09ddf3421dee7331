"""Where paths really lead, links followed; for a device that hangs, where they seem to."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tierstore.io_pool import run_side_by_side

__all__ = ["real_paths"]

_SECONDS_MAX = 2.0
"""A directory on a device that hangs is asked for so long."""


def real_paths(paths: Sequence[Path]) -> list[Path]:
    """Follow the links in paths, whatever exists of them; all are asked side by side.

    Of those whose device does not answer in time, only `.` and `..` are resolved.
    """
    found: dict[Path, Path] = {}

    def follow(path: Path) -> None:
        found[path] = Path(os.path.realpath(path))

    asked = list(dict.fromkeys(paths))
    run_side_by_side([partial(follow, path) for path in asked], "tierstore-paths", _SECONDS_MAX)
    return [found.get(path) or Path(os.path.normpath(path)) for path in paths]
