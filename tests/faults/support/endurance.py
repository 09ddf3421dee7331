"""One store under load, while something happens to its device: what came of each call.

    PYTHONPATH=.:tests/support python tests/faults/support/endurance.py EIO --backend file

One thread stores and loads chunks that the disk has, another one only what is in memory, a third
one flushes. The fault begins, ends, and the store has to come back by itself; then another store
opens the path and looks for all that was flushed. Every byte is compared. The last line is the
`Outcome`.
"""

import argparse
import dataclasses
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from broken_devices import FAULTS, Fault, broken_device
from filesystems import sampled
from store_kit import MIB, Chunks, config_of

from tierstore import TierStore
from tierstore.embedded.planes import Patience
from tierstore.errors import TierStoreError

__all__ = ["Outcome", "endure"]

CHUNKS = Chunks(65_536)
NUMBERS = range(160)
HOT = range(1000, 1008)
LATE = range(2000, 2040)
EARLY = range(3000, 3040)
"""Stored and flushed before anything happens."""
MARKED = range(4000, 4060)
"""Stored by the thread that flushes, a few before each flush: what it acknowledges."""
MARKED_BATCH = 3
PRIMARY = "4MiB"
CAPACITY_BYTES = 28 * MIB
"""Room for all of these chunks: nothing is evicted, so that nothing has a reason to be gone."""
BATCH_MAX = 8
HEALTHY_SECONDS = 0.5
BROKEN_SECONDS = 4.0
BACK_SECONDS_MAX = 120.0
SAMPLE_SECONDS = 0.005
IO = {
    "threads": 2,
    "deadline": "300ms",
    "breaker": {"retry_after": "500ms", "retry_after_max": "2s"},
}
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
    """Writes that failed, or did not begin: tried again as long as memory has the chunk."""
    wrong: int = 0
    acknowledged: int = 0
    """Chunks that were in memory when a flush returned, and should be on the disk from then on."""
    lost: int = 0
    """Those of them that a later store did not find."""
    over_quota_bytes: int = 0
    sample_count: int = 0
    memory_stall_seconds: float = 0
    """The longest time that a load took of which memory had every chunk."""
    stall_seconds: float = 0
    """The longest time that any call took."""
    back_seconds: float = 0
    """From the end of the fault until a flush was whole and what the disk has was read again."""
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
        self._stored: set[int] = set()
        self._is_forgotten = False
        self._unmarked = list(MARKED)
        self.acknowledged: set[int] = set()
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

    def forget(self) -> None:
        """Take note that what was acknowledged is gone, and what is being flushed just now."""
        with self._lock:
            self._is_forgotten = True
            self.acknowledged.clear()

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
        with self._lock:
            known = [*NUMBERS, *EARLY, *sorted(self.acknowledged)]
        numbers = self._dice.sample(known, count)
        with self._timed():
            found = CHUNKS.found(self._store, numbers)
        missing = [number for number in numbers if number not in found]
        with self._lock:
            self._outcome.loads += len(numbers)
            self._outcome.hits += len(found)
            promised = self._stored | self.acknowledged | set(EARLY)
            self._outcome.recomputed += len(promised.intersection(missing))
        if missing:
            with self._timed():
                accepted = CHUNKS.put(self._store, missing)
            with self._lock:
                self._outcome.refused += len(missing) - accepted
                if accepted == len(missing):
                    self._stored.update(missing)
        time.sleep(0.002)

    def _use_memory(self) -> None:
        began_at = time.monotonic()
        found = CHUNKS.found(self._store, HOT)
        seconds = time.monotonic() - began_at
        outcome = self._outcome
        if len(found) == len(HOT):
            outcome.memory_stall_seconds = max(outcome.memory_stall_seconds, seconds)
        else:
            outcome.stall_seconds = max(outcome.stall_seconds, seconds)
            with self._timed():
                CHUNKS.put(self._store, HOT)
        time.sleep(0.002)

    def _flush(self) -> None:
        marked = self._unmarked[:MARKED_BATCH]
        keys = CHUNKS.keys(marked)
        self._is_forgotten = False
        try:
            with self._timed():
                is_taken = not marked or CHUNKS.put(self._store, marked) == len(marked)
                self._store.flush()
            has_all = not marked or self._store.match_prefix(keys).chunk_count == len(marked)
        except TierStoreError:
            self._outcome.refused += 1
        else:
            with self._lock:
                if is_taken and has_all and not self._is_forgotten:
                    self.acknowledged.update(marked)
                    del self._unmarked[:MARKED_BATCH]
        self._stop.wait(0.1)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began_at = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began_at
            self._outcome.stall_seconds = max(self._outcome.stall_seconds, seconds)


