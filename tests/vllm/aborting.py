"""Aborts requests at every stage of their life: `python aborting.py job result`.

The job names a model, its dtype, a tierstore configuration and prompts; all in this one process, so
that the connector's own check can be asked. The result says whether the answers stayed the same and
what the checks found.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from slow import SlowConnector

_STEPS_MAX = 14
_IDLE_STEPS_MAX = 4000


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    SlowConnector.steps_per_answer = 5
    job = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(
        job["model"],
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=4096,
        block_size=32,
        seed=0,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="SlowConnector",
            kv_connector_module_path="slow",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"tierstore.config": job["config"]},
        ),
    )
    sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
    inputs = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    cold = answers(llm.generate(inputs, sampling, use_tqdm=False))
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    half = scheduler.connector._scheduler
    problems: list[str] = []
    waiting_for_load = 0
    for step_count in range(_STEPS_MAX):
        reset(llm)
        names = [f"{step_count}-{i}" for i in range(len(inputs))]
        for name, prompt in zip(names, inputs, strict=True):
            llm.llm_engine.add_request(name, prompt, sampling)
        for _ in range(step_count):
            llm.llm_engine.step()
        states = [str(request.status) for request in scheduler.requests.values()]
        waiting_for_load += sum("WAITING_FOR_REMOTE_KVS" in state for state in states)
        llm.llm_engine.abort_request(list(names))
        for _ in range(_IDLE_STEPS_MAX):
            llm.llm_engine.step()
            if not scheduler.requests and not half.has_work():
                break
            time.sleep(0.0005)  # an empty step takes no time, a write on a busy disk does
        else:
            problems.append(f"after {step_count} steps: {len(scheduler.requests)} requests stay")
        problems += half.check()
    reset(llm)
    outputs = llm.generate(inputs, sampling, use_tqdm=False)
    result = {
        "same": answers(outputs) == cold,
        "cached": [output.num_cached_tokens for output in outputs],
        "aborted_while_loading": waiting_for_load,
        "problems": problems,
    }
    Path(sys.argv[2]).write_text(json.dumps(result))
    llm.llm_engine.engine_core.shutdown()


def answers(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def reset(llm: Any) -> None:
    for _ in range(100):
        if llm.reset_prefix_cache():
            return
        time.sleep(0.02)
    raise RuntimeError("the engine's prefix cache cannot be reset: blocks leaked")


if __name__ == "__main__":
    main()
