"""A draft layer (MTP) over a hybrid model: its guesses run over boundaries, its KV is cached too.

Goal: the same answers as without tierstore, from memory and from disk, and guesses as good as
before: what the draft layer reads of loaded blocks is what it would have computed.
Method: a model whose guesses are right about every second time; per way one engine without and
one with tierstore, then a second life of the latter.
"""

import random
from pathlib import Path

import pytest
from engine import EngineResult, Round, run_engine
from scenario import Scenario, assert_same_answers, tier_config

pytestmark = pytest.mark.vllm

NOISE = 0.05
LENGTHS = (700, 900, 1300)
ANSWER_TOKENS = 40
ENGINE = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
MORE = [[5, 6, 7] * 12] * len(LENGTHS)


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    from tiny_drafts import build_mtp_model
    from tiny_models import DTYPES

    path = build_mtp_model(tmp_path_factory.mktemp("models"))
    return Scenario(path, DTYPES["qwen3_next"])


def prompts() -> list[list[int]]:
    draw = random.Random("draft")
    return [[draw.randrange(3, 259) for _ in range(length)] for length in LENGTHS]


def cached(result: EngineResult, name: str) -> list[int]:
    return [answer.cached for answer in result.rounds[name]]


def test_guesses_of_an_mtp_layer_on_a_hybrid_model(scenario: Scenario, tmp_path: Path) -> None:
    rounds = {
        "cold": Round(prompts=prompts(), max_tokens=ANSWER_TOKENS),
        "warm": Round(prompts=prompts(), max_tokens=ANSWER_TOKENS),
        "second turn": Round(prompts=MORE, continues="cold"),
    }
    config = tier_config("file", tmp_path / "tier")
    where = {"engine": ENGINE, "workarounds": True, "separate_process": False}
    reference = run_engine(scenario.job(rounds, **where), tmp_path)
    first = run_engine(scenario.job(rounds, config=config, **where), tmp_path)
    again = {"cold": rounds["warm"]}
    second = run_engine(scenario.job(again, config=config, **where), tmp_path)

    for name in rounds:
        assert_same_answers(first, name, reference, name, NOISE)
    assert_same_answers(second, "cold", reference, "warm", NOISE)
    assert cached(first, "cold") == [0] * len(LENGTHS)
    assert all(0 < hit < n for hit, n in zip(cached(first, "warm"), LENGTHS, strict=True))
    assert cached(second, "cold") == cached(first, "warm")
    assert second.metrics["prompt_tokens_cached_by_source{disk}"] == sum(cached(second, "cold"))
    assert first.metrics.get("tierstore_failed_loads", 0) == 0
    share = [
        result.metrics["spec_decode_num_accepted_tokens"]
        / result.metrics["spec_decode_num_draft_tokens"]
        for result in (reference, first)
    ]
    assert share[0] > 0.3, "the model's guesses are hardly ever right: nothing is tested"
    assert share[1] > 0.9 * share[0], share
