"""Real vLLM, shut down right after its last token: what was computed is on disk.

Goal: an engine that ends in whatever way loses no full block. Method: a chain of engines on one
path. Each answers prompts of its own in a single step and ends at once; the next one must hit all
of them.
"""

import pytest
from engine import EngineResult, Round, run_engine
from scenario import Scenario, tier_config
from tiny_models import DTYPES, build_model

pytestmark = pytest.mark.vllm

ENDS = {
    "in the caller's process": {"separate_process": False},
    "in a process of its own": {"separate_process": True},
    "in a script that just ends": {"separate_process": False, "ends": "exit"},
    "by SIGTERM": {"separate_process": True, "ends": "sigterm"},
}


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Scenario, EngineResult]]:
    """Run the chain; return by way of ending what the next engine made of its prompts."""
    folder = tmp_path_factory.mktemp("chain")
    scenario = Scenario(build_model("llama", folder), DTYPES["llama"], 32)
    config = tier_config("file", folder / "tier")
    found = {}
    previous = None
    for number, how in enumerate([*ENDS, None]):
        mine = [[3 + number, *prompt] for prompt in scenario.first]
        rounds = {} if previous is None else {"again": Round(prompts=previous, max_tokens=1)}
        if how is not None:
            rounds["mine"] = Round(prompts=mine, max_tokens=1)
        options = ENDS.get(how, {"separate_process": True})
        result = run_engine(scenario.job(rounds, config=config, **options), folder)
        if previous is not None:
            found[list(ENDS)[number - 1]] = (previous, result.rounds["again"])
        previous = mine
    return found


@pytest.mark.parametrize("how", ENDS)
def test_an_engine_that_ends_after_its_last_token_loses_nothing(how: str, chain):
    prompts, answers = chain[how]
    assert [answer.cached for answer in answers] == [(len(p) - 1) // 32 * 32 for p in prompts]
