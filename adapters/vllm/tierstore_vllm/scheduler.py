"""The scheduler half: vLLM's scheduler hooks in the planner's words.

    on_new_request               add_request
    get_num_new_matched_tokens   match             pins nothing, may be asked every step
    update_state_after_alloc     begin_load        pins what the promised hit needs
    build_connector_meta         plan_step         every step, empty ones too
    take_report                  complete
    take_events                  (what the tiers say of their own accord)
    request_finished             finish_request

No hook raises. A request whose hook failed is computed without the cache; after a few failures, or
one that leaves doubt about what was planned, all requests are. What was promised to vLLM is always
kept: a request that waits for a load is in the next step's metadata, with its load or as failed.
"""

import functools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tierstore.bounded_log import bounded
from tierstore.clock import MonotonicClock
from tierstore.config import OffloadConfig, StoreConfig
from tierstore.manifest import Manifest
from tierstore.metrics import Counters
from tierstore.planner import (
    NOTHING_PLANNED,
    EngineStep,
    FullTable,
    LoadTarget,
    OffloadPlanner,
    PlannedStep,
)
from tierstore.tier.opening import open_stack
from tierstore.tier.residency import ResidencyLog
from tierstore.tier.secondary import STEP_SECONDS_MAX
from tierstore.tier.stack import TierStack
from tierstore_vllm.kv_events.feed import EventFeed
from tierstore_vllm.kv_events.publisher import EventGroup, EventSource
from tierstore_vllm.layout import EngineShape
from tierstore_vllm.lora.digests import AdapterRequests
from tierstore_vllm.messages import Adapter, AdapterUse, RankTally, StepMetadata, WorkerReport
from tierstore_vllm.request_params import RequestParams
from tierstore_vllm.stats import StatsSource, TierStoreStats
from tierstore_vllm.step import StepReader

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

__all__ = ["SchedulerHalf"]

_logger = bounded(logging.getLogger(__name__))

_FAILURE_COUNT_MAX = 8
"""Failed hooks of single requests after which nothing is cached any more."""

_PAUSE_SECONDS = 0.001
"""As long as vLLM's own."""

Hook = TypeVar("Hook", bound=Callable[..., Any])


