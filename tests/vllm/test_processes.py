"""Engines of several processes: tensor parallel ranks, and engines that share a path on disk.

Goal: the same answers as without tierstore, hits on every rank, one capacity for all.
Method: real engines; what one stored, another one loads. A round of one engine may wait for a file
that a round of the other makes.
"""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from engine import EngineResult, Round, run_engine
from scenario import Scenario, assert_same_answers, tier_config

from tierstore import Manifest, TierStore, make_offload_keys

pytestmark = pytest.mark.vllm

NOISE = 1e-3
TWO_RANKS = {"tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    from tiny_models import DTYPES, build_model

    path = build_model("llama", tmp_path_factory.mktemp("models"))
    return Scenario(path, DTYPES["llama"], 32)


@pytest.fixture(scope="module")
def prompts(scenario: Scenario) -> list[list[int]]:
    return [prompt for prompt in scenario.first if len(prompt) >= 200]


def expected(prompts: list[list[int]]) -> list[int]:
    return [(len(prompt) - 1) // 32 * 32 for prompt in prompts]


def cached(result: EngineResult, name: str) -> list[int]:
    return [answer.cached for answer in result.rounds[name]]


def disk_usage(path: Path) -> int:
    done = subprocess.run(["du", "-s", "-B1", path], capture_output=True, check=True, text=True)
    return int(done.stdout.split()[0])


def flip_bytes(rank_folder: Path) -> None:
    """Damage the first records of one rank: a byte in each of the first payload pages."""
    (segment, *_) = sorted(rank_folder.glob("*.seg"))
    with segment.open("r+b") as file:
        for page in range(1, 9):
            file.seek(page * 4096 + 100)
            (value,) = file.read(1)
            file.seek(page * 4096 + 100)
            file.write(bytes([value ^ 1]))


def test_two_tensor_parallel_ranks_hit_in_memory_and_on_disk(
    scenario: Scenario, prompts: list[list[int]], tmp_path: Path
) -> None:
    rounds = {name: Round(prompts=prompts) for name in ("cold", "warm")}
    reference = run_engine(scenario.job(rounds, engine=TWO_RANKS), tmp_path)
    config = tier_config("file", tmp_path / "tier")
    first = run_engine(scenario.job(rounds, config=config, engine=TWO_RANKS), tmp_path)
    for name in rounds:
        assert_same_answers(first, name, reference, name, NOISE)
    assert cached(first, "warm") == expected(prompts)
    assert {path.name for path in (tmp_path / "tier").glob("rank*")} == {"rank0", "rank1"}
    assert disk_usage(tmp_path / "tier") <= 512 << 20

    # Damage one rank: what the other one loads must not be used either.
    flip_bytes(tmp_path / "tier" / "rank1")
    again = {"disk": Round(prompts=prompts, reset=False, one_by_one=True)}
    restarted = run_engine(scenario.job(again, config=config, engine=TWO_RANKS), tmp_path)
    assert_same_answers(restarted, "disk", reference, "cold", NOISE)
    found = list(zip(cached(restarted, "disk"), expected(prompts), strict=True))
    assert any(hit < whole for hit, whole in found)
    assert any(hit == whole for hit, whole in found)
    assert restarted.metrics["tierstore_failed_loads"] > 0


def test_engines_that_share_a_path_load_each_others_chunks_while_they_run(
    scenario: Scenario, prompts: list[list[int]], tmp_path: Path
) -> None:
    config = tier_config("file", tmp_path / "tier")
    mine, theirs = prompts[::2], prompts[1::2]
    ready = [str(tmp_path / f"stored-{i}") for i in range(2)]
    jobs = [
        scenario.job(
            {
                "store": Round(prompts=own, announces=ready[number]),
                "load": Round(
                    prompts=others, waits_for=ready[1 - number], reset=False, one_by_one=True
                ),
            },
            config=config,
        )
        for number, (own, others) in enumerate([(mine, theirs), (theirs, mine)])
    ]
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(run_engine, jobs, [tmp_path / "a", tmp_path / "b"]))
    assert cached(results[0], "load") == expected(theirs)
    assert cached(results[1], "load") == expected(mine)
    for result in results:
        assert result.metrics["tierstore_promoted_chunks"] > 0
    assert disk_usage(tmp_path / "tier") <= 512 << 20
    # The path is sound, and has room for another model's chunks.
    manifest = Manifest.simple("another model", chunk_bytes=65536)
    keys = make_offload_keys(manifest.namespace, group_idx=0, block_hashes=[bytes(32)])
    chunk = np.full((1, 65536), 7, np.uint8)
    with TierStore.open(config, manifest) as store:
        assert store.put(keys, chunk) == [True]
        store.flush()
        assert store.check() == []
    with TierStore.open(config, manifest) as store:
        found = np.zeros_like(chunk)
        assert store.get(keys, found) == [True]
        assert (found == chunk).all()
