"""An engine for `bench.step`: vLLM's objects and its scheduler's order of calls, but no model."""

import os
import random
import resource
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from vllm import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import Request

from tierstore.executor import TransferExecutor
from tierstore.transfer import Command, JobId, Load, Offload, TransferDone
from tierstore_vllm.messages import RankAnswer, StepMetadata, WorkerReport
from tierstore_vllm.scheduler import SchedulerHalf

__all__ = ["BLOCK_TOKENS", "PROMPT_BLOCKS", "PROMPT_TOKENS", "Engine", "Scenario", "StepTimes"]

BLOCK_TOKENS = 16
PROMPT_TOKENS = 8192
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
REQUEST_COUNT = 256
_TEXT_COUNT = 400
"""Prompts that a new one may share its first half with; beyond the primary tier's reach."""

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Scenario:
    """The rate of requests, and how they are computed."""

    name: str
    arrival_steps: int
    """One request arrives, and one ends, every so many steps; 0: never."""
    budget_tokens: int
    """Prompt tokens that one step computes at most."""


@dataclass
class StepTimes:
    """One entry per step."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    """What of it the calling thread computed; the rest it waited for the interpreter or a core."""
    gc_seconds: list[float] = field(default_factory=list)
    """What of it the garbage collector took."""
    wait_counts: list[int] = field(default_factory=list)
    """How often the calling thread had to wait: for the interpreter, or a lock."""
    chunks: list[int] = field(default_factory=list)
    """Chunks offered by the step's requests: completed or looked up."""
    hooks: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Each call by hook."""


class _Clock:
    """Times the hooks of one step."""

    def __init__(self, times: StepTimes, gc_pauses: list[float]) -> None:
        self._times = times
        self._gc_pauses = gc_pauses
        self.seconds = self.cpu_seconds = self.gc_seconds = 0.0
        self.wait_count = 0

    def time(
        self,
        hook: Callable[Arguments, Answer],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Answer:
        """Call a hook."""
        pauses = len(self._gc_pauses)
        waits = _wait_count()
        cpu = time.thread_time()
        start = time.perf_counter()
        answer = hook(*args, **kwargs)
        seconds = time.perf_counter() - start
        self.cpu_seconds += time.thread_time() - cpu
        self.wait_count += _wait_count() - waits
        self.seconds += seconds
        self.gc_seconds += sum(self._gc_pauses[pauses:])
        self._times.hooks[hook.__name__].append(seconds)
        return answer

    def stop(self, chunk_count: int) -> None:
        """Add the step."""
        self._times.seconds.append(self.seconds)
        self._times.cpu_seconds.append(self.cpu_seconds)
        self._times.gc_seconds.append(self.gc_seconds)
        self._times.wait_counts.append(self.wait_count)
        self._times.chunks.append(chunk_count)


class _DataPlane:
    """Answers commands one step later; those about records when a real executor has answered."""

    def __init__(self, executor: TransferExecutor | None) -> None:
        self._executor = executor
        self._answers: list[TransferDone] = []

    def take_report(self) -> WorkerReport:
        """Return the answers of one rank."""
        answers, self._answers = self._answers, []
        if self._executor is not None:
            answers += self._executor.poll()
        return WorkerReport(
            {answer.job_id: RankAnswer.of(answer, again=False) for answer in answers}
        )

    def submit(self, metadata: StepMetadata) -> None:
        """Take one step's commands; copies between blocks and slots are not made."""
        moved: list[Command] = []
        for command in metadata.plan.commands:
            promotes = command.promotes if isinstance(command, Load) else ()
            if self._executor is None or isinstance(command, Offload):
                self._answers.append(TransferDone(job_id=command.job_id))
            elif isinstance(command, Load):
                moved.append(Load(job_id=command.job_id, parts=(), promotes=promotes))
            else:
                moved.append(command)
        if self._executor is not None:
            self._executor.submit(moved)


