"""One store under load, while something happens to its device: what came of each call.

    PYTHONPATH=.:tests:tests/faults python tests/faults/endurance.py hung --backend file --seed 1

One thread stores and loads chunks that the disk has, another one only what is in memory, a third
one flushes. The fault begins, ends, and the store has to come back by itself; then another store
opens the path and looks for all that was flushed. Every byte is compared. The last line is the
`Outcome`.
"""

import argparse
import contextlib
import dataclasses
import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controlled_device import ControlledDevice
from fuse_directory import HangingDirectory
from store_kit import MIB, Chunks, config_of, du

from tierstore import TierStore
from tierstore.errors import TierStoreError
from tierstore.planes import Patience

__all__ = ["FAULTS", "Outcome", "endure"]

CHUNKS = Chunks(65_536)
NUMBERS = range(200)
"""Fewer than the tier has room for: nothing is evicted there."""
HOT = range(1000, 1008)
LATE = range(2000, 2040)
EARLY = range(3000, 3040)
"""Stored and flushed before anything happens."""
PRIMARY = "4MiB"
CAPACITY_BYTES = 24 * MIB
BATCH_MAX = 8
HEALTHY_SECONDS = 0.3
BROKEN_SECONDS = 4.0
BACK_SECONDS_MAX = 120.0
SAMPLE_SECONDS = 0.01
IMPATIENT = Patience(put_seconds=1, flush_seconds=3, close_seconds=5)


@dataclass(kw_only=True)
class Outcome:
    """What came of one try."""

    fault: str
    backend: str
    seed: int
    loads: int = 0
    hits: int = 0
    recomputed: int = 0
    """Chunks that were stored before and were not found: whoever wants them computes them."""
    refused: int = 0
    """Chunks that memory did not take, and flushes that said that something is missing."""
    retried: int = 0
    """Chunks that could not be written and were, later."""
    wrong: int = 0
    lost: int = 0
    """Chunks that a flush had acknowledged, and a later store did not find."""
    over_quota_bytes: int = 0
    memory_stall_seconds: float = 0
    """The longest time that a load from memory took."""
    stall_seconds: float = 0
    """The longest time that any call took."""
    back_seconds: float = 0
    """From the end of the fault to the first complete flush."""
    is_back: bool = False
    problems: list[str] = dataclasses.field(default_factory=list)


