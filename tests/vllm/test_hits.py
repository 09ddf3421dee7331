"""Real vLLM with and without tierstore: the same answers, with fewer tokens computed.

Goal: a cold run, a run whose prefixes come from host memory, and a run in a new process whose
prefixes come from disk answer like a run without connector, and load what they should.
Method: one engine without connector per model; per tier one engine for the cold and the warm round
and one for the restart. Hits are counted by vLLM itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from engine import EngineResult, Round, run_engine
from scenario import (
    ANSWER_TOKENS,
    Scenario,
    assert_same_answer,
    assert_same_answers,
    tier_config,
)

pytestmark = pytest.mark.vllm

NOISE = {"float32": 1e-3, "bfloat16": 0.25}
MEMORY_ONLY = {"version": 1, "primary": {"capacity": "96MiB"}}
SMALL_CACHE_REQUESTS = {"llama": 2, "mistral": 1.5, "qwen3_next": 3, "gemma3": 1.6}
"""For so many requests of the crowd there is room, but for one block. What is measured of a window
is how much it holds when the answer begins; then it gives most of that back."""


@dataclass
class Model:
    """One family with its run without connector."""

    scenario: Scenario
    noise: float
    folder: Path
    reference: EngineResult


class Models:
    """Builds each model and its reference when a test first asks for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[str, Model] = {}

    def get(self, family: str) -> Model:
        if family not in self._models:
            from tiny_models import DTYPES, build_model

            folder = self._folder / f"{family}-runs"
            path = build_model(family, self._folder)
            scenario = Scenario(path, DTYPES[family], keeps_decoded=family != "qwen3_next")
            rounds = scenario.rounds() | {"crowd": scenario.crowd_round(measures=True)}
            reference = run_engine(scenario.job(rounds, separate_process=False), folder)
            scenario = replace(scenario, alignment_tokens=reference.alignment_tokens)
            self._models[family] = Model(scenario, NOISE[DTYPES[family]], folder, reference)
        return self._models[family]


@dataclass
class TierRun:
    """One model over one tier: three engines, one after the other."""

    model: Model
    scenario: Scenario
    first: EngineResult
    restarted: EngineResult
    preempted: EngineResult


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(
    scope="module",
    params=[
        ("llama", "file", 1),
        ("llama", "lmdb", 1),
        ("mistral", "file", 1),
        ("mistral", "lmdb", 1),
        ("qwen3_next", "file", 1),
        ("qwen3_next", "lmdb", 1),
        ("gemma3", "file", 1),
        ("gemma3", "file", 2),
    ],
    ids=lambda param: "-".join(map(str, param)),
)
def run(request: pytest.FixtureRequest, models: Models) -> Iterator[TierRun]:
    family, backend, blocks_per_chunk = request.param
    model = models.get(family)
    tier_path = model.folder / f"{backend}-{blocks_per_chunk}"
    config = tier_config(backend, tier_path, blocks_per_chunk=blocks_per_chunk)
    # Both ways to run the engine must work: the lmdb runs have both halves in one process.
    separate = backend == "file"
    scenario = replace(
        model.scenario, alignment_tokens=model.scenario.alignment_tokens * blocks_per_chunk
    )
    first = run_engine(
        scenario.job(scenario.rounds(), config=config, separate_process=separate), model.folder
    )
    # The first round's prompts come alone, and their answers are as they were in a batch.
    again = {
        "restarted": Round(
            prompts=scenario.first, max_tokens=ANSWER_TOKENS, reset=False, one_by_one=True
        )
    }
    restarted = run_engine(
        scenario.job(again, config=config, separate_process=separate), model.folder
    )
    crowds = {name: scenario.crowd_round() for name in ("disk", "memory")}
    held_blocks = model.reference.held_blocks["crowd"]
    # One of them is the null block, so one is missing.
    small_blocks = int(SMALL_CACHE_REQUESTS[family] * held_blocks)
    small = {"num_gpu_blocks_override": small_blocks, "max_model_len": 640}
    preempted = run_engine(
        scenario.job(crowds, config=config, separate_process=separate, engine=small), model.folder
    )
    return TierRun(model, scenario, first, restarted, preempted)


@pytest.mark.parametrize("name", ["cold", "warm", "varied", "second turn"])
def test_answers_are_those_of_an_engine_without_tierstore(run: TierRun, name: str):
    assert_same_answers(run.first, name, run.model.reference, name, run.model.noise)


def test_answers_after_a_restart_are_those_of_an_engine_without_tierstore(run: TierRun):
    assert_same_answers(run.restarted, "restarted", run.model.reference, "cold", run.model.noise)


def test_all_but_the_last_token_is_loaded_from_memory(run: TierRun):
    cached = [answer.cached for answer in run.first.rounds["warm"]]
    assert cached == run.scenario.expected_first()


def test_all_but_the_last_token_is_loaded_from_disk_after_a_restart(run: TierRun):
    cached = [answer.cached for answer in run.restarted.rounds["restarted"]]
    assert cached == run.scenario.expected_first()
    assert run.restarted.metrics["tierstore_promoted_chunks"] > 0


def test_nothing_is_loaded_past_the_first_difference(run: TierRun):
    cached = [answer.cached for answer in run.first.rounds["varied"]]
    assert cached == run.scenario.expected_varied()


def test_a_second_turn_finds_the_first_answer(run: TierRun):
    cached = [answer.cached for answer in run.first.rounds["second turn"]]
    assert cached == run.scenario.expected_second_turn()


def test_no_load_failed(run: TierRun):
    for result in (run.first, run.restarted):
        assert "tierstore_failed_loads" not in result.metrics or (
            result.metrics["tierstore_failed_loads"] == 0
        )


def test_answers_survive_preemption(run: TierRun):
    assert run.preempted.metrics["num_preemptions"] > 0
    for name in ("disk", "memory"):
        assert_same_answers(run.preempted, name, run.model.reference, "crowd", run.model.noise)


def test_requests_that_are_preempted_were_loaded_from_disk_first(run: TierRun):
    assert run.preempted.metrics["tierstore_promoted_chunks"] > 0
    cached = [answer.cached for answer in run.preempted.rounds["disk"]]
    assert cached == run.scenario.expected_crowd()


@pytest.mark.parametrize(
    "connector", ["flipping.FlippingConnector", "shortening.ShorteningConnector"]
)
def test_a_flipped_bit_or_a_block_too_few_would_be_noticed(connector: str, models: Models):
    model = models.get("llama")
    scenario = model.scenario
    rounds = {name: scenario.rounds()[name] for name in ("cold", "warm")}
    job = scenario.job(rounds, config=MEMORY_ONLY, connector=connector)
    result = run_engine(job, model.folder)
    assert_same_answers(result, "cold", model.reference, "cold", model.noise)
    expected = model.reference.rounds["warm"]
    loaded = [answer.cached > 0 for answer in result.rounds["warm"]]
    assert loaded == [cached > 0 for cached in scenario.expected_first()]
    for number, answer in enumerate(result.rounds["warm"]):
        if loaded[number]:
            with pytest.raises(AssertionError, match=f"prompt {number},"):
                assert_same_answer(answer, expected[number], model.noise, f"prompt {number}")