class Engine:
    """Requests, blocks and steps."""

    def __init__(self, half: SchedulerHalf, executor: TransferExecutor | None) -> None:
        self.half = half
        self._data = _DataPlane(executor)
        self._random = random.Random(1)  # noqa: S311 - reproducible, not secret
        self._free = [
            KVCacheBlock(i) for i in range(1, (REQUEST_COUNT + 16) * (PROMPT_BLOCKS + 128))
        ]
        self._blocks: dict[str, list[KVCacheBlock]] = {}
        # One object per prompt, so that these are nothing to the garbage collector.
        self._texts: list[bytes] = []
        self._waiting: list[Request] = []
        self._loading: dict[str, tuple[Request, int]] = {}
        self._load_requests: dict[JobId, str] = {}
        self._prefilling: list[Request] = []
        self._admitted: set[str] = set()
        self._running: list[Request] = []
        self._count = self._step_count = 0

    def fill(self, prompt_count: int, gc_pauses: list[float]) -> None:
        """Store so many prompts without a pause."""
        for _ in range(prompt_count):
            self.step(Scenario("", 1, PROMPT_TOKENS), StepTimes(), gc_pauses)

    def step(self, scenario: Scenario, times: StepTimes, gc_pauses: list[float]) -> None:
        """Run one step; the engine's own work is not timed."""
        clock, half = _Clock(times, gc_pauses), self.half
        self._step_count += 1
        arrives = scenario.arrival_steps and self._step_count % scenario.arrival_steps == 0
        report = self._data.take_report()
        arrived = [self._load_requests.pop(i) for i in report.answers if i in self._load_requests]
        coming = self._new_request() if arrives else None
        leaving = self._running.pop(0) if coming and len(self._running) >= REQUEST_COUNT else None

        clock.time(half.take_report, report)
        if leaving is not None:
            clock.time(half.request_finished, leaving)
            self._free += self._blocks.pop(leaving.request_id)
            self._admitted.discard(leaving.request_id)
        clock.time(half.take_stats)
        if coming is not None:
            clock.time(half.on_new_request, coming)
            self._waiting.append(coming)
        self._prefilling += [self._loaded(name) for name in arrived]
        looked_up = sum(len(request.block_hashes) for request in self._waiting)
        self._waiting = [request for request in self._waiting if not self._admit(request, clock)]
        output, completed = self._schedule(scenario)
        metadata = clock.time(half.build_connector_meta, output)
        clock.time(half.has_work)
        clock.stop(completed + looked_up)

        if metadata.failed_requests:
            raise RuntimeError("a hit was gone within the step that promised it")
        self._load_requests.update(metadata.load_requests)
        self._data.submit(metadata)
        self._advance(output)

    def _admit(self, request: Request, clock: _Clock) -> bool:
        tokens, _ = clock.time(self.half.get_num_new_matched_tokens, request, 0)
        if tokens is None:
            return False
        self._allocate(request, tokens)
        blocks = KVCacheBlocks((self._blocks[request.request_id],))
        clock.time(self.half.update_state_after_alloc, request, blocks, tokens)
        if tokens:
            self._loading[request.request_id] = request, tokens
        else:
            self._prefilling.append(request)
        return True

    def _loaded(self, name: str) -> Request:
        request, tokens = self._loading.pop(name)
        request.num_computed_tokens = tokens
        return request

    def _allocate(self, request: Request, tokens: int) -> list[KVCacheBlock]:
        blocks = self._blocks.setdefault(request.request_id, [])
        count = max(0, -(-tokens // BLOCK_TOKENS) - len(blocks))
        fresh = [self._free.pop() for _ in range(count)]
        blocks += fresh
        return fresh

    def _schedule(self, scenario: Scenario) -> tuple[SchedulerOutput, int]:
        """Describe the step; count the chunks that it completes."""
        scheduled: dict[str, int] = {request.request_id: 1 for request in self._running}
        left = scenario.budget_tokens
        for request in self._prefilling:
            tokens = min(left, request.num_tokens - request.num_computed_tokens)
            if tokens:
                scheduled[request.request_id] = tokens
            left -= tokens
        new: list[NewRequestData] = []
        names: list[str] = []
        new_block_ids: list[tuple[list[int], ...] | None] = []
        computed: list[int] = []
        chunk_count = 0
        for request in (*self._running, *self._prefilling):
            name = request.request_id
            if name not in scheduled:
                continue
            before, after = (
                request.num_computed_tokens,
                request.num_computed_tokens + scheduled[name],
            )
            chunk_count += after // BLOCK_TOKENS - before // BLOCK_TOKENS
            fresh = self._allocate(request, after)
            if name in self._admitted:
                names.append(name)
                computed.append(before)
                new_block_ids.append(([block.block_id for block in fresh],) if fresh else None)
            else:
                self._admitted.add(name)
                table = ([block.block_id for block in self._blocks[name]],)
                new.append(
                    NewRequestData(
                        req_id=name,
                        prompt_token_ids=request.prompt_token_ids,
                        mm_features=[],
                        sampling_params=request.sampling_params,
                        pooling_params=None,
                        block_ids=table,
                        num_computed_tokens=before,
                        lora_request=None,
                    )
                )
        cached = CachedRequestData(
            req_ids=names,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=new_block_ids,
            num_computed_tokens=computed,
            num_output_tokens=[0] * len(names),
        )
        output = SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=set(),
            free_encoder_mm_hashes=[],
        )
        return output, chunk_count

    def _advance(self, output: SchedulerOutput) -> None:
        for request in (*self._running, *self._prefilling):
            request.num_computed_tokens += output.num_scheduled_tokens.get(request.request_id, 0)
        for request in self._running:
            request.append_output_token_ids(1)
        done = [r for r in self._prefilling if r.num_computed_tokens == r.num_tokens]
        self._prefilling = [r for r in self._prefilling if r not in done]
        for request in done:
            # They differ in their progress, so that every step completes some chunks.
            for _ in range(self._random.randint(1, BLOCK_TOKENS)):
                request.append_output_token_ids(1)
            request.num_computed_tokens = request.num_tokens - 1
            self._running.append(request)

    def _new_request(self) -> Request:
        self._count += 1
        text = os.urandom(32 * PROMPT_BLOCKS)
        if self._count % 2 and len(self._texts) > REQUEST_COUNT:
            half = 16 * PROMPT_BLOCKS
            text = self._random.choice(self._texts)[:half] + text[half:]
        self._texts = [*self._texts[-_TEXT_COUNT:], text]
        request = Request(
            f"request-{self._count}",
            [1] * PROMPT_TOKENS,
            SamplingParams(max_tokens=1 << 20),
            None,
            block_hasher=_hash_blocks,
        )
        request.block_hashes[:] = [text[i : i + 32] for i in range(0, len(text), 32)]
        return request


def _wait_count() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _hash_blocks(request: Request) -> list[bytes]:
    count = request.num_tokens // BLOCK_TOKENS - len(getattr(request, "block_hashes", ()))
    return [os.urandom(32) for _ in range(count)]
