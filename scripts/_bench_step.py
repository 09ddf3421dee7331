"""The scheduler's side of an engine step: many long requests decode while others come and go.

Every step, each running request gets a token, one request ends, and one of the same length takes
its place: its prompt is looked up, loaded as far as it is known (half of the prompts share half of
their text with an earlier one), and the rest is computed at once. No byte is moved: commands are
answered one step later. Steps start at a fixed pace, as those of an engine do, so that the threads
behind the catalogs run in between, and some of them into the next step.
"""

import gc
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tierstore.config import PrimaryConfig, SecondaryConfig, StoreConfig
from tierstore.layout import PAGE_BYTES, ChunkOrder, GroupKind
from tierstore.manifest import GroupManifest, Manifest
from tierstore.metrics import Counters
from tierstore.planner import (
    EngineStep,
    FullTable,
    LoadTarget,
    NewBlocks,
    OffloadPlanner,
    PlannedStep,
    Progress,
)
from tierstore.tier.stack import TierStack
from tierstore.transfer import Command, TransferDone

__all__ = ["StepTimes", "measure_steps"]

BLOCK_TOKENS = 16
REQUEST_COUNT = 256
PROMPT_TOKENS = 8192
STEP_SECONDS = 0.02
RESIDENT_CHUNKS = 200_000
RECORD_COUNT = 400_000
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS


@dataclass
class StepTimes:
    """One entry per step."""

    seconds: list[float] = field(default_factory=list)
    gc_seconds: list[float] = field(default_factory=list)
    """The part of it that the garbage collector took."""
    loads: int = 0
    offloads: int = 0


@dataclass
class _Request:
    name: str
    hashes: list[bytes]
    blocks: list[int]
    tokens: int = 0
    """Computed."""


def measure_steps(directory: Path, step_count: int, *, with_disk: bool) -> StepTimes:
    """Run a full engine for so many steps; `directory` is for the catalog."""
    manifest = _manifest()
    disk = SecondaryConfig(
        name="disk", backend="file", path=directory, capacity_bytes=RECORD_COUNT * 2 * PAGE_BYTES
    )
    config = StoreConfig(
        primary=PrimaryConfig(capacity_bytes=RESIDENT_CHUNKS * PAGE_BYTES),
        secondary=(disk,) if with_disk else (),
    )
    counters = Counters()
    stack = TierStack.open(config, manifest, rank_count=1, counters=counters)
    try:
        engine = _Engine(stack, manifest, counters)
        warmup_count = RESIDENT_CHUNKS // PROMPT_BLOCKS
        times = StepTimes()
        with _watched_gc() as pauses:
            # As vLLM does when it is up: what lives from now on is not looked at by every pass.
            gc.freeze()
            for number in range(warmup_count + step_count):
                start = time.perf_counter()
                engine.step(times if number >= warmup_count else StepTimes(), pauses)
                left = STEP_SECONDS - (time.perf_counter() - start)
                if left > 0:
                    time.sleep(left)
        if engine.planner.check() or stack.check():
            raise RuntimeError("the planner or the tiers are unsound")
    finally:
        gc.unfreeze()
        stack.close()
    return times


class _Engine:
    def __init__(self, stack: TierStack, manifest: Manifest, counters: Counters) -> None:
        self.planner = OffloadPlanner(
            manifest.group_specs(),
            manifest.namespace,
            stack,
            hash_tokens=BLOCK_TOKENS,
            counters=counters,
        )
        self._random = random.Random(1)  # noqa: S311 - reproducible, not secret
        self._free = list(range(1, (REQUEST_COUNT + 8) * (PROMPT_BLOCKS + 40)))
        self._texts: list[list[bytes]] = []
        self._running: list[_Request] = []
        self._loading: dict[str, _Request] = {}
        self._answers: list[Command] = []
        self._load_requests: dict[int, str] = {}
        self._count = 0

    def step(self, times: StepTimes, pauses: list[float]) -> None:
        """Run one step; the engine's own work is not timed."""
        leaving = self._running.pop(0) if len(self._running) >= REQUEST_COUNT else None
        coming = self._new_request()
        commands, self._answers = self._answers, []
        arrived = [
            self._loading.pop(self._load_requests.pop(command.job_id))
            for command in commands
            if command.job_id in self._load_requests
        ]
        decoding = list(self._running)
        grown = [request for request in decoding if request.tokens % BLOCK_TOKENS == 0]
        for request in grown:
            request.blocks.append(self._free.pop())
            request.hashes.append(os.urandom(32))
        tables = [FullTable(r.name, [r.blocks], r.tokens) for r in arrived]
        new_blocks = [NewBlocks(r.name, [r.blocks[-1:]]) for r in grown]
        paused = sum(pauses)

        start = time.perf_counter()
        for command in commands:
            self.planner.complete(TransferDone(job_id=command.job_id))
        if leaving:
            self.planner.finish_request(leaving.name)
        self.planner.add_request(coming.name, coming.hashes)
        hit = self.planner.match(coming.name, 0, PROMPT_TOKENS).token_count
        if hit:
            blocks = {0: coming.blocks[: hit // BLOCK_TOKENS]}
            self.planner.begin_load(coming.name, LoadTarget(0, hit, blocks))
        else:
            tables.append(FullTable(coming.name, [coming.blocks], 0))
        progress = [
            Progress(r.name, r.tokens, r.tokens + 1)
            for r in decoding
            if self.planner.completes_chunk(r.name, r.tokens + 1)
        ]
        computed = arrived if hit else [*arrived, coming]
        progress += [Progress(r.name, r.tokens, PROMPT_TOKENS) for r in computed]
        planned = self.planner.plan_step(
            EngineStep(full_tables=tables, new_blocks=new_blocks, progress=progress)
        )
        times.seconds.append(time.perf_counter() - start)
        times.gc_seconds.append(sum(pauses) - paused)

        if leaving:
            self._free += leaving.blocks
        self._finish(planned, coming, hit, decoding, computed)
        times.loads += len(planned.load_requests)
        times.offloads += len(planned.plan.commands)

    def _finish(
        self,
        planned: PlannedStep,
        coming: _Request,
        hit: int,
        decoding: list[_Request],
        computed: list[_Request],
    ) -> None:
        for request in decoding:
            request.tokens += 1
        for request in computed:
            request.tokens = PROMPT_TOKENS
            self._running.append(request)
        if hit and coming.name not in planned.failed_requests:
            coming.tokens = hit
            self._loading[coming.name] = coming
        elif hit:
            raise RuntimeError("a hit was gone within the step that promised it")
        self._load_requests.update(planned.load_requests)
        self._answers = list(planned.plan.commands)

    def _new_request(self) -> _Request:
        self._count += 1
        hashes = [os.urandom(32) for _ in range(PROMPT_BLOCKS)]
        if self._count % 2 and len(self._texts) > REQUEST_COUNT:
            shared = self._random.choice(self._texts)
            hashes[: PROMPT_BLOCKS // 2] = shared[: PROMPT_BLOCKS // 2]
        self._texts.append(hashes[:])
        del self._texts[: -RECORD_COUNT // PROMPT_BLOCKS // 2]
        blocks = [self._free.pop() for _ in range(PROMPT_BLOCKS)]
        return _Request(f"request-{self._count}", hashes, blocks)


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
