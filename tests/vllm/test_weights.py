"""Real vLLM whose weights change in place: no engine ever loads what other weights computed.

Goal: after a reset the changed engine hits in memory and on disk what it computed since, and a new
engine with the weights as loaded finds nothing of it on the same path. Method: one engine changes
its weights and resets, in either order, twice in all; another one is started behind it. What the
right answers are, the engine says itself for requests that stay out of the cache.
"""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from lab import run_lab
from scenario import Scenario, tier_config
from tiny_models import DTYPES, build_model

from tierstore.config import load_config
from tierstore.manifest import Manifest
from tierstore_vllm.layout import EngineShape
from tierstore_vllm.scheduler import SchedulerHalf

pytestmark = pytest.mark.vllm

LENGTHS = (129, 320, 900)
CHANGES = ["reset_after", "reset_before"]


class Lives:
    """An engine whose weights change, and one after it that loads them anew."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = build_model("llama", folder)
        scenario = Scenario(path, DTYPES["llama"], 32)
        self._prompts = [prompt for prompt in scenario.first if len(prompt) in LENGTHS]
        self._job = {
            "model": str(path),
            "dtype": DTYPES["llama"],
            "config": tier_config("file", folder / "tier"),
            "prompts": self._prompts,
        }
        self.whole = [(len(prompt) - 1) // 32 * 32 for prompt in self._prompts]
        self.nothing = [0] * len(self._prompts)
        self.changed = self._run("changed", CHANGES)
        self.restarted = self._run("restarted", ["again_as_loaded"])

    def _run(self, name: str, phases: list[str]) -> dict[str, Any]:
        return run_lab("updating.py", name, self._job | {"phases": phases}, self._folder)


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Lives:
    return Lives(tmp_path_factory.mktemp("weights"))


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_computed_anew_and_hit_in_memory_and_on_disk(
    change: str, lives: Lives
) -> None:
    found = lives.changed[change]
    right = found["without tierstore"]
    assert right["cached"] == lives.nothing
    assert right["tokens"] != lives.changed["cold"]["tokens"]
    for name, cached in (
        ("computed", lives.nothing),
        ("from memory", lives.whole),
        ("from disk", lives.whole),
    ):
        assert found[name]["tokens"] == right["tokens"], name
        assert found[name]["cached"] == cached, name
    assert found["problems"] == []


def test_an_engine_with_the_weights_as_loaded_finds_nothing_that_others_computed(
    lives: Lives,
) -> None:
    first = lives.restarted["cold"]
    assert first["tokens"] == lives.changed["cold"]["tokens"]
    assert first["cached"] == lives.nothing
    assert lives.restarted["again_as_loaded"]["problems"] == []


def test_no_two_resets_begin_the_same_epoch() -> None:
    manifest = Manifest.simple("m", 4096)
    shape = EngineShape(hash_block_tokens=1, alignment_tokens=1, rank_count=1)
    config = load_config({"primary": {"capacity": "1MiB"}})
    namespaces = {manifest.namespace}
    for _ in range(2):
        half = SchedulerHalf.open(config, manifest, shape)
        for _ in range(2):
            assert half.reset_cache()
            assert not half.has_given_up
            namespaces.update(group.namespace for group in half._planner._configs)
        half.close()
    assert len(namespaces) == 1 + 2 * 2
