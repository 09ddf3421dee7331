"""Aborts requests at every stage of their life, in an engine whose halves are in this process."""

import time
from collections import Counter
from typing import Any

from leaks import find_leaks
from slow import SlowConnector

__all__ = ["ABORT_STEPS_MAX", "abort_after"]

ABORT_STEPS_MAX = 14
"""After as many steps all requests have loaded, computed and begun to answer."""
_STEPS_PER_ANSWER = 5
_IDLE_STEPS_MAX = 4000


def abort_after(step_count: int, llm: Any, inputs: list[Any], sampling: Any) -> Counter[str]:
    """Abort a batch after some steps, with slow loads; count how many requests were at which stage.

    Raises if a request, a pin or a job stays behind.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    half = scheduler.connector._scheduler
    SlowConnector.steps_per_answer = _STEPS_PER_ANSWER
    names = [f"aborted-{step_count}-{i}" for i in range(len(inputs))]
    for name, prompt in zip(names, inputs, strict=True):
        engine.add_request(name, prompt, sampling)
    for _ in range(step_count):
        engine.step()
    stages = Counter(_stage(request) for request in scheduler.requests.values())
    engine.abort_request(names)
    for _ in range(_IDLE_STEPS_MAX):
        engine.step()
        if not scheduler.requests and not half.has_work():
            break
        time.sleep(0.0005)  # an empty step takes no time, a write on a busy disk does
    problems = find_leaks(half, get_kv_transfer_group()._worker)
    if scheduler.requests:
        problems.append(f"{len(scheduler.requests)} requests stay")
    if problems:
        raise RuntimeError(f"after {step_count} steps and an abort: {'; '.join(problems)}")
    SlowConnector.steps_per_answer = 1
    return stages


def _stage(request: Any) -> str:
    status = request.status.name
    if status == "RUNNING":
        return "decoding" if request.num_output_tokens else "computing"
    return "loading" if status == "WAITING_FOR_REMOTE_KVS" else "waiting"
