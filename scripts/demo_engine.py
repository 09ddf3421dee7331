"""One process of the demo: runs vLLM on a job file and writes its observations to a result file.

    python scripts/demo_engine.py JOB.json RESULT.json

Each engine has its own process, so that hits of the next one can only come from disk.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

SOURCES = ("device", "host", "disk")
HIT_METRIC = "vllm:prompt_tokens_cached_by_source"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of one prompt."""

    turn: int
    prompt_tokens: int
    cached_tokens: dict[str, int]
    """By the source that vLLM reports."""
    first_token_seconds: float
    token_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The job of one process."""

    engine: dict[str, Any]
    """Arguments of `vllm.LLM`."""
    tierstore_config: str | None
    openings: list[list[int]]
    """The first prompt of each conversation."""
    additions: list[list[list[int]]]
    """What each conversation adds after each answer, turn by turn."""
    answers: list[list[list[int]]] | None
    """The answers that the conversations go on with; None: those of the first pass."""
    answer_tokens: int
    passes: list[dict[str, Any]]
    """`name`, and `emptied`: the turns before which the GPU's prefix cache is emptied."""


def main() -> None:
    """Run the job named on the command line."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    transfer = None
    if job.tierstore_config:
        transfer = KVTransferConfig(
            kv_connector="TierStoreConnector",
            kv_connector_module_path="tierstore_vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"tierstore.config": job.tierstore_config},
        )
    llm = LLM(kv_transfer_config=transfer, seed=0, disable_log_stats=False, **job.engine)
    ask(llm, [1] * 64, 4)  # what the first request pays for, no later one should
    answers, passes = job.answers, {}
    for one in job.passes:
        seen = run_pass(llm, job, answers, one["emptied"])
        answers = answers or by_turn(seen, len(job.openings))
        passes[one["name"]] = [asdict(answer) for answer in seen]
    result = {
        "passes": passes,
        "answers": answers,
        "block_tokens": llm.llm_engine.vllm_config.cache_config.block_size,
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


def run_pass(
    llm: LLM, job: Job, answers: list[list[list[int]]] | None, emptied: list[int]
) -> list[Answer]:
    """Ask every turn of every conversation, turn by turn, one request at a time."""
    prompts, seen = [list(opening) for opening in job.openings], []
    for turn in range(len(job.additions) + 1):
        if turn in emptied:
            empty_prefix_cache(llm)
        for number, prompt in enumerate(prompts):
            answer = ask(llm, prompt, job.answer_tokens, turn)
            seen.append(answer)
            if turn < len(job.additions):
                said = answers[turn][number] if answers else answer.token_ids
                prompt.extend(said + job.additions[turn][number])
    return seen


def ask(llm: LLM, prompt: list[int], answer_tokens: int, turn: int = 0) -> Answer:
    """Generate one answer and note where its prompt's KV came from."""
    before = cached_tokens(llm)
    sampling = SamplingParams(temperature=0.0, max_tokens=answer_tokens, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
    after = cached_tokens(llm)
    return Answer(
        turn=turn,
        prompt_tokens=len(prompt),
        cached_tokens={source: after[source] - before[source] for source in after},
        first_token_seconds=output.metrics.first_token_latency,
        token_ids=list(output.outputs[0].token_ids),
    )


def cached_tokens(llm: LLM) -> dict[str, int]:
    """Return vLLM's own count of prompt tokens that were not computed, by source, so far."""
    sums = dict.fromkeys(SOURCES, 0)
    for metric in llm.get_metrics():
        if metric.name == HIT_METRIC:
            source = metric.labels["source"]
            sums[source] = sums.get(source, 0) + int(metric.value)
    return sums


def empty_prefix_cache(llm: LLM) -> None:
    """Empty the GPU's prefix cache, but not tierstore."""
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM still holds blocks although no request runs")


def by_turn(seen: list[Answer], conversation_count: int) -> list[list[list[int]]]:
    """Group the answers of a pass by turn."""
    tokens = [answer.token_ids for answer in seen]
    return [
        tokens[first : first + conversation_count]
        for first in range(0, len(tokens), conversation_count)
    ]


if __name__ == "__main__":
    main()
