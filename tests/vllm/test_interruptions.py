"""Real vLLM, disturbed: damaged disks and aborted requests cost time, never an answer.

Goal: loads that fail end as recomputes with the right answer, and are stored again; requests that
are aborted at any stage leak nothing. Method: one engine fills a tier, the test damages it, another
engine reads it; and an engine with slow loads whose requests are aborted after 0, 1, 2, ... steps.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from engine import Round, engine_environment, run_engine
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
    job = {
        "model": str(scenario.model),
        "dtype": scenario.dtype,
        "config": tier_config("file", tmp_path / "tier") | {"primary": {"capacity": "4MiB"}},
        "prompts": prompts,
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    process = subprocess.run(
        [sys.executable, Path(__file__).parent / "aborting.py", "job.json", "result.json"],
        cwd=tmp_path,
        env=engine_environment(separate_process=False),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-5000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["problems"] == []
    assert result["same"]
    assert all(result["cached"])
    assert result["aborted_while_loading"] > 0, "no request was aborted while it was loading"
