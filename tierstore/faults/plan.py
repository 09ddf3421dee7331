"""Which calls to a tier's device go wrong: rules, counted calls, and a trace of what was done.

    plan = FaultPlan(FaultRule(kind="error", error="ENOSPC", calls=("allocate",), nth=3, times=1))
    with TierStore.open(config, manifest, open_system=plan.open_system) as store: ...
    print(plan.trace)

Several rules may strike one call: it waits for all of them, then the worst happens. With one I/O
thread per tier the same rules and the same scenario give the same trace; `Injection.rule` lets any
of it happen again by itself.
"""

import errno
import threading
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape
from random import Random

from tierstore.config import FaultKind, FaultRule, SecondaryConfig
from tierstore.device.system import SYSTEM, SystemCalls
from tierstore.faults.strike import Call, Strike
from tierstore.faults.system import StruckSystem

__all__ = ["FaultPlan", "Injection"]

_TRACE_LENGTH_MAX = 10_000
"""Of what was injected, the last so many are kept."""

_SWITCH_SECONDS = 0.05
"""A call that hangs looks so often whether the switch of its rule is gone."""

_MOVERS = {"preadv", "pwritev", "copy_mapped"}
_CHANGES = {"allocate", "punch_hole", "backend.write", "backend.release"}
_CALLS_OF: dict[FaultKind, set[str]] = {
    "short": _MOVERS,
    "flip": _MOVERS,
    "zero": _MOVERS,
    "torn": {"pwritev"} | _CHANGES,
    "lose": {"pwritev", "flush", "unlink", "truncate", "backend.sync"} | _CHANGES,
}
"""The calls to which a kind can happen; the others happen to any."""

_SEVERITY: tuple[FaultKind, ...] = (
    "lose", "flip", "zero", "short", "torn", "error", "memory", "exit", "kill"
)  # fmt: skip
"""From the mildest on."""

_PARTED: frozenset[FaultKind] = frozenset(("short", "torn", "flip", "zero"))


@dataclass(frozen=True, slots=True)
class Injection:
    """What was done to one call."""

    call: Call
    number: int
    """Which call of this name to this file it was, from 1."""
    strike: Strike

    @property
    def rule(self) -> FaultRule:
        """The rule that does this and nothing else."""
        parts = self.strike.kind in _PARTED or self.strike.has_part
        return FaultRule(
            kind=self.strike.kind,
            error=_name_of(self.strike.code),
            calls=(self.call.name,),
            files=escape(self.call.file) or "*",
            nth=self.number,
            times=1,
            at_bytes=self.strike.at_bytes if parts else None,
        )

    def __str__(self) -> str:
        where = f"{self.call.tier}:{self.call.file}" if self.call.file else self.call.tier
        part = f" at {self.strike.at_bytes}" if self.strike.kind in _PARTED else ""
        error = f" {_name_of(self.strike.code)}" if self.strike.kind in {"error", "torn"} else ""
        return f"{self.strike.kind}{error}{part}: {self.call.name} #{self.number} {where}"


class _Watched:
    """A rule, what it has counted, and its dice."""

    def __init__(self, rule: FaultRule, seed: str) -> None:
        self.rule = rule
        self.dice = Random(seed)  # noqa: S311 - the same faults at every run
        self.call_count = 0
        self.strike_count = 0
        self.healed = threading.Event()

    def strikes(self, call: Call) -> bool:
        """Count a call that matches; return whether the rule strikes it."""
        rule = self.rule
        if not self._matches(call):
            return False
        self.call_count += 1
        behind = self.call_count - rule.nth
        if behind < 0 or behind % rule.every or self.strike_count == rule.times:
            return False
        if rule.probability < 1 and self.dice.random() >= rule.probability:
            return False
        self.strike_count += 1
        return True

    def wait(self) -> None:
        """Wait as long as the rule says."""
        if self.rule.kind == "latency":
            self.healed.wait(self.rule.latency_seconds)
            return
        while not self.healed.wait(_SWITCH_SECONDS if self.rule.switch else None):
            if not self._is_on():
                return

    def strike(self, call: Call) -> Strike:
        """Return what happens to a call."""
        size, at = call.size_bytes, self.rule.at_bytes
        if at is None:
            at = self.dice.randrange(size) if size and self.rule.kind in _PARTED else 0
        has_part = self.rule.at_bytes is not None and size > 0
        return Strike(self.rule.kind, self.rule.errno, min(at, size), has_part=has_part)

    def _matches(self, call: Call) -> bool:
        rule = self.rule
        if call.name not in _CALLS_OF.get(rule.kind, (call.name,)):
            return False
        if call.name == "database.committed" and rule.kind in {"error", "memory"}:
            return False  # nothing fails there: it has happened
        return (
            any(fnmatchcase(call.name, pattern) for pattern in rule.calls)
            and fnmatchcase(call.file, rule.files)
            and self._is_on()
        )

    def _is_on(self) -> bool:
        return self.rule.switch is None or self.rule.switch.exists()


