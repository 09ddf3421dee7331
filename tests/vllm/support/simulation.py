"""Seeded runs of vLLM's scheduler and both halves of the connector on KV caches of known bytes.

    python tests/vllm/support/simulation.py --seeds 200 --steps 500 --first 0

A seed draws an engine (groups, asynchronous scheduling, guesses, blocks), the tiers (memory that is
smaller than what hits need, perhaps a disk that is slow, hangs, fails or flips bits) and, step by
step, what happens: requests of a few texts, aborts, preemptions, resets, another connector.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from simulated_engine import SimulatedEngine
from simulated_runner import Speculation
from simulated_settings import (
    BLOCK_TOKENS,
    FAMILIES,
    EngineSettings,
    tier_config,
)
from stepped_machine import Chances, Machine

__all__ = ["Scenario", "SimulationError", "draw_scenario", "simulate"]

TEXT_COUNT = 7
TEXT_TOKENS = 44
ANSWER_TOKENS_MAX = 14
ACTIVE_MAX = 9
_REST_STEPS_MAX = 4000
_STUCK_STEPS = 250


class SimulationError(AssertionError):
    """A run that went wrong; the message says which one, and how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What a seed stands for."""

    seed: int
    engine: EngineSettings
    chances: Chances
    memory_slots: int
    blocks_per_chunk: int = 1
    has_disk: bool = False
    arrival: float = 0.4
    abort: float = 0.03
    forget: float = 0.05
    reset: float = 0.004


@dataclass(slots=True)
class _Run:
    """One scenario under way."""

    scenario: Scenario
    engine: SimulatedEngine
    machine: Machine
    random: Random
    texts: list[list[int]]
    counts: Counter[str] = field(default_factory=Counter)
    name_count: int = 0


def draw_scenario(seed: int, family: str | None = None) -> Scenario:
    """Draw an engine and its tiers."""
    draw = Random(f"scenario {seed}")
    family = family or draw.choice(list(FAMILIES))
    has_states = family in ("states", "all")
    guesses = draw.choice([0, 0, 2, 3])
    speculation = Speculation(guesses, guesses > 0 and draw.random() < 0.5, draw.choice([0.5, 0.8]))
    step_tokens = draw.choice([12, 24, 48])
    window_tokens = draw.choice([3, 5, 9])
    block_count, group_count = _blocks_needed(family, speculation, window_tokens + 2 * step_tokens)
    has_disk = draw.random() < 0.5
    is_rough = draw.random() < 0.6
    return Scenario(
        seed=seed,
        engine=EngineSettings(
            family=family,
            is_async=draw.random() < 0.6,
            speculation=speculation,
            window_tokens=window_tokens,
            block_count=int(block_count * draw.choice([1.0, 1.2, 1.6, 2.5])) + 1,
            step_tokens_max=step_tokens,
            running_max=draw.choice([2, 4, 8]),
            retention=draw.choice([None, 0]),
            layout=draw.choice(["LBHNC", "LBNHC", "BLHNC"]),
            peer_chance=draw.choice([0.0, 0.4]),
            # With states vLLM counts too few blocks for such a hit, and its scheduler raises.
            peer_is_sync=not has_states and Random(f"peer {seed}").random() < 0.5,
            reserves_all=draw.random() < 0.5,
        ),
        chances=Chances(
            copy_happens=draw.choice([0.15, 0.5, 0.9]),
            task_waits=0.5,
            task_hangs=0.05 if is_rough else 0.0,
            read_fails=0.03 if is_rough else 0.0,
            read_flips=0.03 if is_rough else 0.0,
        ),
        memory_slots=draw.choice([24, 48, 160]) * group_count,
        blocks_per_chunk=1 if has_states else draw.choice([1, 2]),
        has_disk=has_disk,
    )


def _blocks_needed(family: str, speculation: Speculation, window_tokens: int) -> tuple[int, int]:
    """Count the blocks that the longest request needs by itself, and the groups."""
    length = TEXT_TOKENS + ANSWER_TOKENS_MAX + 2 * speculation.token_count + BLOCK_TOKENS
    whole = -(-length // BLOCK_TOKENS) + 1
    window = min(whole, -(-window_tokens // BLOCK_TOKENS) + 1)
    needed = {"a": whole, "w": window, "n": window, "s": 3 + speculation.token_count}
    groups = sorted({name[0] for name in FAMILIES[family]})
    if speculation.has_draft_layers and family != "full":
        groups.append("a")  # one group more
    return sum(needed[group] for group in groups), len(groups)


def simulate(scenario: Scenario, step_count: int, folder: Path) -> Counter[str]:
    """Run one scenario to its end; return what happened how often.

    Raises:
        SimulationError: a byte was wrong, something leaked, or something did not end.
    """
    print(scenario, flush=True)
    machine = Machine(scenario.seed, scenario.chances)
    random = Random(f"events {scenario.seed}")
    config = tier_config(
        folder if scenario.has_disk else None,
        memory=f"{4 * scenario.memory_slots}KiB",
        blocks_per_chunk=scenario.blocks_per_chunk,
    )
    with machine.installed():
        engine = SimulatedEngine(scenario.engine, config, machine, random)
        run = _Run(scenario, engine, machine, random, _texts(random))
        try:
            for _ in range(step_count):
                _disturb(run)
                _step(run)
            _end(run)
        except Exception as error:
            engine.abandon()
            at = f"seed {scenario.seed}, step {machine.step_count}"
            raise SimulationError(f"{at}, {scenario}: {error!r}") from error
        engine.close()
    return _counted(run)


def _texts(random: Random) -> list[list[int]]:
    """Make a few texts that begin like one another."""
    texts: list[list[int]] = []
    for _ in range(TEXT_COUNT):
        shared = random.choice(texts)[: random.randrange(TEXT_TOKENS)] if texts else []
        own = [random.randrange(1, 60) for _ in range(TEXT_TOKENS - len(shared))]
        texts.append([*shared, *own])
    return texts


def _step(run: _Run) -> None:
    run.machine.step()
    run.engine.step()


def _disturb(run: _Run) -> None:
    """Let happen what the seed says, before a step."""
    scenario, engine, random = run.scenario, run.engine, run.random
    active = engine.active
    if len(active) < ACTIVE_MAX and random.random() < scenario.arrival:
        _add(run, random.choice(run.texts)[: random.randrange(1, TEXT_TOKENS + 1)])
    if active and random.random() < scenario.abort:
        name = random.choice(active)
        run.counts[f"aborted while {engine.scheduler.requests[name].status.name}"] += 1
        engine.abort(name)
    if random.random() < scenario.forget and engine.forget_gpu():
        run.counts["the GPU's cache was emptied"] += 1
    if random.random() < scenario.reset:
        if engine.change_weights():
            run.counts["weights changed"] += 1
        else:
            engine.connector.reset_cache()
            run.counts["reset under way"] += 1


def _add(run: _Run, prompt: list[int], *, answer_tokens: int = 0) -> None:
    """Bring a request; now and then it goes on with an answer that was given before."""
    engine, random = run.engine, run.random
    if engine.answers and random.random() < 0.2 and not answer_tokens:
        name = random.choice(list(engine.answers))
        prompt = (engine.prompts[name] + engine.answers[name])[:TEXT_TOKENS]
    run.name_count += 1
    answer_tokens = answer_tokens or random.randrange(1, ANSWER_TOKENS_MAX + 1)
    engine.add(f"r{run.name_count}", prompt, answer_tokens)


def _end(run: _Run) -> None:
    """Let all requests finish, ask for every text once more, and look for leaks."""
    chances = run.machine.chances
    chances.task_hangs = chances.read_fails = chances.read_flips = 0.0
    _rest(run)
    for text in run.texts:
        if not run.engine.forget_gpu():
            break
        _add(run, text, answer_tokens=2)
        _rest(run)
    leaks = run.engine.leaks()
    if leaks:
        raise SimulationError("; ".join(leaks))


def _rest(run: _Run) -> None:
    for number in range(_REST_STEPS_MAX):
        if not run.engine.has_work():
            return
        _step(run)
        if number % _STUCK_STEPS == _STUCK_STEPS - 1 and run.engine.abort_deadlocked():
            run.counts["vLLM's own deadlocks"] += 1
    raise SimulationError(f"does not come to rest: {sorted(run.engine.scheduler.requests)}")


def _counted(run: _Run) -> Counter[str]:
    engine = run.engine
    run.counts.update(engine.peer.counts)
    run.counts["preempted"] = engine.runner.preempted_count
    run.counts["steps"] = run.machine.step_count
    run.counts["positions verified"] = engine.runner.verified_count
    run.counts["loads of the other connector"] = engine.peer.load_count
    if run.machine.copy_engine is not None:
        run.counts["copies fenced"] = run.machine.copy_engine.fenced_count
    return run.counts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run many seeds; print what went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300, help="of each seed, before its end")
    parser.add_argument("--family", choices=sorted(FAMILIES))
    parser.add_argument("--alone", action="store_true", help="without another connector")
    options = parser.parse_args(arguments)
    total: Counter[str] = Counter()
    failures: list[str] = []
    for seed in range(options.first, options.first + options.seeds):
        with tempfile.TemporaryDirectory(prefix="simulation-") as folder:
            try:
                scenario = draw_scenario(seed, options.family)
                if options.alone:
                    engine = replace(scenario.engine, peer_chance=0.0)
                    scenario = replace(scenario, engine=engine)
                total += simulate(scenario, options.steps, Path(folder) / "tier")
            except SimulationError as error:
                failures.append(str(error))
                print(f"FAILED: {error}", flush=True)
    for name, count in sorted(total.items()):
        print(f"{count:10d} {name}")
    print(f"{len(failures)} of {options.seeds} seeds failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
