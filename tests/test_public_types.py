"""What a type checker tells a user of the public names: wrong calls are marked, right ones pass.

Method: mypy reads the snippet below. Each line that ends in `# wrong` must be marked, no other.
"""

import re
import subprocess
import sys
import textwrap
import typing
from pathlib import Path

import pytest
from python_paths import ROOT

import tierstore

SNIPPET = '''
from mmap import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import ChunkRows, Manifest, OffloadKey, TierStore, WritableChunkRows


class Tensor:
    """As torch.Tensor."""

    def numpy(self, *, force: bool = False) -> npt.NDArray[Any]:
        raise NotImplementedError


def use(store: TierStore, manifest: Manifest, mapped: mmap) -> None:
    keys: list[OffloadKey] = manifest.keys([bytes(32)])
    array, halves = np.zeros((1, 8), np.uint8), np.zeros((1, 4), np.float16)
    rows: ChunkRows = [bytes(8)]
    room: WritableChunkRows = [bytearray(8)]
    answers: list[list[bool]] = [
        store.put(keys, array),
        store.put(keys, halves),
        store.put(keys, Tensor()),
        store.put(keys, [Tensor()]),
        store.put(keys, [array[0]]),
        store.put(keys, (bytes(8), bytearray(8), memoryview(b"rows"), mapped, Tensor(), array[0])),
        store.put(keys, rows),
        store.put(tuple(keys), room),
        store.get(keys, array),
        store.get(keys, Tensor()),
        store.get(keys, [bytearray(8), memoryview(bytearray(8)), mapped, array[0], Tensor()]),
        store.get(keys, room),
    ]
    count: int = store.match_prefix(keys).chunk_count
    store.put(keys, 7)  # wrong
    store.put(keys, None)  # wrong
    store.put(keys, bytes(8))  # wrong
    store.put(keys, "rows")  # wrong
    store.put(keys, [1, 2])  # wrong
    store.put(keys, [None])  # wrong
    store.put(keys, object())  # wrong
    store.put([bytes(44)], array)  # wrong
    store.put(array, keys)  # wrong
    store.get(keys, [bytes(8)])  # wrong
    store.get(keys, rows)  # wrong
    store.get(keys, bytearray(8))  # wrong
    store.get(keys)  # wrong
    total: int = store.put(keys, array)  # wrong
    store.match_prefix(keys) + 1  # wrong
    print(answers, count, total)
'''


@pytest.mark.parametrize("version", ["3.11", "3.13"])
def test_mypy_marks_the_wrong_calls_and_no_right_one(tmp_path: Path, version: str) -> None:
    path = tmp_path / "user.py"
    path.write_text(textwrap.dedent(SNIPPET))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-version", version, "--config-file=",
         "--follow-imports=silent", "--cache-dir", str(tmp_path), str(path)],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    marked = {int(n) for n in re.findall(r"user\.py:(\d+): error", done.stdout)}
    lines = path.read_text().splitlines()
    wrong = {n for n, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert marked == wrong, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["put", "get", "match_prefix", "open"])
def test_the_types_of_the_calls_can_be_read_at_run_time(name: str) -> None:
    assert "return" in typing.get_type_hints(getattr(tierstore.TierStore, name))
