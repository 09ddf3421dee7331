"""Ways to schedule that change what a step computes: the same answers and the same hits.

Goal: speculative decoding, prompts computed in pieces, scheduling that waits for each step, and
chunks of several blocks change nothing.
Method: per way one engine without and one with tierstore.
"""

from pathlib import Path
from typing import Any

import pytest
from engine import Round, run_engine
from scenario import ANSWER_TOKENS, Scenario, assert_same_answers

pytestmark = pytest.mark.vllm

NOISE = 1e-3
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
CHUNK_BLOCKS = 4


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    from tiny_models import DTYPES, build_model

    path = build_model("llama", tmp_path_factory.mktemp("models"))
    return Scenario(path, DTYPES["llama"], 32)


def run_both(
    scenario: Scenario, folder: Path, engine: dict[str, Any], offload: dict[str, Any]
) -> dict[str, list[int]]:
    """Compare both engines' answers; return the cached tokens per round."""
    prompts = [prompt for prompt in scenario.first if len(prompt) >= 129]
    # Prompts that repeat themselves, so that guesses from the prompt are right now and then.
    prompts += [prompt[:40] * 6 for prompt in prompts[:3]]
    more = [[3, 4, 5] * 10 for _ in prompts]
    rounds = {
        "cold": Round(prompts=prompts, max_tokens=ANSWER_TOKENS),
        "warm": Round(prompts=prompts, max_tokens=ANSWER_TOKENS),
        "second turn": Round(prompts=more, continues="cold"),
    }
    config = {"version": 1, "primary": {"capacity": "96MiB"}, "offload": offload}
    reference = run_engine(scenario.job(rounds, engine=engine), folder)
    result = run_engine(scenario.job(rounds, engine=engine, config=config), folder)
    for name in rounds:
        assert_same_answers(result, name, reference, name, NOISE)
    assert result.metrics.get("tierstore_failed_loads", 0) == 0
    return {
        "lengths": [len(prompt) for prompt in prompts],
        **{name: [answer.cached for answer in result.rounds[name]] for name in rounds},
    }


def test_speculative_decoding_and_prompts_in_pieces(scenario: Scenario, tmp_path: Path) -> None:
    engine = {
        "speculative_config": NGRAM,
        "max_num_batched_tokens": 96,
        "max_num_seqs": 4,
        "enable_chunked_prefill": True,
    }
    cached = run_both(scenario, tmp_path, engine, {})
    assert cached["warm"] == [(n - 1) // 32 * 32 for n in cached["lengths"]]
    whole = [(n + ANSWER_TOKENS - 1) // 32 * 32 for n in cached["lengths"]]
    assert cached["second turn"] == whole


def test_steps_one_at_a_time_and_chunks_of_several_blocks_of_prompts_only(
    scenario: Scenario, tmp_path: Path
) -> None:
    offload = {"blocks_per_chunk": CHUNK_BLOCKS, "decode": False}
    cached = run_both(scenario, tmp_path, {"async_scheduling": False}, offload)
    chunk = CHUNK_BLOCKS * 32
    assert cached["warm"] == [(n - 1) // chunk * chunk for n in cached["lengths"]]
    # What an answer added was not offloaded; a chunk that the prompt filled is found again.
    assert cached["second turn"] == [n // chunk * chunk for n in cached["lengths"]]


def test_the_block_that_the_last_step_completes_is_found_again(
    scenario: Scenario, tmp_path: Path
) -> None:
    """Guesses that the last step accepts are known only when the request has ended.

    So are tokens with asynchronous scheduling, which vLLM does not do on a CPU. Each prompt has a
    round of its own: vLLM gives away blocks without a hash first, so another request would take
    the very block in the step that offloads it.
    """
    prompts = [(prompt[:40] * 6)[:n] for prompt in scenario.first[-6:] for n in (97, 129, 161)]
    rounds = {}
    for i, prompt in enumerate(prompts):
        rounds[f"cold {i}"] = Round(prompts=[prompt], max_tokens=32)
        rounds[f"second turn {i}"] = Round(prompts=[[3, 4, 5] * 10], continues=f"cold {i}")
    config = {"version": 1, "primary": {"capacity": "96MiB"}}
    engine = {"speculative_config": NGRAM}
    result = run_engine(scenario.job(rounds, engine=engine, config=config), tmp_path)
    cached = [result.rounds[f"second turn {i}"][0].cached for i in range(len(prompts))]
    assert cached == [len(prompt) + 31 for prompt in prompts]
