"""Two lives of a store under faults, a healing, and two sound lives: what is kept, key by key.

A record is acknowledged when `flush` returned without an error while its chunk was in memory. From
then on it has to be found, unless

- it was reset. A reset is acknowledged by the next `flush` that returns without an error: as long
  as the catalog refuses, it holds in memory only;
- the tier evicted as many records, and it is not among the newest;
- the very call that did not find it counted a miss for it, because the device failed. A record
  that failed is hidden until the tier is opened again. A catalog that cannot be read hides all
  that is asked of it, and counts each chunk once.

All that contradicts this is a problem, in words. Nothing is asserted here, so that a campaign can
count what a test refuses.
"""

import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from store_kit import MIB, Chunks, config_of, du

from tierstore import TierStore
from tierstore.embedded.planes import Patience
from tierstore.errors import TierStoreError
from tierstore.testing.faults import FaultPlan, faulty_backend_opener

CHUNKS = Chunks(65_536)
BATCH = 8
FORGOTTEN = range(3 * BATCH)
FIRST = range(100, 100 + 3 * BATCH)
CROWD = range(200, 200 + 20 * BATCH)
AFTERWARDS = range(1000, 1000 + BATCH)
RETURNED = range(2000, 2000 + BATCH)
DEVICE_FAILED = {"io_error", "deadline", "full", "closed", "stalled"}
"""Reasons for which a record that is there is not found now."""

HEALED_SECONDS_MAX = 300
BREAKER = {"retry_after": "200ms", "retry_after_max": "1s"}
PATIENCE = Patience(put_seconds=0.5, flush_seconds=5, close_seconds=2)


@dataclass
class Outcome:
    """What a run of lives came to."""

    problems: list[str] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)
    """Of chunks: recomputed, retried, refused, wrong bytes, lost, kept; of calls to the device
    before it was healed; and the most bytes over quota."""
    stall_seconds: float = 0.0
    """The longest call."""