def _guarded(without: object, *, is_fatal: bool) -> Callable[[Hook], Hook]:
    """Answer `without` where a hook fails or the half has given up; never raise into the engine."""

    def decorate(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def guarded(self: "SchedulerHalf", *args: object) -> object:
            if self.has_given_up:
                return without
            try:
                return hook(self, *args)
            except Exception as error:  # noqa: BLE001 - the outermost frame below the engine
                self.note_failure(hook.__name__, error, is_fatal=is_fatal)
                return without

        return cast("Hook", guarded)

    return decorate


@dataclass(slots=True)
class _Question:
    """What a request was last asked about, for the load that may follow."""

    local_tokens: int
    disk_tokens: int = 0
    """Of the load: how many of its tokens come from disk."""


@dataclass(frozen=True, slots=True)
class _SetAside:
    """What vLLM allocated for a request that loads nothing from here."""

    blocks: "KVCacheBlocks"
    held_tokens: int | None
    """What vLLM itself had of the request; None: it did not look, its tokens are computed."""


class SchedulerHalf:
    """The control plane behind vLLM's scheduler hooks. One thread."""

    def __init__(
        self,
        stack: TierStack,
        manifest: Manifest,
        shape: EngineShape,
        counters: Counters,
        *,
        config: OffloadConfig,
        residency: ResidencyLog | None = None,
        event_groups: Sequence[EventGroup] = (),
    ) -> None:
        """Take over open tiers; `close` closes them. `residency` is what the stack writes to."""
        self._stack = stack
        self._manifest = manifest
        self._config = config
        self._stats = StatsSource(counters)
        self._tally = RankTally(shape.rank_count)
        self._groups = manifest.group_specs()
        self._adapters = AdapterRequests(shape.rank_count)
        source = (
            None
            if residency is None
            else EventSource(
                residency,
                self._groups,
                manifest.namespace,
                hash_tokens=shape.hash_block_tokens,
                own_hash=self._adapters.block_hash,
                event_groups=event_groups,
            )
        )
        self._events = EventFeed(source, residency)
        self._planner = OffloadPlanner(
            self._groups,
            manifest.namespace,
            stack,
            hash_tokens=shape.hash_block_tokens,
            counters=counters,
            clock=MonotonicClock(),
            alignment_tokens=shape.alignment_tokens,
            draft_groups=shape.draft_groups,
        )
        self._requests: dict[str, Request] = {}
        self._questions: dict[str, _Question] = {}
        self._promised: set[str] = set()
        """Requests that wait for a load of which no worker was told yet."""
        self._held_tokens: dict[str, int] = {}
        """Of requests that vLLM has asked about since it last allocated for them: what it holds."""
        self._set_aside: dict[str, _SetAside] = {}
        """Requests that load nothing from here and got blocks since the last step."""
        self._reader = StepReader(self._requests, self._planner.completing, config.decode)
        self._last_report: WorkerReport | None = None
        self._failure_count = 0
        self._failure_causes: set[tuple[str, str]] = set()
        self._params = RequestParams()
        self.has_given_up = False

    @classmethod
    def open(
        cls,
        config: StoreConfig,
        manifest: Manifest,
        shape: EngineShape,
        *,
        event_groups: Sequence[EventGroup] | None = None,
    ) -> Self:
        """Open the tiers of the engine whose ranks agreed on `manifest`.

        `event_groups`: what events say of each group, if somebody takes them at every step.

        Raises:
            ConfigError: a capacity is too small.
            CatalogError, ManifestError: a secondary tier cannot be opened.
        """
        counters = Counters()
        residency = None if event_groups is None else ResidencyLog()
        stack = open_stack(
            config,
            manifest,
            rank_count=shape.rank_count,
            counters=counters,
            residency=residency,
            lookup_seconds_max=STEP_SECONDS_MAX,
        )
        return cls(
            stack,
            manifest,
            shape,
            counters,
            config=config.offload,
            residency=residency,
            event_groups=event_groups or (),
        )

    @_guarded(None, is_fatal=False)
    def on_new_request(self, request: "Request") -> None:
        """Get to know a request.

        One that says `"tierstore.cache": false` in its `kv_transfer_params` stays unknown, so that
        nothing is cached for it. One with a LoRA adapter is unknown to the planner until the ranks
        have told which weights stand behind the adapter's name.
        """
        if self._params.may_be_cached(request):
            self._requests[request.request_id] = request
            self._introduce(request)

    def _introduce(self, request: "Request") -> None:
        hashes = self._adapters.hashes(request)
        if hashes is not None:
            self._planner.add_request(request.request_id, hashes)

    @_guarded((0, False), is_fatal=False)
    def get_num_new_matched_tokens(
        self, request: "Request", local_tokens: int
    ) -> tuple[int | None, bool]:
        """Say how many tokens beyond the local ones can be loaded; None: ask again."""
        self._held_tokens[request.request_id] = local_tokens
        if request.skip_reading_prefix_cache:
            return 0, False
        if self._adapters.shall_ask_again(request.request_id):
            return None, False
        answer = self._planner.match(request.request_id, local_tokens, request.num_tokens)
        if answer.ask_again:
            return None, False
        self._questions[request.request_id] = _Question(local_tokens)
        return answer.token_count, answer.token_count > 0

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int
    ) -> None:
        """Plan the load of a hit that vLLM accepted; note blocks that were set aside otherwise."""
        held_tokens = self._held_tokens.pop(request.request_id, None)
        if external_tokens > 0:
            self._promised.add(request.request_id)
            self._begin_load(request, blocks, external_tokens)
        elif not self.has_given_up:
            self._set_aside[request.request_id] = _SetAside(blocks, held_tokens)

    @_guarded(None, is_fatal=True)
    def _begin_load(
        self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int
    ) -> None:
        question = self._questions[request.request_id]
        fresh: dict[int, list[int]] = {}
        for spec in self._groups:
            first = question.local_tokens // spec.tokens_per_block
            end = -(-(question.local_tokens + external_tokens) // spec.tokens_per_block)
            # A block with a hash is shared with others and holds its bytes already.
            fresh[spec.group_idx] = [
                0 if block.block_hash is not None else block.block_id
                for block in blocks.blocks[spec.group_idx][first:end]
            ]
        hit_tokens = question.local_tokens + external_tokens
        target = LoadTarget(question.local_tokens, hit_tokens, fresh)
        question.disk_tokens = self._planner.begin_load(request.request_id, target) or 0
        self._events.describe_load(request, hit_tokens)

    @_guarded({}, is_fatal=False)
    def get_external_cache_hit_sources(
        self, request: "Request", external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Split the tokens of the load that was just planned by where they come from."""
        question = self._questions.get(request.request_id)
        disk_tokens = min(question.disk_tokens if question else 0, external_tokens)
        sources = {
            CacheHitSource.HOST: external_tokens - disk_tokens,
            CacheHitSource.DISK: disk_tokens,
        }
        return {source: count for source, count in sources.items() if count}

    def build_connector_meta(self, output: "SchedulerOutput") -> StepMetadata:
        """Plan the transfers around this step."""
        metadata = self._announce(self._plan(output))
        if not output.num_scheduled_tokens and metadata.is_empty():
            # The engine waits for our threads, and would ask again at once: it would keep the
            # interpreter from them. vLLM's server pauses by itself, its offline engine does not.
            time.sleep(_PAUSE_SECONDS)
        return metadata

    def plan_idle_step(self) -> StepMetadata:
        """Plan what became possible without any request; for a step that vLLM does not take."""
        return self._announce(self._plan(None))

    def _announce(self, planned: PlannedStep) -> StepMetadata:
        asks_for_adapters = self._adapters.take_question()
        if planned is NOTHING_PLANNED and not self._promised:
            return StepMetadata(asks_for_adapters=asks_for_adapters)
        failed = self._promised.union(planned.failed_requests)
        failed.difference_update(planned.load_requests.values())
        self._promised.clear()
        claims = {
            job_id: self._adapters.claim(request.lora_request)
            for job_id, request_id in planned.load_requests.items()
            if (request := self._requests.get(request_id)) and request.lora_request
        }
        return StepMetadata(
            planned.plan,
            planned.load_requests,
            tuple(failed),
            claims,
            asks_for_adapters=asks_for_adapters,
        )

    @_guarded(NOTHING_PLANNED, is_fatal=True)
    def _plan(self, output: "SchedulerOutput | None") -> PlannedStep:
        if output is None:
            step = EngineStep()
        else:
            step = self._reader.read(output)
            self._note_foreign_loads(step)
        planned = self._planner.plan_step(step)
        self._events.describe_step(step, self._requests)
        return planned

    def _note_foreign_loads(self, step: EngineStep) -> None:
        """Find the blocks into which another connector loads.

        While their request waits, these are all that were set aside; for one that the step
        computes, those of the tokens that count as computed beyond what vLLM held.
        """
        for table in step.full_tables:
            aside = self._set_aside.pop(table.request_id, None)
            if aside is not None and aside.held_tokens is not None:
                self._note_load_into(table, aside.held_tokens)
        for aside in self._set_aside.values():
            self._planner.note_foreign_load(
                # A block with a hash is shared with others and holds its bytes already.
                [
                    block.block_id
                    for group in aside.blocks.blocks
                    for block in group
                    if block.block_hash is None
                ]
            )
        self._set_aside.clear()

    def _note_load_into(self, table: FullTable, held_tokens: int) -> None:
        """Note what is loaded for the very step; vLLM has given these blocks their hashes."""
        loaded: list[int] = []
        if held_tokens < table.computed_tokens:
            for spec in self._groups:
                first = held_tokens // spec.tokens_per_block
                end = -(-table.computed_tokens // spec.tokens_per_block)
                loaded += table.block_ids[spec.group_idx][first:end]
        if loaded:
            self._planner.note_foreign_load(loaded)

    @_guarded(None, is_fatal=True)
    def take_report(self, report: WorkerReport) -> None:
        """Take the workers' answers; publish what all ranks have."""
        self._last_report = report
        if report.adapter_uses:
            # Before the answers: an offload may hold what other weights have computed.
            self._learn(report.adapter_uses)
        for done in self._tally.add(report):
            self._planner.complete(done)
        if report.has_given_up:
            # Its every load would fail, and vLLM may end the requests that wait for them.
            self._give_up("a worker moves no bytes any more")

    @_guarded(None, is_fatal=True)
    def drop_offloads(self) -> None:
        """Let nothing be found that is on its way from the engine's blocks.

        Another connector could not load blocks for a step that has been computed with them. vLLM
        computes it again; which offloads read blocks of that step, nobody knows.
        """
        self._planner.drop_offloads()

    def _learn(self, uses: Sequence[AdapterUse]) -> None:
        doubtful = self._adapters.learn(uses)
        if doubtful:
            self._planner.drop_offloads()
            for request_id, request in self._requests.items():
                if request.lora_request and Adapter.of(request.lora_request) in doubtful:
                    self._planner.finish_request(request_id)
        for request_id in self._adapters.waiting():
            request = self._requests[request_id]
            if request.num_computed_tokens:  # its first blocks have passed the planner by
                self._adapters.forget_request(request_id)
            else:
                self._introduce(request)

    def take_missed_reports(self, reports: Sequence[WorkerReport]) -> None:
        """Take those of a local worker's last reports that vLLM did not deliver.

        With asynchronous scheduling it may be shut down before it looked at its last steps.
        """
        taken = [i for i, report in enumerate(reports) if report is self._last_report]
        for report in reports[taken[-1] + 1 if taken else 0 :]:
            self.take_report(report)

    @_guarded(None, is_fatal=False)
    def request_finished(self, request: "Request", block_ids: Sequence[Sequence[int]] = ()) -> None:
        """Forget a request; its blocks may be freed at once, fences guard those being read.

        `block_ids` are what it held, per group; the next step offloads what was not offered yet.
        """
        self._requests.pop(request.request_id, None)
        self._questions.pop(request.request_id, None)
        self._held_tokens.pop(request.request_id, None)
        self._adapters.forget_request(request.request_id)
        last = self._reader.last_table(request, block_ids) if block_ids else None
        if last is not None:
            self._events.note_ended(request)
        self._planner.finish_request(request.request_id, last)

    @_guarded(False, is_fatal=True)
    def has_work(self) -> bool:
        """Say whether the engine should go on stepping without a request."""
        return self._planner.has_work()

    @_guarded(True, is_fatal=True)
    def reset_cache(self) -> bool:
        """Forget all cached chunks, and begin an epoch of this engine's own.

        vLLM does not say why. Weights that changed, or will before the next request, are those of
        no manifest, so what is computed from now on must not be found by an engine that loads the
        weights anew, nor by one that shares the path. An operator who knows that they never change
        may have the disk left as it is.
        """
        if self._config.on_reset == "keep_disk":
            self._planner.reset(self._manifest, keeps_records=True)
            self._adapters.reset()
            _logger.info("cache was reset: what is on disk stays, as offload.on_reset says")
            return True
        self._manifest = self._manifest.in_epoch(secrets.token_hex(8))
        self._planner.reset(self._manifest)
        self._adapters.reset()
        self._events.reset(self._manifest.namespace)
        _logger.info("cache was reset: what is stored from now on is found by this engine only")
        return True

    @_guarded(None, is_fatal=False)
    def take_stats(self) -> TierStoreStats | None:
        """Return what was counted since the last call."""
        return self._stats.take()

    def take_events(self) -> "Sequence[KVCacheEvent]":
        """Return what came to the tiers and what left them since the last call."""
        return () if self.has_given_up else self._events.take()

    def check(self) -> list[str]:
        """Return what leaks or contradicts itself, in words (empty: sound)."""
        return self._planner.check() + self._stack.check()

    def close(self) -> None:
        """Close the tiers; idempotent."""
        self.has_given_up = True
        try:
            self._stack.close()
        except Exception:
            _logger.exception("tiers could not be closed")

    def note_failure(self, hook: str, error: Exception, *, is_fatal: bool) -> None:
        """Log a cause once; give up when planning is in doubt or failures repeat.

        Having given up, no offload is published and no load is planned any more, so that blocks
        without a fence can do no harm.
        """
        cause = (hook, type(error).__name__)
        if cause not in self._failure_causes:
            self._failure_causes.add(cause)
            _logger.error("scheduler hook failed: hook=%s cause=%s", *cause, exc_info=error)
        self._failure_count += 1
        if is_fatal or self._failure_count >= _FAILURE_COUNT_MAX:
            self._give_up(f"{self._failure_count} failed hooks")

    def _give_up(self, cause: str) -> None:
        if not self.has_given_up:
            self.has_given_up = True
            _logger.error("tierstore caches nothing from now on: cause=%s", cause)
