"""One engine of `bench_vllm.py`: stays alive and answers requests, one JSON object per line.

    python scripts/bench/vllm_engine.py '{"engine": {...}, "transfer": {...} or null}'

A request names `prompts` (token ids), `max_tokens`, and whether to `reset` the engine's own prefix
cache first; the answer says what `Generated` says. The end of standard input ends the engine.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM

RESET_ATTEMPTS_MAX = 100

__all__ = ["Generated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What one batch of prompts brought."""

    seconds: float
    first_token_seconds: list[float]
    """Per prompt, from its arrival."""
    token_ids: list[list[int]]
    cached_tokens: dict[str, int]
    """Prompt tokens that were not computed, by the source that vLLM reports."""
    loaded_bytes: int
    """What tierstore copied from host memory into the engine's blocks."""


def main() -> None:
    """Serve standard input until it ends."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    # vLLM and its children print to standard output; answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.loads(sys.argv[1])
    transfer = KVTransferConfig(**job["transfer"]) if job["transfer"] else None
    llm = LLM(
        kv_transfer_config=transfer,
        seed=0,
        disable_log_stats=False,
        skip_tokenizer_init=True,
        enforce_eager=True,
        **job["engine"],
    )
    generate(llm, [[1] * 64], 4)  # what the first request pays for, no measured one should
    print(json.dumps({}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["reset"]:
            reset(llm)
        generated = generate(llm, request["prompts"], request["max_tokens"])
        print(json.dumps(asdict(generated)), file=answers, flush=True)
    llm.llm_engine.engine_core.shutdown()


def generate(llm: "LLM", prompts: list[list[int]], max_tokens: int) -> Generated:
    """Generate for all prompts at once, as the engine schedules them."""
    from vllm import SamplingParams

    before = counters(llm)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    start = time.perf_counter()
    outputs = llm.generate(inputs, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    counted = {name: value - before.get(name, 0) for name, value in counters(llm).items()}
    loaded_bytes = counted.pop("loaded_bytes", 0)
    return Generated(
        seconds=seconds,
        first_token_seconds=[output.metrics.first_token_latency for output in outputs],
        token_ids=[list(output.outputs[0].token_ids) for output in outputs],
        cached_tokens=counted,
        loaded_bytes=loaded_bytes,
    )


def counters(llm: "LLM") -> dict[str, int]:
    """Return vLLM's count of cached prompt tokens by source, and the bytes tierstore loaded."""
    sums: dict[str, int] = {}
    metric: Any
    for metric in llm.get_metrics():
        if metric.name == "vllm:prompt_tokens_cached_by_source":
            source = metric.labels["source"]
            sums[source] = sums.get(source, 0) + int(metric.value)
        elif metric.name == "vllm:tierstore_loaded_bytes":
            sums["loaded_bytes"] = sums.get("loaded_bytes", 0) + int(metric.value)
    return sums


def reset(llm: "LLM") -> None:
    """Empty the engine's own prefix cache; blocks that are being offloaded may take a moment."""
    for _ in range(RESET_ATTEMPTS_MAX):
        if llm.reset_prefix_cache():
            return
        time.sleep(0.05)
    raise RuntimeError("vLLM still holds blocks although no request runs")


if __name__ == "__main__":
    main()