def endure(
    name: str, *, backend: str, seed: int, folder: Path, broken_seconds: float = BROKEN_SECONDS
) -> Outcome:
    """Try one fault once, below an empty folder."""
    outcome = Outcome(fault=name, backend=backend, seed=seed)
    with broken_device(name, folder) as (path, fault):
        config = config_of(
            path, backend=backend, primary=PRIMARY, capacity=f"{CAPACITY_BYTES}B", io=IO
        )
        usage = nullcontext()
        if fault.can_be_walked:
            usage = sampled(path, pause_seconds=SAMPLE_SECONDS)
        with usage as seen:
            acknowledged = _live(config, fault, outcome, broken_seconds)
            if outcome.is_back:
                with TierStore.open(config, CHUNKS.manifest) as again:
                    outcome.acknowledged = len(acknowledged)
                    found = CHUNKS.found(again, sorted(acknowledged))
                    outcome.lost = len(acknowledged) - len(found)
                    outcome.problems += again.check()
        if seen is not None:
            outcome.over_quota_bytes = max(0, seen.bytes_max - CAPACITY_BYTES)
            outcome.sample_count = seen.sample_count
    return outcome


def _live(config: dict, fault: Fault, outcome: Outcome, broken_seconds: float) -> set[int]:
    """Use a store before, during and after a fault; return what is acknowledged at its end."""
    opener = {"open_system": fault.plan.open_system} if fault.plan else {}
    store = TierStore.open(config, CHUNKS.manifest, patience=IMPATIENT, **opener)
    CHUNKS.put(store, EARLY)
    store.flush()
    CHUNKS.put(store, HOT)
    load = Load(store, outcome, outcome.seed)
    load.start()
    time.sleep(HEALTHY_SECONDS)
    fault.begin()
    time.sleep(broken_seconds)
    fault.end()
    if fault.forgets:
        load.forget()
    early = set() if fault.forgets else set(EARLY)
    _wait_until_back(store, outcome, sorted(early))
    load.stop()
    return _finish(store, outcome, load.acknowledged | early)


def _wait_until_back(store: TierStore, outcome: Outcome, early: list[int]) -> None:
    """Use the store until a flush says that all of it is on the disk, and old records are read."""
    began_at = time.monotonic()
    while time.monotonic() - began_at < BACK_SECONDS_MAX:
        CHUNKS.put(store, LATE)
        try:
            store.flush()
        except TierStoreError:
            time.sleep(0.05)
            continue
        if CHUNKS.found(store, early) == early:
            outcome.is_back = True
            outcome.back_seconds = time.monotonic() - began_at
            return
        time.sleep(0.05)
    outcome.problems.append("the tier is not used again")


def _finish(store: TierStore, outcome: Outcome, acknowledged: set[int]) -> set[int]:
    """Flush and close; return what is acknowledged to be on the disk."""
    known = [*NUMBERS, *LATE, *HOT]
    kept = {number for number in known if store.match_prefix(CHUNKS.keys([number])).chunk_count}
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
    if evicted := store.stats().secondary["disk"].evicted_count:
        outcome.problems.append(f"{evicted} records were evicted: nobody can tell what is lost")
    store.close()
    return kept | acknowledged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("--backend", choices=["file", "lmdb"], default="file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--broken-seconds", type=float, default=BROKEN_SECONDS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        outcome = endure(
            arguments.fault,
            backend=arguments.backend,
            seed=arguments.seed,
            folder=Path(folder).resolve(),
            broken_seconds=arguments.broken_seconds,
        )
    print(json.dumps(dataclasses.asdict(outcome)), flush=True)
    os._exit(0)  # whatever still hangs


if __name__ == "__main__":
    main()
