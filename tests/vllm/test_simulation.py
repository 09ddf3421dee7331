"""vLLM's scheduler and both halves of the connector, step by step, on KV caches of known bytes.

Goal: whatever happens in whatever order, no token is computed from a wrong byte, every request
ends, and nothing leaks.
Method: see `simulation`. Each test runs some of its seeds;
`python tests/vllm/support/simulation.py` runs as many as asked for. Controls take one rule out of
the planner and expect to be caught.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from known_bytes import WrongByteError
from simulated_runner import Speculation
from simulated_settings import FAMILIES
from simulation import Scenario, SimulationError, draw_scenario, simulate
from stepped_machine import Chances

from tierstore.planner.groups import GroupOffloadConfig
from tierstore.planner.in_flight import InFlight

pytestmark = pytest.mark.vllm

SEEDS_PER_FAMILY = 8
STEPS = 100
CONTROL_SEEDS = 40


def run_all(scenarios: Iterable[Scenario], folder: Path, *, steps: int = STEPS) -> Counter[str]:
    total: Counter[str] = Counter()
    for number, scenario in enumerate(scenarios):
        total += simulate(scenario, steps, folder / str(number))
    return total


def alone(scenario: Scenario) -> Scenario:
    return replace(scenario, engine=replace(scenario.engine, peer_chance=0.0))


def with_peer(scenario: Scenario) -> Scenario:
    """Offloads that take long, while others write into blocks that they may read."""
    engine = replace(scenario.engine, peer_chance=0.5)
    return replace(scenario, engine=engine, chances=Chances(copy_happens=0.1), abort=0.1)


def with_peer_that_is_waited_for(scenario: Scenario) -> Scenario:
    """The other connector loads in the step that admits its request; few offloads end by then."""
    engine = replace(scenario.engine, peer_chance=0.5, peer_is_sync=True)
    return replace(scenario, engine=engine, chances=Chances(copy_happens=0.03), abort=0.1)


def handing_states_over(seed: int) -> Scenario:
    """States, guesses that run over boundaries, and hardly a free block."""
    drawn = alone(draw_scenario(seed, "states"))
    engine = replace(
        drawn.engine,
        is_async=True,
        speculation=Speculation(2 + seed % 2, is_right=0.8),
        block_count=25,
        running_max=6,
        retention=None,
    )
    return replace(drawn, engine=engine, memory_slots=320, has_disk=False, forget=0.2, reset=0.0)


def with_windows_smaller_than_chunks(seed: int) -> Scenario:
    drawn = alone(draw_scenario(seed, "windows"))
    engine = replace(drawn.engine, window_tokens=3)
    return replace(drawn, engine=engine, blocks_per_chunk=2)


def with_attention_alone(seed: int) -> Scenario:
    return alone(draw_scenario(seed, "full"))


def on_a_bad_disk(seed: int) -> Scenario:
    """Memory for little, a disk that often fails, and hangs for longer than it may."""
    drawn = alone(draw_scenario(seed))
    chances = Chances(task_hangs=0.3, read_fails=0.25, read_flips=0.5)
    changes = {"memory_slots": 32, "has_disk": True, "arrival": 0.2, "forget": 0.4}
    return replace(drawn, chances=chances, **changes)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_all_that_is_read_is_what_its_tokens_say(family: str, tmp_path: Path) -> None:
    scenarios = [alone(draw_scenario(seed, family)) for seed in range(SEEDS_PER_FAMILY)]
    total = run_all(scenarios, tmp_path)
    happened = {name for name, count in total.items() if count}
    assert {"preempted", "copies fenced", "loaded_chunks_total"} <= happened, total
    assert "aborted while WAITING_FOR_REMOTE_KVS" in happened, total


def test_a_state_block_that_is_handed_over_in_the_step_that_offers_it_is_not_kept(
    tmp_path: Path,
) -> None:
    total = run_all((handing_states_over(seed) for seed in range(20)), tmp_path)
    assert total["loaded_chunks_total"] > 0, total


def test_offloads_have_read_the_blocks_that_another_connector_loads_into(tmp_path: Path) -> None:
    total = run_all((with_peer(draw_scenario(seed)) for seed in range(12)), tmp_path)
    assert total["loads of the other connector"] > 0, total
    assert total["loaded_chunks_total"] > 0, total


def test_offloads_have_read_the_blocks_that_another_connector_loads_for_the_very_step(
    tmp_path: Path,
) -> None:
    scenarios = (with_peer_that_is_waited_for(draw_scenario(seed, "full")) for seed in range(6, 14))
    total = run_all(scenarios, tmp_path)
    assert total["loads of the other connector"] > 0, total
    assert total["loaded_chunks_total"] > 0, total


def test_loads_from_a_disk_that_fails_and_hangs_and_flips_bits_lose_no_request(
    tmp_path: Path,
) -> None:
    total = run_all((on_a_bad_disk(seed) for seed in range(24)), tmp_path)
    for reason in ("corrupt", "deadline", "io_error", "stalled"):
        assert total[f'misses_total{{reason="{reason}"}}'] > 0, (reason, total)
    assert total['promoted_chunks_total{tier="disk"}'] > 0, total


def no_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InFlight, "readers_of", lambda self, block_ids: set())
    monkeypatch.setattr(InFlight, "offloads_of", lambda self, request_ids: set())


def no_drop_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupOffloadConfig, "alive_from", lambda self, computed_tokens: 0)


def chunks_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    named = GroupOffloadConfig.hashes

    def shifted(self: Any, block_hashes: Any, first_chunk: int, end_chunk: int) -> Any:
        first = max(first_chunk - 1, 0)
        names = list(named(self, block_hashes, first, end_chunk))
        return names[: max(end_chunk - first_chunk, 0)]

    monkeypatch.setattr(GroupOffloadConfig, "hashes", shifted)


@pytest.mark.parametrize(
    ("draw", "break_planner"),
    [
        (with_attention_alone, no_fence),
        (with_windows_smaller_than_chunks, no_drop_rule),
        (with_attention_alone, chunks_off_by_one),
    ],
)
def test_a_planner_without_one_of_its_rules_is_caught(
    draw: Callable[[int], Scenario],
    break_planner: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_planner(monkeypatch)
    with pytest.raises(SimulationError) as caught:
        run_all((draw(seed) for seed in range(CONTROL_SEEDS)), tmp_path)
    assert isinstance(caught.value.__cause__, WrongByteError)


@pytest.mark.exhaustive
def test_no_wrong_byte_in_a_hundred_thousand_steps(tmp_path: Path) -> None:
    total: Counter[str] = Counter()
    seed = 10_000
    while total["steps"] < 100_000:
        total += simulate(draw_scenario(seed), 300, tmp_path / str(seed))
        seed += 1
    print(total)
