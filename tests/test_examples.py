"""The examples run, and do what they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from python_paths import ROOT


def output_of(name: str, *arguments: Path) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name, *arguments],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_the_embedded_example_computes_once_and_loads_in_its_next_life(tmp_path: Path) -> None:
    first, second = (output_of("embedded.py", tmp_path / "tier") for _ in range(2))
    assert re.findall(r": (\d+) of 60", first) == ["0", "50", "50"]
    assert re.findall(r": (\d+) of 60", second) == ["60", "60", "60"]


def test_the_service_serves_warm_requests_after_a_restart(tmp_path: Path) -> None:
    first, second = (output_of("asyncio_service.py", tmp_path / "tier") for _ in range(2))
    assert int(re.findall(r"(\d+) chunks loaded", first)[-1]) == 1000
    assert re.findall(r"(\d+) cold", second) == ["0"] * 4


@pytest.mark.parametrize("name", ["embedded.py", "asyncio_service.py"])
def test_an_example_is_short_and_typed(name: str) -> None:
    path = ROOT / "examples" / name
    assert 30 <= len(path.read_text().splitlines()) <= 60
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=silent", path],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
