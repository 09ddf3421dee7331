"""File systems of their own for tests: made in an image or in memory, mounted, and taken down.

    with mounted("ext4-bigalloc", 64 << 20, below=tmp_path) as path: ...

A test is skipped, with the reason, where the system has not what a kind needs: root, `mkfs`, a
kernel that knows it.
"""

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from waiting import within_seconds

__all__ = ["KINDS", "SampledUsage", "mounted", "sampled"]

_BLOCK_BYTES = 512
_UNMOUNT_SECONDS_MAX = 10


@dataclass(frozen=True)
class FileSystemKind:
    """How a file system is made."""

    type: str
    make: tuple[str, ...] = ()
    """Command that makes it in an image; none: it lives in memory."""
    options: str = ""
    prepare: tuple[str, ...] = ()
    """Command that is given the mount point when it is mounted."""


def _ext4(*features: str) -> FileSystemKind:
    return FileSystemKind("ext4", ("mkfs.ext4", "-q", "-F", *features))


KINDS = {
    "ext4": _ext4("-b", "4096"),
    "ext4-1k": _ext4("-b", "1024"),
    "ext4-bigalloc": _ext4("-b", "4096", "-O", "bigalloc", "-C", "65536"),
    "ext4-bigalloc-1m": _ext4("-b", "4096", "-O", "bigalloc", "-C", "1048576"),
    "ext4-no-extents": _ext4("-b", "4096", "-O", "^extent,^64bit"),
    "ext4-no-extents-1k": _ext4("-b", "1024", "-O", "^extent,^64bit"),
    "ext2": FileSystemKind("ext2", ("mkfs.ext2", "-q", "-F")),
    "xfs": FileSystemKind("xfs", ("mkfs.xfs", "-q", "-f")),
    "xfs-extents-256k": FileSystemKind(
        "xfs", ("mkfs.xfs", "-q", "-f"), prepare=("xfs_io", "-c", "extsize 256k")
    ),
    "btrfs": FileSystemKind("btrfs", ("mkfs.btrfs", "-q", "-f")),
    "tmpfs": FileSystemKind("tmpfs", options="huge=never"),
    "tmpfs-huge": FileSystemKind("tmpfs", options="huge=always"),
    "tmpfs-within-size": FileSystemKind("tmpfs", options="huge=within_size"),
}


@contextmanager
def mounted(kind: str, size_bytes: int, *, below: Path) -> Iterator[Path]:
    """Make and mount a file system; return where. It is gone behind the block, however that ends.

    Image and mount point lie below `below`.
    """
    chosen = KINDS[kind]
    if os.geteuid():
        pytest.skip(f"{kind}: only root may mount file systems")
    point, image = below / f"{kind}.mounted", below / f"{kind}.image"
    point.mkdir()
    options = [chosen.options] if chosen.options else []
    if chosen.make:
        for tool in (chosen.make[0], *chosen.prepare[:1]):
            if shutil.which(tool) is None:
                pytest.skip(f"{kind}: {tool} is not installed")
        with image.open("wb") as file:
            file.truncate(size_bytes)
        _require([*chosen.make, str(image)], kind)
        source = str(image)
        options.append("loop")
    else:
        source = "none"
        options.append(f"size={size_bytes}")
    try:
        _require(["mount", "-t", chosen.type, "-o", ",".join(options), source, str(point)], kind)
        try:
            if chosen.prepare:
                _require([*chosen.prepare, str(point)], kind)
            yield point
        finally:
            _unmount(point)
    finally:
        image.unlink(missing_ok=True)
        point.rmdir()


def _require(command: list[str], kind: str) -> None:
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        pytest.skip(f"{kind}: {' '.join(command)}: {run.stderr.strip()}")


def _unmount(point: Path) -> None:
    """Unmount; what a failed test has left open there goes with its process."""

    def is_unmounted() -> bool:
        return subprocess.run(["umount", point], capture_output=True, check=False).returncode == 0

    if not within_seconds(is_unmounted, _UNMOUNT_SECONDS_MAX):
        subprocess.run(["umount", "--lazy", point], capture_output=True, check=True)


class SampledUsage:
    """The most bytes that were seen below a path at any moment."""

    def __init__(self) -> None:
        self.bytes_max = 0
        self.sample_count = 0

    def note(self, before: dict[tuple[str, int], int], after: dict[tuple[str, int], int]) -> None:
        """Take two walks. A file counts as in the smaller one.

        One walk may count what was given back while it went on, and what was taken for it as well.
        """
        total = sum(min(size, after.get(file, 0)) for file, size in before.items())
        self.bytes_max = max(self.bytes_max, total)
        self.sample_count += 1


@contextmanager
def sampled(path: Path, *, pause_seconds: float = 0) -> Iterator[SampledUsage]:
    """Look all the time at what lies below a path, from another thread; `pause_seconds` between.

    A pause leaves the interpreter to those whose calls are timed.
    """
    usage = SampledUsage()
    stop = threading.Event()

    def run() -> None:
        before = _walk(path)
        while not stop.wait(pause_seconds):
            after = _walk(path)
            usage.note(before, after)
            before = after

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield usage
    finally:
        stop.set()
        thread.join()
    found = _walk(path)
    usage.note(found, found)


def _walk(path: Path) -> dict[tuple[str, int], int]:
    sizes: dict[tuple[str, int], int] = {}
    for folder, _, names in os.walk(path):
        for name in [".", *names]:
            file = os.path.join(folder, name)  # noqa: PTH118
            try:
                status = os.lstat(file)
            except FileNotFoundError:  # removed meanwhile
                continue
            sizes[file, status.st_ino] = status.st_blocks * _BLOCK_BYTES
    return sizes
