"""What can happen to the device of a tier that is in use, made and healed on demand.

with broken_device("hung mount", folder) as (path, fault): ...
"""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuse_directory import HangingDirectory, why_there_is_none
from python_paths import environment
from store_kit import MIB

from tierstore.testing.faults import FaultPlan, FaultRule

__all__ = ["FAULTS", "Fault", "broken_device", "why_not_here"]

_WRITES = ("pwritev", "allocate", "flush", "database.write", "database.commit", "database.sync")
_ROOM_BYTES = 32 * MIB
"""Of a file system that is filled up."""


@dataclass(frozen=True)
class Fault:
    """What happens to a device."""

    begin: Callable[[], object]
    end: Callable[[], object]
    plan: FaultPlan | None = None
    """What the store has to ask its device through."""
    forgets: bool = False
    """Whether what was on the disk is gone with it."""
    can_be_walked: bool = True
    """Whether others can look at the path meanwhile."""


@contextmanager
def broken_device(name: str, folder: Path) -> Iterator[tuple[Path, Fault]]:
    """Return the path for a tier below an empty folder, and the fault; all is healed behind it."""
    with FAULTS[name](folder) as made:
        yield made


def why_not_here(name: str) -> str:
    """Return why a fault cannot be made in this environment; empty: it can."""
    if name == "hung mount":
        return why_there_is_none()
    return "only root can mount" if name == "full" and os.geteuid() != 0 else ""


@contextmanager
def _planned(folder: Path, *rules: FaultRule) -> Iterator[tuple[Path, Fault]]:
    plan = FaultPlan()
    try:
        yield folder / "tier", Fault(lambda: plan.inject(*rules), plan.heal, plan)
    finally:
        plan.heal()


@contextmanager
def _vanished(folder: Path) -> Iterator[tuple[Path, Fault]]:
    path = folder / "tier"

    def remove() -> None:
        shutil.rmtree(path, ignore_errors=True)

    yield path, Fault(remove, lambda: None, forgets=True)


_HOLDER = """
import sys, time
from pathlib import Path
from tierstore.lmdb_env.env import LmdbEnv
sys.stdin.readline()
env = LmdbEnv.open(Path(sys.argv[1]), map_bytes=1 << 38)
with env.write():
    print("held", flush=True)
    time.sleep(1000)
"""


@contextmanager
def _stopped(folder: Path) -> Iterator[tuple[Path, Fault]]:
    """A process that shares the path stops within a transaction of the catalog, and is killed."""
    path = folder / "tier"
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, path / "catalog"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def begin() -> None:
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "held\n"
        process.send_signal(signal.SIGSTOP)

    try:
        yield path, Fault(begin, process.kill)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def _limited(folder: Path, kind: int, limit: Callable[[], int]) -> Iterator[tuple[Path, Fault]]:
    """The process may have no more files, or no longer ones, than it has."""
    before = resource.getrlimit(kind)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield (
        folder / "tier",
        Fault(
            lambda: resource.setrlimit(kind, (limit(), before[1])),
            lambda: resource.setrlimit(kind, before),
        ),
    )


@contextmanager
def _full(folder: Path) -> Iterator[tuple[Path, Fault]]:
    """Somebody else takes all the room of the file system, which is one of its own."""
    options = ["-t", "tmpfs", "-o", f"size={_ROOM_BYTES}"]
    subprocess.run(["mount", *options, "none", folder], check=True)
    filler = os.open(folder / "filler", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def fill() -> None:
        for size in (MIB, 4096):
            with contextlib.suppress(OSError):
                while os.write(filler, bytes(size)):
                    pass

    try:
        yield folder / "tier", Fault(fill, lambda: os.ftruncate(filler, 0))
    finally:
        os.close(filler)
        subprocess.run(["umount", "--lazy", folder], check=False)


@contextmanager
def _hung_mount(folder: Path) -> Iterator[tuple[Path, Fault]]:
    with HangingDirectory(folder) as directory:
        fault = Fault(directory.hang, directory.heal, can_be_walked=False)
        yield directory.path / "tier", fault
        directory.heal()


def _open_file_count() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names alone


def _error(name: str, *calls: str) -> FaultRule:
    return FaultRule(kind="error", error=name, calls=calls or ("*",))


FAULTS: dict[str, Callable[[Path], Any]] = {
    "none": _planned,
    "EIO": lambda folder: _planned(folder, _error("EIO")),
    "ENOSPC": lambda folder: _planned(folder, _error("ENOSPC", *_WRITES)),
    "EROFS": lambda folder: _planned(folder, _error("EROFS", *_WRITES)),
    "slow": lambda folder: _planned(folder, FaultRule(kind="latency", latency_seconds=0.1)),
    "hung calls": lambda folder: _planned(folder, FaultRule(kind="hang")),
    "hung mount": _hung_mount,
    "full": _full,
    "vanished": _vanished,
    "stopped": _stopped,
    "RLIMIT_NOFILE": lambda folder: _limited(folder, resource.RLIMIT_NOFILE, _open_file_count),
    "RLIMIT_FSIZE": lambda folder: _limited(folder, resource.RLIMIT_FSIZE, lambda: 4096),
}
"""By name: makes the path and the fault below a folder. "none" is what the others compare with."""