class Load:
    """Threads that use one store until they are told to stop."""

    def __init__(self, store: TierStore, outcome: Outcome, seed: int) -> None:
        self._store = store
        self._outcome = outcome
        self._dice = random.Random(seed)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.stored: set[int] = set()
        self._threads = [
            threading.Thread(target=self._guard, args=[step], daemon=True)
            for step in (self._use_disk, self._use_memory, self._flush)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(BACK_SECONDS_MAX)
            if thread.is_alive():
                self._outcome.problems.append("a call hangs")

    def _guard(self, step: Callable[[], None]) -> None:
        while not self._stop.is_set():
            try:
                step()
            except AssertionError as error:  # of `Chunks.found`
                self._outcome.wrong += 1
                self._outcome.problems.append(str(error))
            except Exception as error:  # noqa: BLE001 - whatever is raised is what is looked for
                self._outcome.problems.append(repr(error))
                return

    def _use_disk(self) -> None:
        count = self._dice.randint(1, BATCH_MAX)
        numbers = self._dice.sample(NUMBERS, count)
        with self._timed():
            found = CHUNKS.found(self._store, numbers)
        missing = [number for number in numbers if number not in found]
        with self._lock:
            self._outcome.loads += len(numbers)
            self._outcome.hits += len(found)
            self._outcome.recomputed += len(self.stored.intersection(missing))
        if missing:
            with self._timed():
                accepted = CHUNKS.put(self._store, missing)
            with self._lock:
                self._outcome.refused += len(missing) - accepted
                if accepted == len(missing):
                    self.stored.update(missing)
        time.sleep(0.002)

    def _use_memory(self) -> None:
        with self._timed(of_memory=True):
            found = CHUNKS.found(self._store, HOT)
        if len(found) < len(HOT):
            with self._timed(of_memory=True):
                CHUNKS.put(self._store, HOT)
        time.sleep(0.002)

    def _flush(self) -> None:
        try:
            with self._timed():
                self._store.flush()
        except TierStoreError:
            self._outcome.refused += 1
        self._stop.wait(0.2)

    @contextmanager
    def _timed(self, *, of_memory: bool = False) -> Iterator[None]:
        began_at = time.monotonic()
        yield
        seconds = time.monotonic() - began_at
        outcome = self._outcome
        outcome.stall_seconds = max(outcome.stall_seconds, seconds)
        if of_memory:
            outcome.memory_stall_seconds = max(outcome.memory_stall_seconds, seconds)


@dataclass(frozen=True)
class Fault:
    """What happens to the device."""

    begin: Callable[[], object]
    end: Callable[[], object]
    device: ControlledDevice | None = None
    forgets: bool = False
    """Whether what was on the disk is gone with it."""


@contextmanager
def _controlled(path: Path, begin: Callable[[ControlledDevice], None]) -> Iterator[Fault]:
    del path
    device = ControlledDevice()
    yield Fault(lambda: begin(device), device.heal, device)
    device.heal()


@contextmanager
def _vanished(path: Path) -> Iterator[Fault]:
    yield Fault(lambda: shutil.rmtree(path, ignore_errors=True), lambda: None, forgets=True)


@contextmanager
def _stopped(path: Path) -> Iterator[Fault]:
    """A process that shares the path stops within a transaction of the catalog."""
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tierstore.lmdb_env import LmdbEnv\n"
        "env = LmdbEnv.open(Path(sys.argv[1]), map_bytes=1 << 38)\n"
        "sys.stdin.readline()\n"
        "with env.write():\n"
        "    print('held', flush=True)\n"
        "    time.sleep(1000)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, path / "catalog"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def begin() -> None:
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)

    yield Fault(begin, process.kill)
    process.kill()
    process.wait()


@contextmanager
def _limited(path: Path, kind: int, limit: Callable[[], int]) -> Iterator[Fault]:
    """The process may have no more files, or no longer ones, than it has."""
    del path
    before = resource.getrlimit(kind)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield Fault(
        lambda: resource.setrlimit(kind, (limit(), before[1])),
        lambda: resource.setrlimit(kind, before),
    )


