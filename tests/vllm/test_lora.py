"""Real vLLM with LoRA adapters: cached, and never with the weights of another adapter.

Goal: cold, from memory, and from disk in a new process, requests of two adapters and of the base
model answer the same prompts like an engine without connector, load all that their own weights
have computed, and nothing else: not even under the same name and path. Method: one engine without
connector, one with, and one after it that finds other weights in the place of one adapter. In a
fourth engine an adapter's weights change in every way that vLLM knows.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from engine import EngineJob, EngineResult, Round, run_engine
from lab import run_lab
from scenario import ANSWER_TOKENS, Scenario, assert_same_answers, tier_config
from tiny_adapters import write_adapter
from tiny_models import DTYPES, build_model

pytestmark = pytest.mark.vllm

LENGTHS = (129, 320, 900)
NOISE = 1e-3
ENGINE = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
CHANGES = (
    "loaded_beforehand",
    "read_again",
    "files_changed_while_dropped",
    "after_a_reset",
    "reloaded_in_place",
    "reloaded_and_reset",
    "reloaded_from_a_new_path",
    "reloaded_while_a_request_runs",
)


@dataclass
class Runs:
    """What the engines answered."""

    whole: list[int]
    reference: EngineResult
    first: EngineResult
    restarted: EngineResult

    @property
    def nothing(self) -> list[int]:
        return [0] * len(self.whole)


def prompts_of(model: Path) -> list[list[int]]:
    scenario = Scenario(model, DTYPES["llama"], 32)
    return [prompt for prompt in scenario.first if len(prompt) in LENGTHS]


def whole(prompts: list[list[int]]) -> list[int]:
    return [(len(prompt) - 1) // 32 * 32 for prompt in prompts]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("lora")
    model = build_model("llama", folder)
    prompts = prompts_of(model)
    paths = {
        name: write_adapter(model, folder / name, seed=seed)
        for seed, name in enumerate(("a", "b", "other b"))
    }

    def asked(name: str | None) -> Round:
        adapter = None if name is None else (name, str(paths[name]))
        return Round(prompts=prompts, max_tokens=ANSWER_TOKENS, adapter=adapter)

    # The first request of an adapter that was not loaded before is what loads it.
    awake = {
        f"{name} wakes": Round(prompts=[[7]], adapter=(name, str(paths[name]))) for name in "ab"
    }
    rounds = awake | {"base": asked(None), "a": asked("a"), "b": asked("b")}
    again = {f"{name} again": rounds[name] for name in ("a", "b", "base")}

    def run(rounds: dict[str, Round], config: dict[str, Any] | None) -> EngineResult:
        job = EngineJob(
            model=str(model), dtype=DTYPES["llama"], rounds=rounds, config=config, engine=ENGINE
        )
        return run_engine(job, folder)

    config = tier_config("file", folder / "tier")
    reference = run(rounds | {"other b": asked("other b")}, None)
    first = run(rounds | again, config)
    write_adapter(model, paths["b"], seed=2)
    restarted = run(awake | again, config)
    return Runs(whole(prompts), reference, first, restarted)


def cached(result: EngineResult, name: str) -> list[int]:
    return [answer.cached for answer in result.rounds[name]]


def test_adapters_give_other_answers_than_the_base_model_and_each_other(runs: Runs) -> None:
    answers = [
        [answer.tokens for answer in runs.reference.rounds[name]]
        for name in ("base", "a", "b", "other b")
    ]
    assert all(one != other for one, *others in zip(*answers, strict=True) for other in others)


@pytest.mark.parametrize("name", ["base", "a", "b"])
def test_an_adapter_finds_in_memory_what_it_computed_and_nothing_of_others(
    runs: Runs, name: str
) -> None:
    assert_same_answers(runs.first, name, runs.reference, name, NOISE)
    assert cached(runs.first, name) == runs.nothing
    assert_same_answers(runs.first, f"{name} again", runs.reference, name, NOISE)
    assert cached(runs.first, f"{name} again") == runs.whole


@pytest.mark.parametrize("name", ["base", "a"])
def test_an_adapter_finds_on_disk_what_the_same_weights_computed_before_a_restart(
    runs: Runs, name: str
) -> None:
    assert_same_answers(runs.restarted, f"{name} again", runs.reference, name, NOISE)
    assert cached(runs.restarted, f"{name} again") == runs.whole


def test_other_weights_under_the_same_name_and_path_find_nothing_after_a_restart(
    runs: Runs,
) -> None:
    assert_same_answers(runs.restarted, "b again", runs.reference, "other b", NOISE)
    assert cached(runs.restarted, "b again") == runs.nothing


@dataclass
class Life:
    """What one engine found after every change, and how much of each prompt could be cached."""

    found: dict[str, Any]
    whole: list[int]

    def tokens(self, change: str) -> dict[str, Any]:
        return {
            asked: self.found[change][asked]["tokens"]
            for asked in ("first", "second", "without tierstore")
            if asked in self.found[change]
        }

    def cached(self, change: str, asked: str) -> list[int]:
        counts: list[int] = self.found[change][asked]["cached"]
        return counts


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Life:
    folder = tmp_path_factory.mktemp("adapting")
    model = build_model("llama", folder)
    prompts = prompts_of(model)
    job = {
        "model": str(model),
        "dtype": DTYPES["llama"],
        "config": tier_config("file", folder / "tier"),
        "prompts": prompts,
        "engine": ENGINE,
        "phases": CHANGES,
    }
    return Life(run_lab("adapting.py", "life", job, folder), whole(prompts))


@pytest.mark.parametrize("change", CHANGES)
def test_every_answer_is_that_of_the_weights_in_use(life: Life, change: str) -> None:
    answers = life.tokens(change)
    assert all(answer == answers["without tierstore"] for answer in answers.values())
    assert life.found[change]["problems"] == []


def test_the_changes_change_the_answers(life: Life) -> None:
    answers = [
        life.tokens(change)["without tierstore"]
        for change in CHANGES
        if change not in ("read_again", "after_a_reset")
    ]
    assert all(one != other for i, one in enumerate(answers) for other in answers[:i])


def test_an_adapter_that_was_loaded_beforehand_is_cached_from_its_first_request(
    life: Life,
) -> None:
    assert life.cached("loaded_beforehand", "second") == life.whole


def test_an_adapter_that_is_read_again_finds_what_it_computed(life: Life) -> None:
    assert life.cached("read_again", "first") == life.whole


@pytest.mark.parametrize(
    "change", ["files_changed_while_dropped", "reloaded_in_place", "reloaded_while_a_request_runs"]
)
def test_changed_weights_under_the_same_name_and_path_find_nothing(life: Life, change: str) -> None:
    assert not any(life.cached(change, "first"))
    assert not any(life.cached(change, "second"))


@pytest.mark.parametrize(
    "change", ["after_a_reset", "reloaded_and_reset", "reloaded_from_a_new_path"]
)
def test_changed_weights_are_cached_anew_after_a_reset_or_from_a_new_path(
    life: Life, change: str
) -> None:
    assert not any(life.cached(change, "first"))
    assert life.cached(change, "second") == life.whole
