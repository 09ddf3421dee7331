"""Real vLLM, reset: what is forgotten, in memory, on disk, and by the engine that comes next.

Goal: by default a reset leaves nothing that anybody finds; with `offload.on_reset: keep_disk` it
leaves what is on disk, for this engine and the next. Method: per setting one engine that is reset,
at rest and as vLLM does before it sleeps, and another one on the same path afterwards.
"""

from pathlib import Path
from typing import Any

import pytest
from engine import Round, run_engine
from lab import run_lab
from scenario import Scenario, tier_config
from tiny_models import DTYPES, build_model

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    path = build_model("llama", tmp_path_factory.mktemp("models"))
    return Scenario(path, DTYPES["llama"], 32)


@pytest.mark.parametrize("on_reset", ["forget", "keep_disk"])
def test_a_reset_leaves_on_disk_what_the_configuration_says(
    on_reset: str, scenario: Scenario, tmp_path: Path
):
    prompts = [prompt for prompt in scenario.first if len(prompt) >= 320]
    whole = [(len(prompt) - 1) // 32 * 32 for prompt in prompts]
    nothing = [0] * len(prompts)
    left = {"forget": nothing, "keep_disk": whole}[on_reset]
    config = tier_config("file", tmp_path / "tier", on_reset=on_reset)
    job: dict[str, Any] = {
        "model": str(scenario.model),
        "dtype": scenario.dtype,
        "config": config,
        "prompts": prompts,
        "phases": ["reset", "sleep"],
    }
    found = run_lab("resetting.py", on_reset, job, tmp_path)
    assert found["cold"]["cached"] == nothing
    assert found["reset"]["is reset"]
    assert found["reset"]["after"]["cached"] == left
    counts = found["reset"]["counts"]
    assert counts.get("prompt_tokens_cached_by_source{disk}", 0) == sum(left)
    assert "prompt_tokens_cached_by_source{host}" not in counts
    assert found["reset"]["again"]["cached"] == whole
    assert found["sleep"]["after"]["cached"] == left
    tokens = found["cold"]["tokens"]
    asked = (found["reset"]["after"], found["reset"]["again"], found["sleep"]["after"])
    assert [answers["tokens"] for answers in asked] == [tokens] * 3
    assert not found["reset"]["problems"]
    assert not found["sleep"]["problems"]

    next_life = {"next": Round(prompts=prompts, one_by_one=True, max_tokens=6)}
    result = run_engine(scenario.job(next_life, config=config), tmp_path)
    assert [answer.cached for answer in result.rounds["next"]] == left
    assert [answer.tokens for answer in result.rounds["next"]] == tokens
