"""Real vLLM, disturbed: damaged disks and aborted requests cost time, never an answer.

Goal: loads that fail end as recomputes with the right answer, and are stored again; requests that
are aborted at any stage leak nothing. Method: one engine fills a tier, the test damages it, another
engine reads it; and an engine with slow loads whose requests are aborted after 0, 1, 2, ... steps.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from engine import Round, run_engine
from scenario import ANSWER_TOKENS, Scenario, assert_same_answers, tier_config
from tiny_models import DTYPES, build_model

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def damage(tier_path: Path) -> None:
    """Flip one bit in each page of the first half of every segment but its first pages."""
    segments = sorted((tier_path / "rank0").glob("*.seg"))
    assert segments
    for segment in segments:
        content = bytearray(segment.read_bytes())
        for page in range(2, len(content) // 8192):
            content[page * 4096 + 77] ^= 0x10
        segment.write_bytes(content)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_damaged_records_are_recomputed_and_stored_again(
    family: str, model_folder: Path, tmp_path: Path
):
    scenario = Scenario(build_model(family, model_folder), DTYPES[family], 32)
    prompts = [prompt for prompt in scenario.first if len(prompt) > 64]
    config = tier_config("file", tmp_path / "tier")
    one = Round(prompts=prompts, max_tokens=ANSWER_TOKENS)
    first = run_engine(scenario.job({"cold": one}, config=config), tmp_path)
    damage(tmp_path / "tier")
    second = run_engine(scenario.job({"damaged": one, "again": one}, config=config), tmp_path)
    assert_same_answers(second, "damaged", first, "cold", 1e-3)
    assert_same_answers(second, "again", first, "cold", 1e-3)
    assert second.metrics["tierstore_misses"] > 0
    assert second.metrics["tierstore_failed_loads"] > 0
    again = [answer.cached for answer in second.rounds["again"]]
    assert again == [(len(prompt) - 1) // 32 * 32 for prompt in prompts]


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_requests_aborted_at_any_step_leak_nothing(family: str, model_folder: Path, tmp_path: Path):
    scenario = Scenario(build_model(family, model_folder), DTYPES[family], 32)
    prompts = [prompt for prompt in scenario.first if len(prompt) >= 320][:4]
    one = Round(prompts=prompts, max_tokens=12)
    rounds = {"cold": one, "aborted": replace(one, aborts=True), "again": one}
    job = scenario.job(
        rounds,
        config=tier_config("file", tmp_path / "tier") | {"primary": {"capacity": "4MiB"}},
        connector="slow.SlowConnector",
        separate_process=False,
    )
    result = run_engine(job, tmp_path)
    tokens = {name: [answer.tokens for answer in result.rounds[name]] for name in rounds}
    assert tokens["again"] == tokens["cold"]
    assert all(answer.cached for answer in result.rounds["again"])
    for stage in ("waiting", "loading", "decoding"):
        assert result.metrics[f"aborted{{{stage}}}"] > 0, stage
