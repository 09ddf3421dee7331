"""RELIABILITY.md, made of the findings of `reliability.py`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from _reliability_experiments import Finding

__all__ = ["Kept", "document_of"]

PROBLEMS_SHOWN = 30
HOW = {
    "none": "No fault: what this machine takes by itself.",
    "EIO": "Every call to the device fails with EIO (fault kit, `tierstore.testing.faults`).",
    "ENOSPC": "Every write, allocation, flush and commit fails with ENOSPC (fault kit).",
    "EROFS": "As ENOSPC, with EROFS.",
    "slow": "Every call to the device takes 0.1 s longer (fault kit).",
    "hung calls": "Every call to the device blocks until the fault ends (fault kit).",
    "hung mount": "The tier lies on a FUSE mount whose server is stopped: every access waits in "
    "the kernel, page faults included.",
    "full": "Another process fills the file system, a tmpfs of 32 MiB.",
    "vanished": "`rm -rf` of the tier's path while the store runs. What was on the disk is gone "
    "with it; only chunks flushed after that count.",
    "stopped": "A process that shares the path is stopped (SIGSTOP) within a write transaction of "
    "the catalog.",
    "RLIMIT_NOFILE": "The process may not open any more files.",
    "RLIMIT_FSIZE": "No file of the process may grow beyond 4 KiB.",
    "damaged files": "The files of a store, closed or as a kill leaves it, are damaged in one to "
    "three ways: bits, sectors of zeros, garbage, both meta pages, truncated, grown, swapped, "
    "removed, older pages. The store is opened, used, closed and opened again.",
    "random calls fail": "One to three random rules (errors, torn and short moves, latency; once, "
    "for a while, permanently) hit a store that stores, loads, resets, evicts and restarts; then "
    "the device is healed.",
    "kill or power cut at any write": "An image of the files that a kill, or a power cut that "
    "loses and reorders unsynced writes, leaves at any recorded write of a scenario. Without "
    "`io.durable` a power cut may cost records, but never causes a wrong answer.",
    "power cut, io.durable": "The same for a tier with `io.durable`: what a flush has acknowledged "
    "must be there.",
    "kills, shared path": "Engines of three models share a path; they are started, reset, closed "
    "and killed (SIGKILL) at random. A try is a kill. The bytes below the path are sampled; a "
    "sample over the capacity is taken again with all engines stopped.",
    "long run": "One store puts and gets chunks; every 400 batches the device refuses, "
    "is full, or hangs for 12 batches. A try is such a fault.",
    "vLLM": "A real engine on a CPU with both halves in its process. Every prompt is sent three "
    "times or more while the device is broken, then again when it is healed. A try is an answer "
    "that is compared. The longest call is the longest step of the engine. *healthy*: no fault. "
    "*frozen*: the tier is on a mount whose server is stopped.",
}
"""How each fault is made, by the beginning of its name."""

INTRODUCTION = """\
# Reliability

Made by `scripts/reliability.py`; do not edit. Each number is a sum, or a maximum, over both
backends and all seeds. A fault is injected into a store in use, and healed; every byte that is
loaded is compared.

- *recomputed*: chunks that were stored, but not found; an engine computes them. *retried*: writes
  that failed or did not begin, and are tried again as long as memory has the chunk. *refused*:
  flushes and openings that ended with an error, and chunks that memory did not take.
- *wrong*: wrong chunks or answers. *lost*: chunks that a flush had acknowledged, and that a later
  store did not find. *ended*: processes that died or hung.
- *over quota*: the most bytes below a path beyond its capacity. *memory hit*: the longest load of
  chunks in memory while the device was broken. *call*: the longest call of any kind. *back*: the
  time from the end of the fault until everything is flushed and read again. Times are in seconds,
  and include the load of other programs on the machine.
"""
LONG_RUNS = """\
## Long runs

Memory (without mapped files), descriptors and threads: medians of the first third and of the last
third of the run, after its first fifth. The file backend keeps up to 64 segments open.
"""

STEPS = """\
## Steps of vLLM