class Lives:
    """One run; `plan` may hold any rules, and is healed in the course of it."""

    def __init__(self, path, plan, *, backend, cascade="write_through", tier_count=1, **kind):
        """`is_crowded`: the tiers hold less than is stored. `by_backend`: the plan strikes the
        calls of backends, not those of devices. `is_passing`: no record fails twice."""
        self.plan = plan
        self.is_crowded = kind.get("is_crowded", False)
        self.is_passing = kind.get("is_passing", False)
        self.by_backend = kind.get("by_backend", False)
        self.capacity_bytes = (8 if self.is_crowded else 16) * MIB
        self.folders = [path / str(number) for number in range(tier_count)]
        config = config_of(
            path / "0",
            backend=backend,
            primary="2MiB",
            capacity=f"{self.capacity_bytes}B",
            cascade=cascade,
            io={"threads": 1, "durable": True, "breaker": BREAKER},
        )
        (first,) = config["secondary"]
        config["secondary"] = [
            first | {"name": f"disk{number}", "path": str(folder)}
            for number, folder in enumerate(self.folders)
        ]
        self.config = config
        self.outcome = Outcome()
        self.acknowledged = set()
        self.reset = set()
        self.resetting = set()
        self.hidden = set()
        self._missed_before = Counter()
        """Misses that were counted when somebody asked: one for each chunk of a mute tier."""

    def run(self):
        """Live, heal, live on; return what came of it."""
        with suppress(_Refused), self._opened() as store:
            self._store(store, FORGOTTEN)
            self._recall(store, FORGOTTEN)
            self._reset(store)
            self._store(store, FIRST)
            self._recall(store, FIRST)
        with suppress(_Refused), self._opened() as store:
            self._recall(store, [*FORGOTTEN, *FIRST])
            self._store(store, CROWD if self.is_crowded else CROWD[: 2 * BATCH])
            self._recall(store, FIRST)
            self._recall(store, FIRST)
            self.outcome.counts["calls"] = self.plan.call_count()
            self.plan.heal()
            self._require(self._flushes(store), "healed, and no flush succeeds")
            self._store(store, AFTERWARDS, must_flush=True)
            self._check(store)
        self.plan.heal()
        with self._opened() as store:
            self._recall_all(store)
            self._check(store)
            self._store(store, RETURNED, must_flush=True)
            self._check(store)
        with self._opened() as store:
            self._require(
                CHUNKS.found(store, RETURNED) == list(RETURNED), "a tier is not in use again"
            )
            self._check(store)
        self._measure()
        return self.outcome

    def _opened(self):
        opener = {"open_system": self.plan.open_system}
        if self.by_backend:
            opener = {"open_backend": faulty_backend_opener(self.plan)}
        started = time.monotonic()
        try:
            store = TierStore.open(self.config, CHUNKS.manifest, patience=PATIENCE, **opener)
        except TierStoreError as error:
            self.outcome.counts["refused"] += 1
            raise _Refused from error
        finally:
            self._note_stall(started)
        self.hidden = set()
        self._missed_before = Counter()
        self.resetting = set()  # what no flush has acknowledged ends with the process
        self.evicted_before = self._evicted_count(store)
        return store

    def _store(self, store, numbers, *, must_flush=False):
        """Put and flush batch by batch; after a refused flush only the last one is flushed."""
        is_refused = False
        for first in range(0, len(numbers), BATCH):
            batch = numbers[first : first + BATCH]
            started = time.monotonic()
            stored = CHUNKS.put(store, batch)
            self._note_stall(started)
            self._require(stored == len(batch), f"put took {stored} of {len(batch)}")
            if is_refused and batch[-1] != numbers[-1]:
                continue
            started = time.monotonic()
            try:
                store.flush()
            except TierStoreError:
                is_refused = True
                self.outcome.counts["refused"] += 1
                self._require(not must_flush, "a flush of a sound tier failed")
            else:
                self.acknowledged |= set(batch)
                self.reset |= self.resetting
            self._note_stall(started)
            with suppress(TierStoreError):
                store.match_prefix(CHUNKS.keys(numbers))
            self._measure()

    def _recall(self, store, numbers):
        """Load chunks: those that were acknowledged are there, or their miss is counted."""
        started = time.monotonic()
        found = self._found(store, numbers)
        self._note_stall(started)
        failed = self._missed_since_last(store)
        excuses = sum(count for reason, count in failed.items() if reason in DEVICE_FAILED)
        lost = (set(numbers) & self.acknowledged) - found - self.hidden
        self._forbid(found & self.reset, "found although it was reset")
        missing = len(lost) - excuses - self._evicted_since_opening(store)
        if missing > 0:
            self.outcome.counts["lost"] += missing
            self._require(False, f"{missing} of {sorted(lost)} not found: counted {dict(failed)}")
        self.outcome.counts["recomputed"] += len(lost)
        self.hidden |= lost
        if not self.is_passing:
            self.acknowledged -= lost

    def _missed_since_last(self, store):
        """Return how many chunks were counted as missed since the last call, by reason.

        A question that comes before the load counts the miss, and the load does not once more.
        """
        before, self._missed_before = self._missed_before, Counter(_misses(store))
        return self._missed_before - before

    def _recall_all(self, store):
        """Load all in a sound life: what was acknowledged is there, whatever failed before."""
        evicted = self._evicted_count(store)
        found = set()
        everything = [*FORGOTTEN, *FIRST, *CROWD, *AFTERWARDS]
        for first in range(0, len(everything), BATCH):
            found |= self._found(store, everything[first : first + BATCH])
        self._forbid(found & self.reset, "found although it was reset")
        lost = self.acknowledged - found
        newest = lost & {*AFTERWARDS, *CROWD[-4 * BATCH :]}
        self._forbid(newest, "lost, and among the newest")
        if len(lost) > (evicted if self.is_crowded else 0):
            self._forbid(lost, f"lost, where {evicted} were evicted")
        damaged = {reason for reason in _misses(store) if reason not in DEVICE_FAILED}
        self._forbid(damaged, "misses of a sound device")
        self.outcome.counts["kept"] += len(found)

    def _reset(self, store):
        store.reset()
        self.resetting = set(FORGOTTEN)
        self.acknowledged -= self.resetting
        self._forbid(self._found(store, FORGOTTEN), "found although it was just reset")

    def _found(self, store, numbers):
        try:
            return set(CHUNKS.found(store, numbers))
        except AssertionError as error:
            self.outcome.counts["wrong bytes"] += 1
            self.outcome.problems.append(str(error))
            return set()

    def _flushes(self, store):
        until = time.monotonic() + HEALED_SECONDS_MAX
        while time.monotonic() < until:
            with suppress(TierStoreError):
                store.flush()
                return True
            self.outcome.counts["retried"] += 1
            time.sleep(0.01)
        return False

    def _check(self, store):
        problems = store.check()
        self._require(not problems, f"check: {problems[:3]}")

    def _measure(self):
        for folder in self.folders:
            over = du(folder) - self.capacity_bytes
            self.outcome.counts["over quota"] = max(self.outcome.counts["over quota"], over, 0)
            self._require(over <= 0, f"{over} bytes over quota")

    def _evicted_count(self, store):
        with suppress(TierStoreError):
            return sum(tier.evicted_count for tier in store.stats().secondary.values())
        return 0

    def _evicted_since_opening(self, store):
        return max(0, self._evicted_count(store) - self.evicted_before) if self.is_crowded else 0

    def _note_stall(self, started):
        self.outcome.stall_seconds = max(self.outcome.stall_seconds, time.monotonic() - started)

    def _forbid(self, numbers, why):
        if numbers:
            self.outcome.counts["lost"] += len(numbers) * why.startswith("lost")
            self.outcome.problems.append(f"{sorted(numbers)[:20]}: {why}")

    def _require(self, holds, why):
        if not holds:
            self.outcome.problems.append(why)


def _misses(store):
    # A catalog that cannot be read leaves `stats` without an answer, but not the counters.
    return {
        name.split('"')[1]: count
        for name, count in store._counters.snapshot().items()
        if name.startswith("misses")
    }


class _Refused(Exception):  # noqa: N818 - an outcome
    """A store could not be opened."""


def live_under(path, plan: FaultPlan, **kind) -> Outcome:
    """Run lives below an empty path."""
    return Lives(path, plan, **kind).run()


def random_rules(seed: int):
    """Return rules by seed: one to three, of any kind that leaves the process alive."""
    from tierstore.testing.faults import FaultRule

    dice = random.Random(seed)
    rules = []
    for _ in range(dice.randint(1, 3)):
        kind = dice.choice(["error", "error", "error", "torn", "short", "latency"])
        rules.append(
            FaultRule(
                kind=kind,
                error=dice.choice(["EIO", "ENOSPC", "EROFS", "EMFILE", "EFBIG", "ENOMEM"]),
                calls=(dice.choice(["*", "p*", "database.*", "allocate", "punch_hole", "open"]),),
                nth=dice.randint(1, 150),
                every=dice.choice([1, 1, 3, 10]),
                times=dice.choice([1, 5, None]),
                probability=dice.choice([1.0, 0.3]),
                latency_seconds=0.02,
                seed=dice.randrange(1 << 16),
            )
        )
    return rules
