"""Where the project's files lie, and what a process of a test imports from."""

import os
import tomllib
from pathlib import Path

__all__ = ["FAULT_PROGRAMS", "FAULT_SUPPORT", "FOLDERS", "ROOT", "TESTS", "environment"]

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
FAULT_SUPPORT = TESTS / "faults" / "support"
"""Modules that the tests of faults share; some run by themselves, too."""

FAULT_PROGRAMS = TESTS / "faults" / "programs"
"""What the tests of faults start as processes of their own."""

_SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
FOLDERS = [ROOT / name for name in _SETTINGS["pythonpath"]]
"""What all tests import from: pytest is told the same."""


def environment(*folders: Path, **more: str) -> dict[str, str]:
    """Return the environment of a process that imports what tests import.

    `folders` are imported from, too; `more` are variables.
    """
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    paths = [*map(str, (*FOLDERS, *folders)), *inherited]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | more
