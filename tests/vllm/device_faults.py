"""What happens to the device below a running engine: `python device_faults.py job result`.

Every phase asks prompts that only the disk has, and new ones, while the device is broken; then
heals it and waits until the tier is used again. How long the engine's steps took is noted.
See `lab`.
"""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from controlled_device import ControlledDevice
from lab import Lab, main

import tierstore.faults

_DEVICE = ControlledDevice()
_USED_AGAIN_SECONDS_MAX = 120
_ROUNDS = 3
"""How often prompts are asked while the device is broken."""


def healthy(lab: Lab) -> dict[str, Any]:
    """The same questions with nothing wrong: what the others are compared with."""
    return _endure(lab, 1, begin=lambda: None, end=lambda: None)


def refusing(lab: Lab) -> dict[str, Any]:
    return _endure(lab, 2, begin=lambda: _DEVICE.fail(errno.EIO), end=_DEVICE.heal)


def full(lab: Lab) -> dict[str, Any]:
    return _endure(lab, 3, begin=lambda: _DEVICE.fail(errno.ENOSPC), end=_DEVICE.heal)


def hung(lab: Lab) -> dict[str, Any]:
    return _endure(lab, 4, begin=_DEVICE.hang, end=_DEVICE.heal)


def vanished(lab: Lab) -> dict[str, Any]:
    return _endure(lab, 5, begin=lambda: shutil.rmtree(lab.tier_path), end=lab.tier_path.mkdir)


def stopped(lab: Lab) -> dict[str, Any]:
    """Another process, which shares the path, stops within a transaction of the catalog."""
    with _holder(lab.tier_path / "catalog") as process:
        return _endure(
            lab,
            6,
            begin=lambda: process.send_signal(signal.SIGSTOP),
            end=process.kill,
        )


def _endure(
    lab: Lab, number: int, *, begin: Callable[[], None], end: Callable[[], None]
) -> dict[str, Any]:
    kept = [[30 + number, *prompt] for prompt in lab.prompts]
    fresh = [[50 + number, *prompt] for prompt in lab.prompts]
    found: dict[str, Any] = {"counts": {}, "before": lab.ask(kept), "steps": {}}
    _empty_memory(lab)
    with _timed_steps(lab) as steps:
        begin()
        for _ in range(_ROUNDS):
            found["broken"] = lab.ask(kept)
            found["fresh"] = lab.ask(fresh)
            lab.llm.reset_prefix_cache()
            found["from memory"] = lab.ask(fresh)
            lab.llm.reset_prefix_cache()
            lab.half._stack.primary.clear()
    found["steps"]["broken"] = steps
    end()
    found["used again after"] = _seconds_until_used(lab, 70 + number)
    found["healed"] = lab.ask(kept)
    return found


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
def _timed_steps(lab: Lab) -> Iterator[list[float]]:
    """Fill a list with the seconds of the engine's steps."""
    steps: list[float] = []
    core = lab.engine.engine_core.engine_core
    step = core.step_fn

    def timed() -> Any:
        began_at = time.perf_counter()
        try:
            return step()
        finally:
            steps.append(time.perf_counter() - began_at)

    core.step_fn = timed
    try:
        yield steps
    finally:
        core.step_fn = step


@contextmanager
def _holder(catalog: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a process that holds the write transaction of a catalog until it is killed."""
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tierstore.lmdb_env import LmdbEnv\n"
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
    # Both halves ask for their device when they are opened, which `main` does.
    tierstore.faults.SYSTEM = _DEVICE
    main({phase.__name__: phase for phase in (healthy, refusing, full, hung, vanished, stopped)})