class FaultPlan:
    """Rules for the calls of tiers. Thread-safe; may be changed while calls are under way."""

    def __init__(self, *rules: FaultRule, seed: int = 0, tiers: str = "*") -> None:
        """Hold `rules` for all tiers whose name matches the pattern `tiers`."""
        self._lock = threading.Lock()
        self._seed = seed
        self._tiers = tiers
        self._watched: list[_Watched] = []
        self._rule_count = 0
        self._counts: Counter[tuple[str, str]] = Counter()
        self._trace: deque[Injection] = deque(maxlen=_TRACE_LENGTH_MAX)
        self._strike_count = 0
        self.inject(*rules)

    def inject(self, *rules: FaultRule) -> None:
        """Add rules; they count from now on."""
        with self._lock:
            for rule in rules:
                self._rule_count += 1
                seed = f"{self._seed}/{self._rule_count}/{rule.seed}"
                self._watched.append(_Watched(rule, seed))

    def heal(self) -> None:
        """Drop all rules; what hangs goes on."""
        with self._lock:
            for watched in self._watched:
                watched.healed.set()
            self._watched.clear()

    @property
    def trace(self) -> list[Injection]:
        """What was injected, in order."""
        with self._lock:
            return list(self._trace)

    @property
    def strike_count(self) -> int:
        """How often a rule struck."""
        return self._strike_count

    def call_count(self, calls: str = "*", files: str = "*") -> int:
        """Count the calls that were made so far, of names and to files that match."""
        with self._lock:
            return sum(
                count
                for (name, file), count in self._counts.items()
                if fnmatchcase(name, calls) and fnmatchcase(file.partition(":")[2], files)
            )

    def applies_to(self, tier: str) -> bool:
        """Return whether the plan has a say in a tier."""
        return fnmatchcase(tier, self._tiers)

    def open_system(self, config: SecondaryConfig) -> SystemCalls:
        """Return the system calls of a tier; what `TierStore.open` takes as `open_system`."""
        return self.wrap(SYSTEM, config)

    def wrap(self, real: SystemCalls, config: SecondaryConfig) -> SystemCalls:
        """Return the system calls of a tier, over those of another plan or recorder."""
        if not self.applies_to(config.name):
            return real
        return StruckSystem(self, tier=config.name, root=config.path, real=real)

    def strike(self, call: Call) -> Strike | None:
        """Count a call, wait as long as it has to, and return what happens to it otherwise."""
        with self._lock:
            counted = (call.name, f"{call.tier}:{call.file}")
            self._counts[counted] += 1
            striking = [watched for watched in self._watched if watched.strikes(call)]
            strikes = [watched.strike(call) for watched in striking]
            for strike in strikes:
                self._trace.append(Injection(call, self._counts[counted], strike))
            self._strike_count += len(strikes)
        for watched in _waiting(striking):
            watched.wait()
        worst = [strike for strike in strikes if strike.kind in _SEVERITY]
        return max(worst, key=lambda strike: _SEVERITY.index(strike.kind), default=None)


def _waiting(striking: list[_Watched]) -> Iterator[_Watched]:
    return (watched for watched in striking if watched.rule.kind in {"latency", "hang"})


def _name_of(code: int) -> str:
    return errno.errorcode.get(code, str(code))
