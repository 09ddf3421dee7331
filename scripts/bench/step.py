"""The scheduler's side of an engine step: many long requests decode while others come and go.

Every step, each running request gets a token; every few steps one of them ends and another of the
same length takes its place: its prompt is looked up, loaded as far as it is known (half of the
prompts share half of their text with an earlier one), and the rest is computed, at once or in
several steps. The hooks are called as vLLM's scheduler calls them, with vLLM's own objects. Steps
start at a fixed pace, as those of an engine do, so that the threads behind the catalogs run in
between, and some of them into the next step.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from bench.engine import BLOCK_TOKENS, PROMPT_BLOCKS, PROMPT_TOKENS, Engine, Scenario, StepTimes
from tierstore.config import PrimaryConfig, SecondaryConfig, StoreConfig
from tierstore.executor import TransferExecutor
from tierstore.layout import PAGE_BYTES, ChunkOrder, GroupKind
from tierstore.manifest import GroupManifest, Manifest
from tierstore.metrics import Counters
from tierstore_vllm.layout import EngineShape
from tierstore_vllm.scheduler import SchedulerHalf

__all__ = ["SCENARIOS", "Tiers", "measure_steps"]

Tiers = Literal["memory", "disk", "disk+worker"]
"""`disk`: the worker is another process, which answers after a step. `disk+worker`: it shares the
process, as vLLM's only worker does, and its threads write and read records of a page each."""

SCENARIOS = (
    Scenario("no prompt", 0, PROMPT_TOKENS),
    Scenario("a prompt every 16 steps", 16, PROMPT_TOKENS),
    Scenario("a prompt every 4 steps", 4, PROMPT_TOKENS),
    Scenario("a prompt every 4 steps, 2048 tokens a step", 4, 2048),
    Scenario("a prompt every step", 1, PROMPT_TOKENS),
)

STEP_SECONDS = 0.02
RESIDENT_CHUNKS = 150_000
RECORD_COUNT = 300_000


def measure_steps(directory: Path, step_count: int, tiers: Tiers) -> dict[str, StepTimes]:
    """Run a full engine for so many steps of each scenario; `directory` is for the disk tier."""
    manifest = _manifest()
    disk = SecondaryConfig(
        name="disk", backend="file", path=directory, capacity_bytes=RECORD_COUNT * 2 * PAGE_BYTES
    )
    config = StoreConfig(
        primary=PrimaryConfig(capacity_bytes=RESIDENT_CHUNKS * PAGE_BYTES),
        secondary=() if tiers == "memory" else (disk,),
    )
    shape = EngineShape(hash_block_tokens=BLOCK_TOKENS, alignment_tokens=BLOCK_TOKENS, rank_count=1)
    executor = None
    if tiers == "disk+worker":
        executor = TransferExecutor.open(
            config, manifest, rank=0, rank_count=1, caches=None, counters=Counters()
        )
    half = SchedulerHalf.open(config, manifest, shape)
    results: dict[str, StepTimes] = {}
    try:
        engine = Engine(half, executor)
        with _watched_gc() as pauses:
            chunk_count = RESIDENT_CHUNKS if tiers == "memory" else RECORD_COUNT
            engine.fill(chunk_count // PROMPT_BLOCKS, pauses)
            # As vLLM does when it is up: what lives from now on is not looked at by every pass.
            gc.collect()
            gc.freeze()
            for scenario in SCENARIOS:
                times = results[scenario.name] = StepTimes()
                for _ in range(step_count):
                    start = time.perf_counter()
                    engine.step(scenario, times, pauses)
                    left = STEP_SECONDS - (time.perf_counter() - start)
                    if left > 0:
                        time.sleep(left)
        if problems := half.check():
            raise RuntimeError("; ".join(problems))
    finally:
        gc.unfreeze()
        half.close()
        if executor is not None:
            executor.close()
    return results


@contextmanager
def _watched_gc() -> Iterator[list[float]]:
    """Collect the seconds of each run of the garbage collector."""
    pauses: list[float] = []
    started = 0.0

    def watch(phase: str, info: dict[str, int]) -> None:  # noqa: ARG001 - called by gc
        nonlocal started
        if phase == "start":
            started = time.perf_counter()
        else:
            pauses.append(time.perf_counter() - started)

    gc.callbacks.append(watch)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(watch)


def _manifest() -> Manifest:
    group = GroupManifest(
        kind=GroupKind.FULL,
        tokens_per_block=BLOCK_TOKENS,
        layer_names=("layer",),
        page_bytes=(PAGE_BYTES,),
    )
    return Manifest(
        engine="bench",
        model="bench",
        revision="",
        kv_dtype="uint8",
        quantization="",
        layout="opaque",
        chunk_order=ChunkOrder.LAYER_MAJOR,
        blocks_per_chunk=1,
        hash_algorithm="random",
        hash_seed="",
        parallel_shape="tp1-pp1-cp1",
        groups=(group,),
    )
