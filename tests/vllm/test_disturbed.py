"""Real vLLM, disturbed while it runs: right answers, losses counted by reason, nothing leaks.

Goal: whatever happens to the tier's files, its directory, its device, or inside a hook of the
connector, costs time and never an answer, and the tier is used again when it is over. Method: one
engine per model with both halves in its process (`lab`), which goes through all phases
(`disturbing`); after each phase it must hold no block, pin or job.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lab import SEAMS, run_lab
from scenario import Scenario, tier_config
from tiny_models import DTYPES, build_model

pytestmark = pytest.mark.vllm

LENGTHS = (129, 320, 500, 900)
DAMAGES = {"flipped": "corrupt", "truncated": "absent", "removed": "absent"}
QUIET = ["hit_sources", "salts", "questions"]
PHASES = {
    ("llama", "recompute"): [*QUIET, "leak", *DAMAGES, "reset", "full", "vanished", "hooks"],
    ("gemma3", "recompute"): [*QUIET, *DAMAGES, "reset"],
    ("qwen3_next", "recompute"): [*QUIET, "flipped", "reset"],
    ("llama", "fail"): ["flipped", "removed"],
    ("gemma3", "fail"): ["flipped", "removed"],
}


class Run:
    """What one engine went through."""

    def __init__(self, family: str, policy: str, folder: Path) -> None:
        path = build_model(family, folder)
        scenario = Scenario(path, DTYPES[family])
        prompts = [prompt for prompt in scenario.first if len(prompt) in LENGTHS]
        work = folder / f"{family}-{policy}"
        work.mkdir()
        job = {
            "model": str(path),
            "dtype": DTYPES[family],
            "config": tier_config("file", work / "tier"),
            "load_failure_policy": policy,
            "prompts": prompts,
            "phases": PHASES[family, policy],
        }
        self.found = run_lab("disturbing.py", "run", job, work)
        self.tokens = self.found["cold"]["tokens"]
        alignment = self.found["alignment_tokens"]
        self.hits = [(len(prompt) - 1) // alignment * alignment for prompt in prompts]

    def assert_answers(self, asked: dict[str, Any], cached: list[int] | None = None) -> None:
        """The answers must be those of the first, cold run; `cached` tokens must have been hit."""
        assert asked["tokens"][: len(self.tokens)] == self.tokens
        assert set(asked["reasons"]) == {"length"}
        if cached is not None:
            assert asked["cached"] == cached


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("disturbed")
    return cache(lambda family, policy: Run(family, policy, folder))


def ran(phase: str, policy: str = "recompute"):
    """Parametrise a test over the families whose engine went through a phase."""
    families = [f for (f, p), phases in PHASES.items() if p == policy and phase in phases]
    return pytest.mark.parametrize("family", families)


@pytest.mark.parametrize(("family", "policy"), PHASES)
def test_nothing_leaks_in_any_phase(family: str, policy: str, runs):
    found = runs(family, policy).found
    leaks = {phase: found[phase]["problems"] for phase in PHASES[family, policy]}
    assert not any(leaks.values()), leaks


@ran("leak")
def test_a_leaked_pin_would_be_noticed(family: str, runs):
    assert runs(family, "recompute").found["leak"]["noticed"] == ["1 chunks stay pinned in memory"]


@ran("hit_sources")
def test_vllm_counts_hits_by_where_they_come_from(family: str, runs):
    run = runs(family, "recompute")
    found = run.found["hit_sources"]
    for tier, source, other in (("memory", "host", "disk"), ("disk", "disk", "host")):
        run.assert_answers(found[tier], run.hits)
        counts = found[f"{tier}_counts"]
        assert counts[f"prompt_tokens_cached_by_source{{{source}}}"] == sum(run.hits)
        assert f"prompt_tokens_cached_by_source{{{other}}}" not in counts
        assert "prompt_tokens_cached_by_source{external_unspecified}" not in counts


@ran("salts")
def test_only_the_same_salt_hits(family: str, runs):
    run = runs(family, "recompute")
    found = run.found["salts"]
    run.assert_answers(found["first"], [0] * len(run.hits))
    run.assert_answers(found["other"], [0] * len(run.hits))
    run.assert_answers(found["same"], run.hits)
    run.assert_answers(found["same from disk"], run.hits)


@ran("questions")
def test_a_request_that_is_asked_for_again_and_again_pins_nothing(family: str, runs):
    run = runs(family, "recompute")
    assert run.found["questions"]["answers"] == [[run.hits[-1], True]]
    assert run.found["questions"]["pins"] == [0, 0]


@pytest.mark.parametrize(
    ("family", "damage"),
    [
        (f, d)
        for (f, p), phases in PHASES.items()
        if p == "recompute"
        for d in DAMAGES
        if d in phases
    ],
)
def test_damaged_files_are_recomputed_counted_and_written_again(family: str, damage: str, runs):
    run = runs(family, "recompute")
    found = run.found[damage]
    run.assert_answers(found["damaged"], [0] * len(run.hits))
    run.assert_answers(found["again from memory"], run.hits)
    assert found["all memory free"]
    run.assert_answers(found["again from disk"], run.hits)
    reason = DAMAGES[damage]
    counts = found["counts"]
    assert counts[f"tierstore_misses{{{reason}}}"] == counts["tierstore_misses"] > 0
    loads = sum(hit > 0 for hit in run.hits)
    assert counts[f"tierstore_failed_loads{{{reason}}}"] == loads


@pytest.mark.parametrize("damage", ["flipped", "removed"])
@ran("flipped", "fail")
def test_policy_fail_ends_the_request_and_nothing_else(family: str, damage: str, runs):
    run = runs(family, "fail")
    found = run.found[damage]
    assert found["damaged"]["reasons"] == ["error"] * len(run.hits)
    # The damaged records are gone: the same prompts are computed, stored and hit again.
    run.assert_answers(found["again from memory"], [0] * len(run.hits))
    run.assert_answers(found["again from disk"], run.hits)


@ran("reset")
def test_nothing_from_before_a_reset_is_hit(family: str, runs):
    run = runs(family, "recompute")
    found = run.found["reset"]
    assert found["loads"] > 0
    assert found["offloads"] > 0
    assert not found["while busy"], "vLLM resets its own cache only when no request holds blocks"
    run.assert_answers(found["after busy"], [0] * 2 * len(run.hits))
    run.assert_answers(found["kept"], run.hits)
    assert found["at rest"]
    run.assert_answers(found["after"], [0] * len(run.hits))
    run.assert_answers(found["again"], run.hits)


@ran("full")
def test_a_full_device_costs_only_the_records(family: str, runs):
    run = runs(family, "recompute")
    found = run.found["full"]
    assert found["counts"]["tierstore_dropped_demotes{full}"] > 0
    assert found["room again"]["cached"] == [0] * len(run.hits)
    assert min(found["from disk"]["cached"]) > 0
    assert found["full"]["tokens"] == found["room again"]["tokens"] == found["from disk"]["tokens"]


@ran("vanished")
def test_a_directory_that_vanishes_is_used_again_when_it_is_back(family: str, runs):
    run = runs(family, "recompute")
    found = run.found["vanished"]
    run.assert_answers(found["without"], [0] * len(run.hits))
    run.assert_answers(found["still without"])  # or with what was just computed and stored again
    assert found["counts"]["tierstore_misses{absent}"] > 0
    assert found["back"]["cached"] == [0] * len(run.hits)
    assert min(found["used again"]["cached"]) > 0
    assert found["used again"]["tokens"] == found["back"]["tokens"]


@pytest.mark.parametrize("seam", SEAMS)
@ran("hooks")
def test_an_exception_in_a_hook_costs_the_cache_and_nothing_else(family: str, seam: str, runs):
    run = runs(family, "recompute")
    found = run.found["hooks"][seam]
    assert found["strikes"] > 0, f"{SEAMS[seam]} never failed"
    run.assert_answers(found["answers"])
    run.assert_answers(found["after"])
    assert found["freed"]
    assert (found["requests"], found["waiting loads"]) == (0, 0)
