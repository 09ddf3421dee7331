"""Real vLLM over a device that refuses, is full, hangs, vanishes, or is held by a stopped process.

Goal: right answers all the time, what is in memory is still hit, the engine's steps go on, and the
tier is used again when its device is back, without a restart. Method: one engine with both halves
in its process (`lab`), whose device is told to fail (`device_faults`). One more lies in a directory
whose server is stopped (`fuse_directory`), and others have a broken device when they start.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from device_faults import fault_rules
from fuse_directory import HangingDirectory, why_there_is_none
from lab import run_lab
from scenario import Scenario, tier_config
from step_times import longest
from tiny_models import DTYPES, build_model

pytestmark = pytest.mark.vllm

FAMILY = "llama"
LENGTHS = (320, 500, 900)
DEADLINE_SECONDS = 0.5
STALL_SECONDS_MAX = 5
"""What no step may take even on a busy machine; what it does take is printed."""
OPEN_SECONDS_MAX = 120
"""The same of an engine's start."""
TRIPPED = "tierstore_tier_trips{disk}"
DEMOTED = "tierstore_demoted_chunks{disk}"
FAULTS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "refusing": lambda phase: phase["counts"][TRIPPED] > 0,
    "full": lambda phase: phase["counts"]["tierstore_dropped_demotes{full}"] > 0,
    "hung": lambda phase: phase["counts"][TRIPPED] > 0,
    "vanished": lambda phase: not any(phase["at once"]["cached"]),
    "stopped": lambda phase: not phase["counts"].get(DEMOTED),
    "frozen": lambda phase: phase["counts"][TRIPPED] > 0,
}
"""With what each must leave behind: otherwise there was no fault."""
CASES = [
    (backend, is_frozen, fault)
    for backend in ("file", "lmdb")
    for is_frozen in (False, True)
    for fault in FAULTS
    if (fault == "frozen") == is_frozen
]
"""Of one backend and device, all in one engine."""


def engines_of(backend: str) -> dict[bool, list[str]]:
    """Return the faults of each engine of a backend, by whether it lies in a mount."""
    engines: dict[bool, list[str]] = {}
    for name, is_frozen, fault in CASES:
        if name == backend:
            engines.setdefault(is_frozen, []).append(fault)
    return engines


@dataclass(frozen=True)
class Fault:
    name: str
    phase: dict[str, Any]
    healthy: dict[str, Any]


@contextmanager
def job_over(backend: str, folder: Path, *, is_frozen: bool) -> Iterator[dict[str, Any]]:
    """Yield the job of an engine and its device; `is_frozen`: in a directory that can hang."""
    if is_frozen and why_there_is_none():
        pytest.skip(f"no directory that hangs: {why_there_is_none()}")
    path = build_model(FAMILY, folder)
    switches = folder / "switches"
    switches.mkdir()
    with ExitStack() as stack:
        server = stack.enter_context(HangingDirectory(folder)) if is_frozen else None
        config = tier_config(backend, (server.path if server else folder) / "tier")
        config["secondary"][0]["io"] = {
            "deadline": f"{DEADLINE_SECONDS}s",
            "threads": 2,
            "breaker": {"retry_after": "500ms", "retry_after_max": "2s"},
            "faults": fault_rules(switches),
        }
        yield {
            "model": str(path),
            "dtype": DTYPES[FAMILY],
            "config": config,
            "prompts": [p for p in Scenario(path, DTYPES[FAMILY]).first if len(p) in LENGTHS],
            "switches": str(switches),
            "server": server.process_id if server else None,
        }


def run(backend: str, folder: Path, faults: list[str], *, is_frozen: bool) -> dict[str, Any]:
    with job_over(backend, folder, is_frozen=is_frozen) as job:
        job["phases"] = ["healthy", *faults]
        found = run_lab("device_faults.py", "faults", job, folder)
    report(f"{backend}{' in a mount' if is_frozen else ''}", found, job["phases"])
    return found


