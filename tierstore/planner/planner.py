"""The control half between an engine's scheduler and the tiers."""

import dataclasses
import itertools
import logging
import math
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tierstore.bounded_log import Causes, bounded
from tierstore.clock import Clock
from tierstore.key import Namespace
from tierstore.layout import GroupKind, GroupSpec
from tierstore.manifest import Manifest
from tierstore.metrics import Counters, Metric
from tierstore.planner.groups import build_group_configs
from tierstore.planner.in_flight import InFlight, LoadJob
from tierstore.planner.load import LoadTarget, build_load
from tierstore.planner.match import HitQuestion, match_prefix
from tierstore.planner.offload import Offloads
from tierstore.planner.request import RequestOffloadState
from tierstore.planner.step import NOTHING_PLANNED, EngineStep, LastTable, PlannedStep
from tierstore.planner.wait import Wait
from tierstore.planner.writes import StepWrites
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.tier.stack import TierStack
from tierstore.transfer import Command, JobId, StepPlan, TransferDone

__all__ = [
    "IDLE_STEP_COUNT_MAX",
    "OffloadPlanner",
    "PrefixAnswer",
]

_logger = bounded(logging.getLogger(__name__))

IDLE_STEP_COUNT_MAX = 20_000
"""Steps without an answer after which an idle engine is let go; what is left waits for requests."""


@dataclass(frozen=True, slots=True)
class PrefixAnswer:
    """How many tokens can be loaded beyond the local ones."""

    token_count: int
    ask_again: bool = False
    """More is arriving, or room for more comes back: no decision yet."""


