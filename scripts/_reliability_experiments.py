"""The experiments of `reliability.py`, and how their output becomes findings: rows of the table."""

import json
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["PARTS", "Experiment", "Finding", "experiments_of"]

ROOT = Path(__file__).resolve().parent.parent
FAULTS = ROOT / "tests" / "faults" / "support"
BACKENDS = ("file", "lmdb")
ENDURED = (
    "none",
    "EIO",
    "ENOSPC",
    "EROFS",
    "slow",
    "hung calls",
    "hung mount",
    "full",
    "vanished",
    "stopped",
    "RLIMIT_NOFILE",
    "RLIMIT_FSIZE",
)
CAMPAIGNS = {
    "damage": "damaged files",
    "calls": "random calls fail",
    "crash": "kill or power cut at any write",
    "cut": "power cut, io.durable",
}
LONG_ON = {"ext4": "ext4", "tmpfs": "tmpfs", "tmpfs-huge": "punches that free nothing"}
VLLM = """
import json, sys
from pathlib import Path
from test_device_faults import DEADLINE_SECONDS, engines_of, run
found = {"deadline": DEADLINE_SECONDS, "phases": []}
for is_frozen, faults in engines_of(sys.argv[1]).items():
    folder = Path(sys.argv[2]) / str(is_frozen)
    folder.mkdir()
    answers = run(sys.argv[1], folder, faults, is_frozen=is_frozen)
    names = [*faults] if is_frozen else ["healthy", *faults]
    found["phases"] += [(name, answers[name]) for name in names]
print(json.dumps(found))
"""
"""Runs the lab of `tests/vllm/support/device_faults.py`: real engines, all phases."""


@dataclass(kw_only=True)
class Finding:
    """The result of one experiment."""

    fault: str
    backend: str
    tries: int = 1
    recomputed: int = 0
    retried: int = 0
    refused: int = 0
    wrong: int = 0
    lost: int = 0
    ended: int = 0
    """Processes that died or hung."""
    over_quota_bytes: int = 0
    sample_count: int = 0
    """How often the bytes below the path were measured."""
    memory_stall_seconds: float | None = None
    stall_seconds: float | None = None
    back_seconds: float | None = None
    problems: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """Further facts for the tables."""


Reader = Callable[[list[str]], list[Finding]]
"""Turns the lines that a process printed into findings; raises if it cannot."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One process to run."""

    part: str
    fault: str
    backend: str
    arguments: tuple[str, ...]
    """Arguments of the interpreter; `{folder}` stands for an empty folder."""
    seconds_max: float
    read: Reader

    @property
    def name(self) -> str:
        """Identifies experiment and options: a later run of the same replaces its findings."""
        return " ".join((self.part, self.fault, self.backend, *self.arguments[1:]))


def experiments_of(part: str, *, is_quick: bool, seed: int) -> Iterable[Experiment]:
    """Return the experiments of a part."""
    return PARTS[part](is_quick, seed)


def _endurance(is_quick: bool, seed: int) -> Iterator[Experiment]:  # noqa: FBT001
    script = str(FAULTS / "endurance.py")
    for fault in ENDURED:
        for backend in BACKENDS:
            for number in range(seed, seed + (1 if is_quick else 3)):
                options = ["--backend", backend, "--seed", str(number)]
                options += ["--broken-seconds", "1.5" if is_quick else "4"]
                yield Experiment(
                    part="endurance",
                    fault=fault,
                    backend=backend,
                    arguments=(script, fault, *options),
                    seconds_max=600,
                    read=_read_endurance,
                )


def _read_endurance(lines: list[str]) -> list[Finding]:
    outcome = json.loads(lines[-1])
    same = ("fault", "backend", "recomputed", "retried", "refused", "wrong", "lost", "sample_count")
    stalls = ("over_quota_bytes", "memory_stall_seconds", "stall_seconds", "problems")
    found = Finding(**{name: outcome[name] for name in (*same, *stalls)})
    found.back_seconds = outcome["back_seconds"] if outcome["is_back"] else None
    found.ended = outcome["problems"].count("a call hangs")
    found.facts = {"acknowledged": outcome["acknowledged"], "loads": outcome["loads"]}
    return [found]


def _campaigns(kind: str) -> Callable[[bool, int], Iterator[Experiment]]:
    counts = {"damage": (40, 5000), "calls": (12, 1000), "crash": (30, 500), "cut": (20, 250)}

    def make(is_quick: bool, seed: int) -> Iterator[Experiment]:  # noqa: FBT001
        count = counts[kind][0 if is_quick else 1]
        for backend in BACKENDS:
            options = ["--count", str(count), "--first", str(seed), "--jobs", "2"]
            yield Experiment(
                part=kind,
                fault=CAMPAIGNS[kind],
                backend=backend,
                arguments=(
                    str(FAULTS / "campaign.py"),
                    f"{kind}-{backend}",
                    *options,
                    "--folder",
                    "{folder}",
                ),
                seconds_max=900 if is_quick else 4 * 3600,
                read=_read_campaign,
            )

    return make


def _read_campaign(lines: list[str]) -> list[Finding]:
    outcome = json.loads("\n".join(lines))
    kind, _, backend = outcome["kind"].partition("-")
    counts = outcome["counts"]
    words = {"wrong": "wrong bytes", "over_quota_bytes": "over quota"}
    names = ("tries", "recomputed", "retried", "refused", "lost", *words)
    problems = [
        f"seed {failure['seed']}: {str(problem)[-300:]}"
        for failure in outcome["failures"]
        for problem in failure["problems"]
    ]
    return [
        Finding(
            fault=CAMPAIGNS[kind],
            backend=backend,
            **{name: counts.get(words.get(name, name), 0) for name in names},
            ended=counts.get("crashes", 0) + counts.get("hangs", 0),
            stall_seconds=outcome["longest_stall_seconds"],
            problems=problems,
            facts={"failed": counts.get("failed", 0)},
        )
    ]


