"""What happens to the device below a running engine: `python device_faults.py job result`.

Every phase asks prompts that only the disk has, and new ones, while the device is broken; then
heals it and waits until the tier is used again. How long the engine's steps took is noted.

The device is broken by the rules of `fault_rules`, each of which has a switch: a file. They hold in
every process that has the tier open. See `lab`.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lab import Lab, main, read_job
from step_times import timed_steps

__all__ = ["fault_rules"]

_USED_AGAIN_SECONDS_MAX = 120
_ROUNDS = 3
_BROKEN_SECONDS_MIN = 1.0
"""Prompts are asked so often while the device is broken, and for so long: well past the deadline
of a read."""

_FULL = ["pwritev", "allocate", "database.commit"]
"""The calls that a full device refuses."""


def fault_rules(folder: Path) -> list[dict[str, Any]]:
    """Return what `io.faults` must say; the switches are in `folder`."""
    return [
        {"kind": "error", "switch": str(folder / "refusing")},
        {"kind": "error", "error": "ENOSPC", "calls": _FULL, "switch": str(folder / "full")},
        {"kind": "hang", "switch": str(folder / "hung")},
    ]


def healthy(lab: Lab) -> dict[str, Any]:
    """The same questions with nothing wrong: what the others are compared with."""
    return _endure(lab, 1, begin=lambda: None, end=lambda: None)


def refusing(lab: Lab) -> dict[str, Any]:
    return _switched(lab, 2, "refusing")


def full(lab: Lab) -> dict[str, Any]:
    return _switched(lab, 3, "full")


def hung(lab: Lab) -> dict[str, Any]:
    return _switched(lab, 4, "hung")


def vanished(lab: Lab) -> dict[str, Any]:
    """The directory is removed; the tier may make it anew of its own accord."""
    return _endure(lab, 5, begin=lambda: shutil.rmtree(lab.tier_path), end=lambda: None)


def stopped(lab: Lab) -> dict[str, Any]:
    """Another process, which shares the path, stops within a transaction of the catalog."""
    holder = ExitStack()

    def begin() -> None:
        process = holder.enter_context(_holder(lab.tier_path / "catalog"))
        process.send_signal(signal.SIGSTOP)

    with holder:
        return _endure(lab, 6, begin=begin, end=holder.close)


def frozen(lab: Lab) -> dict[str, Any]:
    """The server of the directory that the tier lies in is stopped: calls hang in the kernel."""
    return _endure(lab, 7, begin=lambda: _begin(lab.job, "frozen"), end=lambda: _end(lab.job))


def begun_broken(lab: Lab) -> dict[str, Any]:
    """The device was broken before the engine started."""
    found: dict[str, Any] = {"state": lab.metrics()["tierstore_tier_state"]}
    found["broken"] = lab.ask(lab.prompts)
    lab.llm.reset_prefix_cache()
    found["from memory"] = lab.ask(lab.prompts)
    _end(lab.job)
    found["used again after"] = _seconds_until_used(lab, 70)
    found["healed state"] = lab.metrics()["tierstore_tier_state"]
    found["healed"] = lab.ask(lab.prompts)
    return found


def _switched(lab: Lab, number: int, fault: str) -> dict[str, Any]:
    return _endure(lab, number, begin=lambda: _begin(lab.job, fault), end=lambda: _end(lab.job))


def _begin(job: dict[str, Any], fault: str) -> None:
    """Break the device, for every process that uses it."""
    if fault == "frozen":
        os.kill(job["server"], signal.SIGSTOP)
    else:
        (Path(job["switches"]) / fault).touch()


def _end(job: dict[str, Any]) -> None:
    """Mend it."""
    for switch in Path(job["switches"]).iterdir():
        switch.unlink()
    if job["server"] is not None:
        os.kill(job["server"], signal.SIGCONT)


def _endure(
    lab: Lab, number: int, *, begin: Callable[[], None], end: Callable[[], None]
) -> dict[str, Any]:
    kept = [[30 + number, *prompt] for prompt in lab.prompts]
    fresh = [[50 + number, *prompt] for prompt in lab.prompts]
    found: dict[str, Any] = {"before": lab.ask(kept)}
    _empty_memory(lab)
    before = lab.metrics()
    begin()
    with timed_steps(lab) as found["steps"]:
        until = time.monotonic() + _BROKEN_SECONDS_MIN
        rounds = 0
        while rounds < _ROUNDS or time.monotonic() < until:
            rounds += 1
            found["broken"] = lab.ask(kept)
            found.setdefault("at once", found["broken"])
            found["fresh"] = lab.ask(fresh)
            lab.llm.reset_prefix_cache()
            found["from memory"] = lab.ask(fresh)
            lab.llm.reset_prefix_cache()
            lab.half._stack.primary.clear()
    found["counts"] = _changes(before, lab.metrics())
    end()
    found["used again after"] = _seconds_until_used(lab, 70 + number)
    found["healed"] = lab.ask(kept)
    return found


def _changes(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before.get(name, 0) for name in after}


def _seconds_until_used(lab: Lab, number: int) -> float | None:
    """Ask until prompts that were computed after the healing come from the disk."""
    began_at = time.monotonic()
    attempt = 0
    while time.monotonic() - began_at < _USED_AGAIN_SECONDS_MAX:
        attempt += 1
        prompt = [number, 3 + attempt % 250, *lab.prompts[-1]]
        expected = lab.ask([prompt])
        _empty_memory(lab)
        answer = lab.ask([prompt])
        assert answer["tokens"] == expected["tokens"]
        if answer["cached"][0] > 0:
            return time.monotonic() - began_at
        time.sleep(0.2)
    return None


def _empty_memory(lab: Lab) -> None:
    """Leave what the tier should have to the tier; some of it may hang there."""
    until = time.monotonic() + 5
    while lab.half.has_work() and time.monotonic() < until:
        lab.engine.step()
        time.sleep(0.0005)
    lab.llm.reset_prefix_cache()
    lab.half._stack.primary.clear()


@contextmanager
def _holder(catalog: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a process that holds the write transaction of a catalog until it is killed."""
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tierstore.lmdb_env.env import LmdbEnv\n"
        "env = LmdbEnv.open(Path(sys.argv[1]), map_bytes=1 << 38)\n"
        "with env.write():\n"
        "    print('held', flush=True)\n"
        "    time.sleep(1000)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(catalog)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    job = read_job()
    if "begins" in job:
        _begin(job, job["begins"])
    faults = (refusing, full, hung, vanished, stopped, frozen)
    main({phase.__name__: phase for phase in (healthy, *faults, begun_broken)})
