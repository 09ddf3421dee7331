"""Memory that cannot hold a hit: the longest part that fits is loaded, and no request fails.

Goal: neither policy for failed loads sees one; tokens are those of an engine without a connector.
Method: one engine stores long prompts on disk; one whose memory holds a few chunks asks again.
"""

from pathlib import Path

import pytest
from engine import EngineResult, Round, run_engine
from scenario import Scenario, assert_same_answers, tier_config

pytestmark = pytest.mark.vllm

NOISE = 1e-3
CHUNK_BYTES = 3 * 2 * 32 * 64 * 4
"""Of a block: layers, heads, tokens, K and V of a head, bytes of a number."""
SLOT_COUNT = 12


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    from tiny_models import DTYPES, build_model

    path = build_model("llama", tmp_path_factory.mktemp("models"))
    return Scenario(path, DTYPES["llama"], 32)


@pytest.fixture(scope="module")
def long_prompts(scenario: Scenario) -> list[list[int]]:
    return [prompt for prompt in scenario.first if len(prompt) >= 500]


@pytest.fixture(scope="module")
def recorded(
    scenario: Scenario, long_prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, EngineResult]:
    """A disk on which the prompts are, and the answers of the engine that computed them."""
    folder = tmp_path_factory.mktemp("recorded")
    rounds = {"cold": Round(prompts=long_prompts), "alone": Round(prompts=long_prompts[-1:])}
    config = tier_config("file", folder / "disk")
    return folder / "disk", run_engine(scenario.job(rounds, config=config), folder)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_hit_longer_than_memory_is_loaded_in_part(
    scenario: Scenario,
    long_prompts: list[list[int]],
    recorded: tuple[Path, EngineResult],
    tmp_path: Path,
    policy: str,
) -> None:
    disk, reference = recorded
    config = tier_config("file", disk)
    config["primary"] = {"capacity": f"{SLOT_COUNT * CHUNK_BYTES}B"}
    rounds = {"alone": Round(prompts=long_prompts[-1:]), "together": Round(prompts=long_prompts)}
    job = scenario.job(rounds, config=config, load_failure_policy=policy)
    result = run_engine(job, tmp_path)
    for name, their_name in (("alone", "alone"), ("together", "cold")):
        assert_same_answers(result, name, reference, their_name, NOISE)
    assert [answer.cached for answer in result.rounds["alone"]] == [SLOT_COUNT * 32]
    assert result.metrics.get("tierstore_failed_loads", 0) == 0