def report(title: str, found: dict[str, Any], phases: list[str]) -> None:
    """Print what the longest steps of each phase took, and what the tier added to any."""
    for phase in phases:
        steps = found[phase]["steps"]
        ms = [
            round(1000 * longest(steps, what, since=since), 1)
            for since in (0, DEADLINE_SECONDS)
            for what in ("seconds", "hooks", "hooks_waited")
        ]
        print(
            f"{title}, {phase}: longest step {ms[0]} ms, "
            f"in hooks {ms[1]} ms, of which waiting {ms[2]} ms; "
            f"after the first deadline {ms[3]}, {ms[4]}, {ms[5]} ms; "
            f"used again after {found[phase]['used again after']} s"
        )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    """Run an engine once, for all tests of its faults."""
    done: dict[tuple[str, bool], dict[str, Any]] = {}

    def found(backend: str, *, is_frozen: bool) -> dict[str, Any]:
        if (backend, is_frozen) not in done:
            folder = tmp_path_factory.mktemp("device")
            faults = engines_of(backend)[is_frozen]
            done[backend, is_frozen] = run(backend, folder, faults, is_frozen=is_frozen)
        return done[backend, is_frozen]

    return found


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[2]}")
def fault(request: pytest.FixtureRequest, runs: Any) -> Fault:
    backend, is_frozen, name = request.param
    found = runs(backend, is_frozen=is_frozen)
    return Fault(name, found[name], found["healthy"])


def test_prompts_that_only_the_disk_has_are_hit_while_it_is_healthy(fault: Fault):
    assert fault.healthy["broken"]["tokens"] == fault.healthy["before"]["tokens"]
    assert min(fault.healthy["healed"]["cached"]) > 0


def test_the_fault_is_noticed(fault: Fault):
    assert FAULTS[fault.name](fault.phase)
    assert fault.healthy["counts"][DEMOTED] > 0


def test_answers_are_right_while_the_device_is_broken_and_after(fault: Fault):
    assert fault.phase["broken"]["tokens"] == fault.phase["before"]["tokens"]
    assert fault.phase["healed"]["tokens"] == fault.phase["before"]["tokens"]
    assert set(fault.phase["broken"]["reasons"]) == {"length"}


def test_memory_is_hit_while_the_device_is_broken(fault: Fault):
    assert fault.phase["from memory"]["tokens"] == fault.phase["fresh"]["tokens"]
    assert min(fault.phase["from memory"]["cached"]) > 0


def test_the_tier_is_used_again_without_a_restart(fault: Fault):
    assert fault.phase["used again after"] is not None


def test_the_engine_steps_on(fault: Fault):
    assert longest(fault.phase["steps"], "seconds") < STALL_SECONDS_MAX


def test_steps_do_not_wait_for_the_device(fault: Fault):
    waited = [s["hooks_waited"] for s in fault.phase["steps"] if s["began"] >= DEADLINE_SECONDS]
    assert median(waited) < DEADLINE_SECONDS / 10
    assert sum(waited) < STALL_SECONDS_MAX


def test_nothing_leaks(fault: Fault):
    assert fault.phase["problems"] == []


@pytest.mark.parametrize(
    ("backend", "fault_name"),
    [("file", "hung"), ("lmdb", "refusing"), ("file", "frozen"), ("lmdb", "frozen")],
)
def test_an_engine_starts_over_a_broken_device_and_uses_it_later(
    backend: str, fault_name: str, tmp_path: Path
):
    is_frozen = fault_name == "frozen"
    with job_over(backend, tmp_path, is_frozen=is_frozen) as job:
        job["begins"] = fault_name
        job["phases"] = ["begun_broken"]
        found = run_lab("device_faults.py", "begun", job, tmp_path)
    assert found["opened after"] < OPEN_SECONDS_MAX
    phase = found["begun_broken"]
    assert phase["state"] == 2
    assert phase["broken"]["tokens"] == found["cold"]["tokens"]
    assert min(phase["from memory"]["cached"]) > 0
    assert phase["from memory"]["tokens"] == found["cold"]["tokens"]
    assert phase["used again after"] is not None
    assert phase["healed"]["tokens"] == found["cold"]["tokens"]
    assert phase["healed state"] == 0
    assert phase["problems"] == []