def _shared(is_quick: bool, seed: int) -> Iterator[Experiment]:  # noqa: FBT001
    for backend in BACKENDS:
        engines = ["4"] if is_quick else ["2", "4", "8"]
        kills, seconds = ("10", "10") if is_quick else ("250", "180")
        options = ["--backend", backend, "--seed", str(seed), "--kills", kills]
        yield Experiment(
            part="shared",
            fault="kills, shared path",
            backend=backend,
            arguments=(
                str(FAULTS / "shared_path.py"),
                *options,
                "--seconds",
                seconds,
                "--engines",
                *engines,
            ),
            seconds_max=900 if is_quick else 5400,
            read=_read_shared,
        )


def _read_shared(lines: list[str]) -> list[Finding]:
    return [
        Finding(
            fault="kills, shared path",
            backend=tally["backend"],
            tries=tally["kills"],
            sample_count=tally["samples"],
            facts={name: tally[name] for name in ("engines", "starts", "hits", "bytes_max")},
        )
        for tally in (json.loads(line) for line in lines if line.startswith("{"))
    ]


def _long(is_quick: bool, seed: int) -> Iterator[Experiment]:  # noqa: FBT001
    size = ["--chunks", "60000", "--fault-every", "60"] if is_quick else ["--chunks", "1000000"]
    for kind, words in LONG_ON.items():
        for backend in BACKENDS:
            options = ["--backend", backend, "--seed", str(seed), *size, "--file-system", kind]
            yield Experiment(
                part="long",
                fault=f"long run, {words}",
                backend=backend,
                arguments=(str(FAULTS / "long_run.py"), "{folder}", *options),
                seconds_max=900 if is_quick else 3600,
                read=_read_long,
            )


def _read_long(lines: list[str]) -> list[Finding]:
    seen = json.loads(lines[-1])
    names = ("backend", "recomputed", "retried", "refused", "over_quota_bytes", "sample_count")
    found = Finding(
        fault=f"long run, {LONG_ON[seen['file_system']]}",
        tries=seen["faults"],
        **{name: seen[name] for name in (*names, "stall_seconds")},
        problems=seen["problems"],
        facts={name: seen[name] for name in ("chunks", "evicted", "strikes", "seconds")},
    )
    found.wrong = sum("wrong bytes" in problem for problem in seen["problems"])
    if not seen["is_back"]:
        found.problems = [*found.problems, "the tier is not used again"]
    for name in ("memory_bytes", "descriptors", "threads"):
        third = len(seen[name]) // 3
        thirds = (sorted(seen[name][:third]), sorted(seen[name][-third:]))
        found.facts[name] = [values[third // 2] for values in thirds]
    return [found]


def _vllm(is_quick: bool, seed: int) -> Iterator[Experiment]:  # noqa: FBT001
    del seed
    for backend in BACKENDS[: 1 if is_quick else 2]:
        yield Experiment(
            part="vllm",
            fault="vLLM",
            backend=backend,
            arguments=("-c", VLLM, backend, "{folder}"),
            seconds_max=1800,
            read=_vllm_reader(backend),
        )


def _vllm_reader(backend: str) -> Reader:
    def read(lines: list[str]) -> list[Finding]:
        found = json.loads(lines[-1])
        return [
            _vllm_phase(name, backend, phase, found["deadline"]) for name, phase in found["phases"]
        ]

    return read


def _vllm_phase(name: str, backend: str, phase: dict[str, Any], deadline: float) -> Finding:
    before = phase["before"]["tokens"]
    pairs = [(phase["broken"]["tokens"], before), (phase["healed"]["tokens"], before)]
    pairs.append((phase["from memory"]["tokens"], phase["fresh"]["tokens"]))
    answers = [pair for ours, right in pairs for pair in zip(ours, right, strict=True)]
    back = phase["used again after"]
    steps = phase["steps"]
    found = Finding(
        fault=f"vLLM, {name}",
        backend=backend,
        tries=len(answers),
        recomputed=sum(cached == 0 for cached in phase["broken"]["cached"]),
        wrong=sum(ours != right for ours, right in answers),
        stall_seconds=max(step["seconds"] for step in steps),
        back_seconds=back,
        problems=[str(problem) for problem in phase["problems"]],
        facts={
            "steps": len(steps),
            **{
                f"{what}{words}": max(step[what] for step in steps if step["began"] >= since)
                for what in ("seconds", "hooks", "hooks_waited")
                for words, since in (("", 0), (" later", deadline))
            },
        },
    )
    if back is None:
        found.problems.append("the tier is not used again")
    if not all(phase["from memory"]["cached"]):
        found.problems.append("memory was not hit")
    return found


PARTS: dict[str, Callable[[bool, int], Iterator[Experiment]]] = {
    "endurance": _endurance,
    **{kind: _campaigns(kind) for kind in CAMPAIGNS},
    "shared": _shared,
    "long": _long,
    "vllm": _vllm,
}
"""By name: makes the experiments of a part."""

_PYTEST = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
PYTHONPATH = [
    *(ROOT / name for name in _PYTEST["pythonpath"]),
    *(Path(path) for path in sys.path if path.endswith("site-packages")),
]
"""Of every process: what tests import from, and the lab of vLLM."""
