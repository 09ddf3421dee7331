"""How long an engine's steps take, and what of that they spend in the hooks of the connector.

A step without a tier is the same step without these hooks, so what they take is what a tier adds.
On a busy machine that says little; what they *wait* for, apart from a processor, does.
"""

import functools
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lab import Lab

from tierstore_vllm import TierStoreConnector

__all__ = ["longest", "timed_steps"]

_HOOKS = [
    name
    for name, member in vars(TierStoreConnector).items()
    if inspect.isfunction(member) and not name.startswith("_")
]


@dataclass
class _Step:
    """Seconds, from the beginning of the watch."""

    began: float
    seconds: float = 0
    waited: float = 0
    hooks: float = 0
    """Of `seconds`, those in hooks of both halves."""
    hooks_waited: float = 0
    """Of `waited`, those in hooks."""


@contextmanager
def timed_steps(lab: Lab) -> Iterator[list[dict[str, float]]]:
    """Fill a list with what the engine's steps in the block took; see `_Step`."""
    steps: list[dict[str, float]] = []
    core = lab.engine.engine_core.engine_core
    first_at = time.perf_counter()
    current = _Step(0)

    def note_hook(seconds: float, waited: float) -> None:
        current.hooks += seconds
        current.hooks_waited += waited

    def note_step(seconds: float, waited: float) -> None:
        nonlocal current
        current.seconds, current.waited = seconds, waited
        steps.append(asdict(current))
        current = _Step(time.perf_counter() - first_at)

    with ExitStack() as undo:
        undo.enter_context(patch.object(core, "step_fn", _timed(core.step_fn, note_step)))
        for connector in (lab.connector, lab.worker_connector):
            for name in _HOOKS:
                timed = _timed(getattr(connector, name), note_hook)
                undo.enter_context(patch.object(connector, name, timed))
        yield steps


def longest(steps: list[dict[str, float]], what: str, *, since: float = 0) -> float:
    """Return the largest of one field among the steps that began so late."""
    return max(step[what] for step in steps if step["began"] >= since)


def _timed(call: Callable[..., Any], note: Callable[[float, float], None]) -> Callable[..., Any]:
    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began_at, ran_before = time.perf_counter(), _processor_seconds()
        try:
            return call(*args, **kwargs)
        finally:
            seconds = time.perf_counter() - began_at
            note(seconds, max(0.0, seconds - (_processor_seconds() - ran_before)))

    return timed


def _processor_seconds() -> float:
    """Return how long this thread has run, or has been ready to run, so far."""
    _, was_ready, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return time.thread_time() + int(was_ready) / 1e9