Milliseconds of the longest step. *in hooks* is the time in the connector's hooks, so the time that
a tier adds to a step; *waiting* is the part of it without a processor. *later*: steps that began
after the first deadline of a read had passed.
"""

COLUMNS = (
    *("fault", "tries", "recomputed", "retried", "refused", "wrong", "lost", "ended"),
    *("over quota, bytes", "memory hit, s", "call, s", "back, s"),
)
LONG_COLUMNS = (
    *("long run", "backend", "chunk operations", "evicted", "calls struck", "samples"),
    *("over quota, bytes", "memory, MiB", "descriptors", "threads"),
)
STEP_PARTS = ("seconds", "hooks", "hooks_waited")
STEP_COLUMNS = (
    *("fault", "backend", "steps", "longest", "in hooks", "waiting"),
    *("longest, later", "in hooks, later", "waiting, later"),
)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A finding with the conditions of its run."""

    finding: Finding
    conditions: dict[str, Any]


def document_of(kept: Sequence[Kept]) -> str:
    """Return the whole page."""
    found = [one.finding for one in kept]
    by_fault: dict[str, list[Finding]] = {}
    for finding in found:
        by_fault.setdefault(finding.fault, []).append(finding)
    parts = [
        INTRODUCTION,
        _table(COLUMNS, [_row(fault, some) for fault, some in by_fault.items()]),
    ]
    # One that did not end has no facts.
    long_rows = [_long_row(one) for one in found if "memory_bytes" in one.facts]
    if long_rows:
        parts += [LONG_RUNS, _table(LONG_COLUMNS, long_rows)]
    step_rows = [_step_row(one) for one in found if "steps" in one.facts]
    if step_rows:
        parts += [STEPS, _table(STEP_COLUMNS, step_rows)]
    parts += [
        "## How each fault is made\n",
        "".join(f"- **{name}**: {how}\n" for name, how in HOW.items() if _is_in(name, by_fault)),
        "## What went wrong\n",
        _problems(found),
        "## Conditions\n",
        _conditions(kept),
    ]
    return "\n".join(parts)


def _is_in(name: str, faults: Iterable[str]) -> bool:
    return any(fault.partition(",")[0] == name.partition(",")[0] for fault in faults)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(fault: str, found: Sequence[Finding]) -> list[str]:
    sums = ("tries", "recomputed", "retried", "refused", "wrong", "lost", "ended")
    stalls = ("memory_stall_seconds", "stall_seconds", "back_seconds")
    return [
        fault,
        *[f"{sum(getattr(one, name) for one in found):,}" for name in sums],
        f"{max(one.over_quota_bytes for one in found):,}",
        *[_longest([getattr(one, name) for one in found]) for name in stalls],
    ]


def _longest(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{max(known):.2f}" if known else "-"


def _long_row(found: Finding) -> list[str]:
    facts = found.facts
    memory = " → ".join(f"{value / (1 << 20):.1f}" for value in facts["memory_bytes"])
    return [
        found.fault.partition(", ")[2],
        found.backend,
        *[f"{facts[name]:,}" for name in ("chunks", "evicted", "strikes")],
        f"{found.sample_count:,}",
        f"{found.over_quota_bytes:,}",
        memory,
        *[" → ".join(map(str, facts[name])) for name in ("descriptors", "threads")],
    ]


def _step_row(found: Finding) -> list[str]:
    facts = found.facts
    names = [f"{what}{words}" for words in ("", " later") for what in STEP_PARTS]
    return [
        found.fault.partition(", ")[2],
        found.backend,
        f"{facts['steps']:,}",
        *[f"{1000 * facts[name]:.1f}" for name in names],
    ]


def _problems(found: Sequence[Finding]) -> str:
    lines = [
        f"- {one.fault}, {one.backend}: {' '.join(problem.split())[:300]}\n"
        for one in found
        for problem in one.problems
    ]
    if not lines:
        return "Nothing.\n"
    more = [f"- and {len(lines) - PROBLEMS_SHOWN} more\n"] if len(lines) > PROBLEMS_SHOWN else []
    return "".join([*lines[:PROBLEMS_SHOWN], *more])


def _conditions(kept: Sequence[Kept]) -> str:
    """List what is common to all runs, and all values of what is not."""
    names = dict.fromkeys(name for one in kept for name in one.conditions)
    values = {
        name: sorted({str(one.conditions[name]) for one in kept if name in one.conditions})
        for name in names
    }
    return "".join(f"- {name}: {', '.join(some)}\n" for name, some in values.items())