class OffloadPlanner:
    """Decides what is loaded and offloaded for which request; moves nothing.

    One thread, no I/O but the lookups of the stack. The engine asks `match` any number
    of times, commits to a hit with `begin_load`, and calls `plan_step` once per step. Every job
    that is planned is ended by `complete`, whatever became of its request.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        namespace: Namespace,
        stack: TierStack,
        *,
        hash_tokens: int,
        counters: Counters,
        clock: Clock,
        alignment_tokens: int = 1,
        draft_groups: Collection[int] = (),
    ) -> None:
        """Take the engine's groups.

        Args:
            groups: All KV cache groups, in order.
            namespace: The manifest's.
            stack: The tiers; the planner alone answers it.
            hash_tokens: Tokens that one entry of `block_hashes` covers.
            counters: Where failed loads are counted.
            clock: Bounds how long a request waits for chunks that are arriving.
            alignment_tokens: What the engine wants hits to be a multiple of.
            draft_groups: Indices of groups that hold layers of a draft model (EAGLE, MTP).

        Raises:
            ValueError: the groups do not fit `hash_tokens`.
        """
        self._configs = build_group_configs(
            groups, namespace, hash_tokens, alignment_tokens, draft_groups
        )
        self._stack = stack
        self._counters = counters
        self._clock = clock
        self._requests: dict[str, RequestOffloadState] = {}
        self._next_ready: dict[str, int] = {}
        """`next_ready_tokens` of requests. Each running one is looked up in each step, and to find
        256 of their objects in memory would take as long as all the rest."""
        self._in_flight = InFlight()
        self._offloads = Offloads(self._configs, stack, self._in_flight)
        self._loads: list[Command] = []
        self._load_requests: dict[JobId, str] = {}
        self._failed_requests: list[str] = []
        self._fences: set[JobId] = set()
        self._writes = StepWrites()
        self._idle_steps = 0
        self._causes = Causes()
        self._is_cacheable = all(
            config.spec.kind is not GroupKind.UNCACHED for config in self._configs
        )

    @property
    def needs_use(self) -> bool:
        """Whether `add_request` should be told what is known of requests."""
        return self._stack.needs_use

    def add_request(
        self, request_id: str, block_hashes: Sequence[bytes], use: UseContext = UNKNOWN_USE
    ) -> None:
        """Get to know a request; `block_hashes` is the engine's live list.

        `use` is what is known of it besides its id, and is ignored unless `needs_use`.
        """
        self._idle_steps = 0
        if self._is_cacheable:
            told = use.by(request_id) if self.needs_use else None
            state = RequestOffloadState.build(block_hashes, self._configs, told)
            self._requests[request_id] = state
            self._next_ready[request_id] = state.next_ready_tokens

    def finish_request(self, request_id: str, last: LastTable | None = None) -> None:
        """Forget a request; its jobs go on and are settled by their answers.

        With `last`, the next step offers what was not offered yet, of the blocks that it does not
        give away. It must be planned before anything else writes to them.
        """
        state = self._requests.pop(request_id, None)
        self._next_ready.pop(request_id, None)
        if state is not None and last is not None:
            self._offloads.keep_leftovers(request_id, state, last)
            self._idle_steps = 0

    def match(self, request_id: str, local_tokens: int, token_count: int) -> PrefixAnswer:
        """Return how much of a request's `token_count` tokens the tiers restore beyond local ones.

        Pins nothing and changes nothing but since when the request waits: may be asked every step.
        """
        state = self._requests.get(request_id)
        if state is None or state.is_suppressed or state.load_job is not None:
            return PrefixAnswer(0)
        question = HitQuestion(state.block_hashes, local_tokens, token_count)
        found = match_prefix(self._stack, self._configs, question)
        # What a failed load left arriving may never come: its request takes what is there.
        if found.hoped_tokens <= found.ready_tokens or state.failed_load_count:
            state.wait = None
        else:
            now = self._clock.seconds()
            state.wait = state.wait or Wait(now)
            state.wait.question_count += 1
            if not state.wait.is_over(now):
                return PrefixAnswer(0, ask_again=True)
        return PrefixAnswer(max(found.ready_tokens - local_tokens, 0))

    def begin_load(self, request_id: str, target: LoadTarget) -> int | None:
        """Pin what a promised hit needs and plan its load into the blocks of `target`.

        Returns how many of the tokens come from secondary tiers. None: the hit is gone meanwhile;
        the next step then names the request as failed.
        """
        self.note_written(target.block_ids())
        state = self._requests.get(request_id)
        plan = None
        if state is not None:
            plan = build_load(self._stack, self._configs, state.block_hashes, target, state.use)
        if state is None or plan is None:
            if state is not None:
                state.note_failed_load()
            self._failed_requests.append(request_id)
            self._counters.add(Metric.FAILED_LOADS, label="gone")
            return None
        state.load_job = plan.command.job_id
        state.loaded_tokens = 0 if target.local_tokens else target.hit_tokens
        state.has_kv = True
        self._in_flight.loads[plan.command.job_id] = LoadJob(plan.reservation, request_id)
        self._loads.append(plan.command)
        self._load_requests[plan.command.job_id] = request_id
        return min(plan.promoted_tokens, target.hit_tokens - target.local_tokens)

    def note_written(self, block_ids: Iterable[int]) -> None:
        """Take blocks to which any load writes from the next step on.

        Offloads that read them are fenced, and the next step offloads nothing that they held.
        """
        self._writes.add(list(block_ids))

    def completing(self, request_ids: Sequence[str], ready_tokens: Sequence[int]) -> list[int]:
        """Return which requests, by position, `EngineStep.progress` must name if so far ready."""
        next_ready_tokens = map(self._next_ready.get, request_ids, itertools.repeat(math.inf))
        is_complete = map(operator.ge, ready_tokens, next_ready_tokens)
        return list(itertools.compress(range(len(request_ids)), is_complete))

    def plan_step(self, step: EngineStep) -> PlannedStep:
        """Take what the engine scheduled; return the transfers around this step.

        The work is proportional to the blocks that came and the chunks that this step completes.
        """
        writes, self._writes = self._writes, StepWrites()
        if step.preempted:
            self._take_preempted(step.preempted)
        self._take_tables(step, writes)
        self._fences |= self._in_flight.readers_of(writes.all())
        offloads = self._offloads.plan(step, self._requests, writes)
        self._expect(table.request_id for table in step.full_tables)
        self._expect(progress.request_id for progress in step.progress)
        commands = (*self._loads, *self._stack.commands(), *offloads)
        self._idle_steps = 0 if commands else self._idle_steps + 1
        if not (commands or self._fences or self._failed_requests):
            return NOTHING_PLANNED
        planned = PlannedStep(
            StepPlan(commands=commands, fence_job_ids=tuple(sorted(self._fences))),
            self._load_requests,
            tuple(self._failed_requests),
        )
        self._loads, self._load_requests = [], {}
        self._failed_requests, self._fences = [], set()
        return planned

    def _expect(self, request_ids: Iterable[str]) -> None:
        """Take over when the next chunks of requests are complete."""
        for request_id in request_ids:
            state = self._requests.get(request_id)
            if state is not None:
                self._next_ready[request_id] = state.next_ready_tokens

    def _take_preempted(self, request_ids: Sequence[str]) -> None:
        self._fences |= self._in_flight.offloads_of(request_ids)
        for request_id in request_ids:
            state = self._requests.get(request_id)
            if state is not None:
                state.is_scheduled = False

    def _take_tables(self, step: EngineStep, writes: StepWrites) -> None:
        writes.add_copied_onto(step.overwritten_block_ids)
        for table in step.full_tables:
            state = self._requests.get(table.request_id)
            if state is not None:
                state.replace_tables(table.block_ids, table.computed_tokens)
            for config in self._configs:
                group_idx = config.spec.group_idx
                first = table.computed_tokens // config.spec.tokens_per_block
                blocks = table.block_ids[group_idx][first:]
                writes.add(blocks)
                if config.spec.kind is GroupKind.STATE:
                    writes.add_states(table.request_id, group_idx, first, blocks)
        for new in step.new_blocks:
            for blocks in new.block_ids:
                writes.add(blocks)
            state = self._requests.get(new.request_id)
            if state is not None:
                for group_idx, length in state.state_lengths.items():
                    writes.add_states(new.request_id, group_idx, length, new.block_ids[group_idx])
                state.append_blocks(new.block_ids)

    def complete(self, done: TransferDone) -> None:
        """Take the answer to a job: publish or drop its chunks, release its pins."""
        self._idle_steps = 0
        offload = self._in_flight.pop_offload(done.job_id)
        if offload is not None:
            keys = offload.reservation.keys
            failed = set(done.failed) if done.ok or done.failed else range(len(keys))
            self._stack.finish_offload(offload.reservation, failed)
            return
        load = self._in_flight.loads.pop(done.job_id, None)
        if load is None:
            if not self._stack.complete(done) and self._causes.is_new("unknown job"):
                _logger.warning(
                    "answer to an unknown job (further ones are not logged): job=%d",
                    done.job_id,
                )
            return
        self._stack.finish_load(load.reservation, done)
        is_lost = bool(done.failed) or not done.ok
        if is_lost:
            reasons = {reason.value for reason in done.failed.values()} or {"copy_failed"}
            self._counters.add(Metric.FAILED_LOADS, label=min(reasons))
        state = self._requests.get(load.request_id)
        if state is not None and state.load_job == done.job_id:
            state.load_job = None
            if is_lost:
                state.loaded_tokens = 0
                state.note_failed_load()

    def has_work(self) -> bool:
        """Return whether the engine should go on stepping although it has no request.

        Gives up after `IDLE_STEP_COUNT_MAX` steps without an answer.
        """
        if self._idle_steps >= IDLE_STEP_COUNT_MAX:
            return False
        return (
            bool(self._in_flight.offloads or self._in_flight.loads or self._loads)
            or self._offloads.has_leftovers
            or self._stack.has_work()
        )

    def reset(self, manifest: Manifest, *, keeps_records: bool = False) -> None:
        """Forget all cached chunks: the weights changed. What comes now is `manifest`'s.

        `keeps_records`: only those in memory, see `TierStack.reset`.

        Requests that are running or loading hold blocks of the old weights, and what they compute
        next depends on them; nothing of it is offloaded until the engine starts them from nothing.
        """
        self._stack.reset(manifest, keeps_records=keeps_records)
        self._configs = tuple(
            dataclasses.replace(config, namespace=manifest.namespace) for config in self._configs
        )
        self._offloads = Offloads(self._configs, self._stack, self._in_flight)
        for state in self._requests.values():
            state.outdate(self._configs)
        self._expect(self._requests)

    def drop_offloads(self) -> None:
        """Let no offload in flight, or due, be found: what computed its blocks is in doubt."""
        for job in self._in_flight.offloads.values():
            self._stack.mark_stale(job.reservation.keys)
        self._offloads.drop_leftovers()

    def note_foreign_load(self, block_ids: Sequence[int]) -> None:
        """Take blocks to which another connector loads from now on, in no order with our copies.

        Nothing is found that an offload in flight reads from them: the fence of a step holds back
        what the engine computes, not what others load.
        """
        self._stack.mark_stale(self._in_flight.keys_read_from(block_ids))
        self.note_written(block_ids)

    def check(self) -> list[str]:
        """Verify that nothing leaks; return the problems in words (empty: sound)."""
        problems = self._in_flight.check()
        problems += [
            f"request {request_id} waits for job {state.load_job}, which is not in flight"
            for request_id, state in self._requests.items()
            if state.load_job is not None and state.load_job not in self._in_flight.loads
        ]
        problems += [
            f"the load of job {job_id} is planned but not in flight"
            for job_id in self._load_requests
            if job_id not in self._in_flight.loads
        ]
        return problems
