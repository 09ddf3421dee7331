"""Real vLLM over a device that refuses, is full, hangs, vanishes, or is held by a stopped process.

Goal: right answers all the time, what is in memory is still hit, the engine's steps go on, and the
tier is used again when its device is back, without a restart. Method: one engine with both halves
in its process (`lab`), whose device is told to fail (`device_faults`).
"""

from pathlib import Path
from typing import Any

import pytest
from lab import run_lab
from scenario import Scenario, tier_config
from tiny_models import DTYPES, build_model

pytestmark = pytest.mark.vllm

FAMILY = "llama"
LENGTHS = (320, 500, 900)
FAULTS = ["refusing", "full", "hung", "vanished", "stopped"]
BACKENDS = ["file", "lmdb"]
STALL_SECONDS_MAX = 5
"""What no step may take even on a busy machine; what it does take is measured by a script."""


def run(backend: str, folder: Path) -> dict[str, Any]:
    path = build_model(FAMILY, folder)
    prompts = [p for p in Scenario(path, DTYPES[FAMILY]).first if len(p) in LENGTHS]
    work = folder / backend
    work.mkdir()
    config = tier_config(backend, work / "tier")
    config["secondary"][0]["io"] = {"deadline": "500ms", "threads": 2}
    job = {
        "model": str(path),
        "dtype": DTYPES[FAMILY],
        "config": config,
        "prompts": prompts,
        "phases": ["healthy", *FAULTS],
    }
    return run_lab("device_faults.py", "faults", job, work)


@pytest.fixture(scope="module", params=BACKENDS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    return run(request.param, tmp_path_factory.mktemp("device"))


def test_prompts_that_only_the_disk_has_are_hit_while_it_is_healthy(found):
    healthy = found["healthy"]
    assert healthy["broken"]["tokens"] == healthy["before"]["tokens"]
    assert min(healthy["healed"]["cached"]) > 0


@pytest.mark.parametrize("fault", FAULTS)
def test_answers_are_right_while_the_device_is_broken_and_after(found, fault: str):
    phase = found[fault]
    assert phase["broken"]["tokens"] == phase["before"]["tokens"]
    assert phase["healed"]["tokens"] == phase["before"]["tokens"]
    assert set(phase["broken"]["reasons"]) == {"length"}


@pytest.mark.parametrize("fault", FAULTS)
def test_memory_is_hit_while_the_device_is_broken(found, fault: str):
    phase = found[fault]
    assert phase["from memory"]["tokens"] == phase["fresh"]["tokens"]
    assert min(phase["from memory"]["cached"]) > 0


@pytest.mark.parametrize("fault", FAULTS)
def test_the_tier_is_used_again_without_a_restart(found, fault: str):
    assert found[fault]["used again after"] is not None


@pytest.mark.parametrize("fault", FAULTS)
def test_the_engine_steps_on(found, fault: str):
    assert max(found[fault]["steps"]["broken"]) < STALL_SECONDS_MAX


@pytest.mark.parametrize("fault", ["healthy", *FAULTS])
def test_nothing_leaks(found, fault: str):
    assert found[fault]["problems"] == []
