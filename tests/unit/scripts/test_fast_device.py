"""The stand-in for a fast device, in processes that it is preloaded into."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.reach.fast_device import FastDevice, compile_into
from python_paths import environment

PROGRAM = """
import mmap, os, sys
from bench.reach.fast_device import FastDevice
device = FastDevice()
page, payload = mmap.mmap(-1, 4096), mmap.mmap(-1, 64 << 10)
page[:], payload[:] = b"h" * 4096, b"p" * (64 << 10)
assert device.is_loaded and not device.is_on
flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if sys.argv[2] == "direct" else 0)
file = os.open(sys.argv[1], flags)
gbps = float(sys.argv[3])
def move():
    calls = [
        os.pwritev(file, [page, payload], 0),
        os.preadv(file, [page, payload], 0),
        os.pwrite(file, payload, 68 << 10),
        os.lseek(file, 132 << 10, 0) and os.write(file, payload),
        os.lseek(file, 132 << 10, 0) and os.readv(file, [payload]),
    ]
    position = os.lseek(file, 0, 1)
    print(calls, position >> 10, os.fstat(file).st_size >> 10, device.moved_bytes >> 10)
if gbps:
    with device.switched_on(gbps):
        assert device.is_on
        move()
    assert not device.is_on
else:
    move()
os.close(file)
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    compiled = compile_into(tmp_path)
    if compiled is None:
        pytest.skip("no C compiler")
    return compiled


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where O_DIRECT works: a recent tmpfs, or the folder of the test."""
    page = mmap.mmap(-1, 4096)
    path = tmp_path / "probe"
    try:
        os.write(os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT), page)
    except OSError:
        pytest.skip("no O_DIRECT here")
    return tmp_path / "file"


def moved(library: Path, file: Path, kind: str, gbps: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, file, kind, gbps],
        env=environment(LD_PRELOAD=str(library)),
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


RESULTS = "[69632, 69632, 65536, 65536, 65536] 196 196"


def test_payload_takes_time_only_and_header_pages_move(library, file) -> None:
    assert moved(library, file, "direct", "12") == f"{RESULTS} {68 + 68 + 64 + 64 + 64}"
    content = file.read_bytes()
    assert content[:4096] == b"h" * 4096
    assert set(content[4096:]) == {0}


@pytest.mark.parametrize(("kind", "gbps"), [("direct", "0"), ("buffered", "12")])
def test_off_or_without_direct_transfers_all_bytes_move(library, file, kind, gbps) -> None:
    assert moved(library, file, kind, gbps) == f"{RESULTS} 0"
    content = file.read_bytes()
    assert content == b"h" * 4096 + b"p" * (192 << 10)


def test_a_process_without_it_says_so() -> None:
    assert not FastDevice().is_loaded
    assert not FastDevice().is_on
