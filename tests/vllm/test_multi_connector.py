"""Real vLLM with several connectors at once, tierstore among them.

Goal: the answers of an engine without a connector, hits from each connector, whatever their order.
Method: `MultiConnector` over tierstore and vLLM's file-based example, or `far.FarConnector`, which
stands for those of prefill/decode disaggregation. A tierstore without a disk forgets with its
engine what the other connector keeps; the second turn of a chat is found by tierstore alone.
"""

from dataclasses import dataclass, replace
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


@pytest.mark.parametrize("is_sync", [True, False])
def test_nothing_is_kept_that_was_computed_behind_a_failed_load(
    is_sync: bool,  # noqa: FBT001 - a parameter of the test
    chat: Chat,
    tmp_path: Path,
):
    chat.run(several(far(tmp_path / "far")), tmp_path, "cold")
    children = [tierstore(), far(tmp_path / "far", is_sync=is_sync, fails_every=2)]
    one_by_one = replace(chat.rounds["warm"], one_by_one=True)
    rounds = {"far": one_by_one, "again": one_by_one, "once more": one_by_one}
    job = chat.scenario.job(rounds, transfer=several(*children))
    result = run_engine(job, tmp_path)
    for name in rounds:
        assert_same_answers(result, name, chat.reference, "warm", NOISE)
    assert "hook failed" not in result.log
    assert result.log.count("far: load failed") > 4
    # What the other connector loaded well was found here afterwards.
    assert result.metrics["tierstore_hit_chunks"] > 0


@pytest.mark.parametrize("is_first", [True, False])
def test_more_requests_than_blocks_beside_a_connector_that_loads_slowly(
    is_first: bool,  # noqa: FBT001 - a parameter of the test
    chat: Chat,
    tmp_path: Path,
):
    """Blocks are freed and loaded into again at once, by both, while others are offloaded."""
    crowd = Round(prompts=chat.scenario.crowd * 2, max_tokens=64)
    rounds = dict.fromkeys(("cold", "warm", "once more"), crowd)
    small = {"num_gpu_blocks_override": 54, "max_model_len": 640}
    reference = run_engine(chat.scenario.job(rounds, engine=small), tmp_path)
    children = [tierstore(tier_config("file", tmp_path / "tier")), far(tmp_path / "far")]
    transfer = several(*(children if is_first else children[::-1]))
    result = run_engine(chat.scenario.job(rounds, transfer=transfer, engine=small), tmp_path)
    for name in rounds:
        assert_same_answers(result, name, reference, name, NOISE)
    assert "hook failed" not in result.log
    assert result.metrics["num_preemptions"] > 0
    assert result.metrics["tierstore_hit_chunks"] > 0


@pytest.mark.parametrize("paths", [("a", "b"), ("a", "a")])
def test_two_of_tierstore_on_two_paths_or_one(paths: tuple[str, str], chat: Chat, tmp_path: Path):
    children = [tierstore(tier_config("file", tmp_path / path)) for path in paths]
    result = chat.run(several(*children, far(tmp_path / "far")), tmp_path)
    assert cached(result, "warm") == chat.scenario.expected_first()
    assert cached(result, "second turn") == chat.scenario.expected_second_turn()
    assert "caches nothing" not in result.log
    restarted = chat.run(several(children[-1]), tmp_path, "warm")
    assert cached(restarted, "warm") == chat.scenario.expected_first()


def test_the_other_connector_may_play_one_part_alone(chat: Chat, tmp_path: Path):
    """As in a prefill engine, whose role is that of the connector which sends its KV away."""
    children = [far(tmp_path / "far", role="kv_producer"), tierstore()]
    result = chat.run(several(*children, role="kv_producer"), tmp_path)
    assert cached(result, "warm") == chat.scenario.expected_first()
