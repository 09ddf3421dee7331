"""Real vLLM over a tier of keyed records: forged ones are recomputed, a bad key file is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
from engine import EngineResult, Round, run_engine
from forging import plain_header, rewrite
from keyed import key_file
from scenario import ANSWER_TOKENS, Scenario, assert_same_answers, tier_config

pytestmark = pytest.mark.vllm

NOISE = 1e-3


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    from tiny_models import DTYPES, build_model

    folder = tmp_path_factory.mktemp("model")
    return Scenario(build_model("llama", folder), DTYPES["llama"])


def round_of(scenario: Scenario) -> Round:
    return Round(prompts=scenario.first, max_tokens=ANSWER_TOKENS, one_by_one=True)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, scenario: Scenario) -> EngineResult:
    job = scenario.job({"cold": round_of(scenario)}, separate_process=False)
    return run_engine(job, tmp_path_factory.mktemp("reference"))


def keyed_config(folder: Path, *, encrypt: bool) -> dict:
    config = tier_config("file", folder / "tier")
    config["secondary"][0]["integrity"] = {
        "key_file": key_file(folder / "records.key", 1),
        "encrypt": encrypt,
    }
    return config


@pytest.mark.parametrize("encrypt", [False, True])
def test_forged_records_cost_a_recompute_and_others_are_loaded(
    tmp_path: Path,
    scenario: Scenario,
    reference: EngineResult,
    encrypt: bool,  # noqa: FBT001 - a parameter of the test
):
    """Every second record is forged by somebody who knows the format and has no key."""
    round_ = round_of(scenario)
    config = keyed_config(tmp_path, encrypt=encrypt)
    first = run_engine(scenario.job({"cold": round_}, config=config), tmp_path)
    assert_same_answers(first, "cold", reference, "cold", NOISE)
    number = iter(range(1 << 20))

    def forge(header: bytes, payload: bytes) -> tuple[bytes, bytes] | None:
        evil = payload[::-1]
        return (plain_header(header, evil), evil) if next(number) % 2 else None

    forged = rewrite(tmp_path / "tier" / "rank0", forge)
    assert forged > 10
    again = {"again": replace(round_, reset=False)}
    result = run_engine(scenario.job(again, config=config), tmp_path)
    assert_same_answers(result, "again", reference, "cold", NOISE)
    assert result.metrics["tierstore_promoted_chunks"] > 0
    assert 0 < result.metrics["tierstore_misses{corrupt}"] <= forged
    assert "cause=no mac" in result.log


def test_a_key_file_that_others_can_read_stops_the_engine_at_its_start(
    tmp_path: Path, scenario: Scenario
):
    config = keyed_config(tmp_path, encrypt=False)
    (tmp_path / "records.key").chmod(0o644)
    job = scenario.job({"cold": Round(prompts=scenario.first[:1])}, config=config)
    with pytest.raises(RuntimeError, match=r"integrity\.key_file: .*chmod 600"):
        run_engine(job, tmp_path)
