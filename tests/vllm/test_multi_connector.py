"""Real vLLM with several connectors at once, tierstore among them.

Goal: the answers of an engine without a connector, hits from each connector, whatever their order.
Method: `MultiConnector` over tierstore and vLLM's file-based example, or `far.FarConnector`, which
stands for those of prefill/decode disaggregation. A tierstore without a disk forgets with its
engine what the other connector keeps; the second turn of a chat is found by tierstore alone.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine import EngineResult, Round, run_engine
from scenario import ANSWER_TOKENS, Scenario, assert_same_answers, tier_config
from tiny_models import DTYPES, build_model
from transfers import example, far, several, tierstore

pytestmark = pytest.mark.vllm

NOISE = 1e-3


MODULE_PATH = {"kv_connector_module_path": "tierstore_vllm"}


@dataclass(frozen=True)
class Chat:
    """What is asked, and what an engine without a connector answers."""

    scenario: Scenario
    rounds: dict[str, Round]
    reference: EngineResult

    def run(self, transfer: dict[str, Any], folder: Path, *names: str, **changes: Any) -> Any:
        """Run the rounds of these names (none: all) with connectors; compare the answers."""
        rounds = {name: self.rounds[name] for name in names or self.rounds}
        result = run_engine(self.scenario.job(rounds, transfer=transfer, **changes), folder)
        for name in rounds:
            assert_same_answers(result, name, self.reference, name, NOISE)
        assert "hook failed" not in result.log
        return result


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    path = build_model("llama", tmp_path_factory.mktemp("models"))
    scenario = Scenario(path, DTYPES["llama"], 32)
    rounds = {
        "cold": Round(prompts=scenario.first, max_tokens=ANSWER_TOKENS),
        "warm": Round(prompts=scenario.first, max_tokens=ANSWER_TOKENS),
        "second turn": Round(prompts=scenario.more, continues="cold"),
    }
    reference = run_engine(scenario.job(rounds), tmp_path_factory.mktemp("reference"))
    return Chat(scenario, rounds, reference)


def cached(result: EngineResult, name: str) -> list[int]:
    return [answer.cached for answer in result.rounds[name]]


@pytest.mark.parametrize("is_first", [True, False])
def test_tierstore_and_vllms_example_both_hit_in_either_order(
    is_first: bool,  # noqa: FBT001 - a parameter of the test
    chat: Chat,
    tmp_path: Path,
):
    children = [tierstore(), example(tmp_path / "example")]
    transfer = several(*(children if is_first else children[::-1]))
    process = {"separate_process": not is_first}
    result = chat.run(transfer, tmp_path, **process)
    assert "caches nothing" not in result.log
    assert cached(result, "warm") == chat.scenario.expected_first()
    assert cached(result, "second turn") == chat.scenario.expected_second_turn()
    assert result.metrics["tierstore_offloaded_chunks"] > 0
    assert result.metrics["tierstore_hit_chunks"] > 0

    restarted = chat.run(transfer, tmp_path, "warm", **process)
    assert "Inject KV cache" in restarted.log
    assert sum(cached(restarted, "warm")) > 0
    # What another connector brought is offloaded like what was computed.
    assert restarted.metrics["tierstore_offloaded_chunks"] > 0


@pytest.mark.parametrize(
    ("is_first", "engine"),
    [(True, {}), (False, {}), (True, {"tensor_parallel_size": 2})],
)
def test_tierstore_and_a_connector_with_a_handshake_both_hit(
    is_first: bool,  # noqa: FBT001 - a parameter of the test
    engine: dict[str, Any],
    chat: Chat,
    tmp_path: Path,
):
    config = tier_config("file", tmp_path / "tier")
    children = [tierstore(config, **MODULE_PATH), far(tmp_path / "far")]
    transfer = several(*(children if is_first else children[::-1]))
    result = chat.run(transfer, tmp_path, engine=engine)
    assert "caches nothing" not in result.log
    assert cached(result, "warm") == chat.scenario.expected_first()
    assert cached(result, "second turn") == chat.scenario.expected_second_turn()
    assert result.metrics["tierstore_demoted_chunks"] > 0
    assert result.metrics["tierstore_hit_chunks"] > 0
    assert result.metrics.get("tierstore_failed_loads", 0) == 0