@contextmanager
def _full(path: Path) -> Iterator[Fault]:
    """Somebody else takes all the room of the file system, which is one of its own."""
    filler = os.open(path.parent / "filler", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def fill() -> None:
        for size in (MIB, 4096):
            with contextlib.suppress(OSError):
                while os.write(filler, bytes(size)):
                    pass

    yield Fault(fill, lambda: os.ftruncate(filler, 0))
    os.close(filler)


@contextmanager
def _fuse(folder: Path) -> Iterator[tuple[Path, Fault]]:
    with HangingDirectory(folder) as directory:
        yield directory.path / "tier", Fault(directory.hang, directory.heal)
        directory.heal()


def _open_file_count() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names alone


FAULTS: dict[str, Callable[[Path], Any]] = {
    "EIO": lambda path: _controlled(path, lambda device: device.fail(errno.EIO)),
    "ENOSPC": lambda path: _controlled(path, lambda device: device.fail(errno.ENOSPC)),
    "hung calls": lambda path: _controlled(path, lambda device: device.hang()),
    "hung mount": _fuse,
    "full": _full,
    "vanished": _vanished,
    "stopped": _stopped,
    "RLIMIT_NOFILE": lambda path: _limited(path, resource.RLIMIT_NOFILE, _open_file_count),
    "RLIMIT_FSIZE": lambda path: _limited(path, resource.RLIMIT_FSIZE, lambda: 4096),
}
NEEDS_ROOT = {"hung mount", "full"}


@contextmanager
def _mounted(folder: Path, name: str) -> Iterator[tuple[Path, Fault]]:
    """Make the tier's path and the fault."""
    if name == "hung mount":
        with _fuse(folder) as made:
            yield made
        return
    if name == "full":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", folder], check=True)
    path = folder / "tier"
    try:
        with FAULTS[name](path) as fault:
            yield path, fault
    finally:
        if name == "full":
            subprocess.run(["umount", "--lazy", folder], check=False)


def endure(name: str, *, backend: str, seed: int, folder: Path) -> Outcome:
    """Try one fault once."""
    outcome = Outcome(fault=name, backend=backend, seed=seed)
    with _mounted(folder, name) as (path, fault):
        config = config_of(
            path,
            backend=backend,
            primary=PRIMARY,
            capacity=f"{CAPACITY_BYTES}B",
            io={"threads": 2, "deadline": "300ms"},
        )
        open_system = {"open_system": lambda _: fault.device} if fault.device else {}
        with _sampled(path, outcome, is_hanging=name == "hung mount"):
            store = TierStore.open(config, CHUNKS.manifest, patience=IMPATIENT, **open_system)
            CHUNKS.put(store, EARLY)
            store.flush()
            CHUNKS.put(store, HOT)
            load = Load(store, outcome, seed)
            load.start()
            time.sleep(HEALTHY_SECONDS)
            fault.begin()
            time.sleep(BROKEN_SECONDS)
            fault.end()
            _wait_until_back(store, outcome)
            load.stop()
            acknowledged = _finish(store, outcome)
        if outcome.is_back:
            with TierStore.open(config, CHUNKS.manifest) as again:
                wanted = acknowledged.union([] if fault.forgets else EARLY)
                outcome.lost = len(wanted) - len(CHUNKS.found(again, sorted(wanted)))
                outcome.problems += again.check()
    return outcome


def _wait_until_back(store: TierStore, outcome: Outcome) -> None:
    """Store, until a flush says that all of it is on the disk."""
    began_at = time.monotonic()
    while time.monotonic() - began_at < BACK_SECONDS_MAX:
        CHUNKS.put(store, LATE)
        try:
            store.flush()
        except TierStoreError:
            time.sleep(0.05)
        else:
            outcome.is_back = True
            outcome.back_seconds = time.monotonic() - began_at
            return
    outcome.problems.append("the tier is not used again")


def _finish(store: TierStore, outcome: Outcome) -> set[int]:
    """Flush and close; return what is acknowledged to be on the disk."""
    kept = {n for n in [*NUMBERS, *LATE] if store.match_prefix(CHUNKS.keys([n])).chunk_count}
    try:
        store.flush()
    except TierStoreError as error:
        outcome.problems.append(repr(error))
        kept = set()
    outcome.problems += store.check()
    counters = store.stats().counters
    outcome.retried = int(
        sum(count for name, count in counters.items() if name.startswith("dropped_demotes"))
    )
    store.close()
    return kept


@contextmanager
def _sampled(path: Path, outcome: Outcome, *, is_hanging: bool) -> Iterator[None]:
    """Look all the time at what lies below the path; twice where it is too much.

    What has come and gone during one walk may be in it twice.
    """
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(SAMPLE_SECONDS):
            excess = min(du(path) - CAPACITY_BYTES for _ in range(3))
            outcome.over_quota_bytes = max(outcome.over_quota_bytes, excess)

    thread = threading.Thread(target=sample, daemon=True)
    if not is_hanging:  # it would hang as well
        thread.start()
    try:
        yield
    finally:
        stop.set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("--backend", choices=["file", "lmdb"], default="file")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        outcome = endure(
            arguments.fault,
            backend=arguments.backend,
            seed=arguments.seed,
            folder=Path(folder).resolve(),
        )
    print(json.dumps(dataclasses.asdict(outcome)), flush=True)
    os._exit(0)  # whatever still hangs


if __name__ == "__main__":
    main()
