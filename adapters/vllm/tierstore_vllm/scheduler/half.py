"""The scheduler half: vLLM's scheduler hooks in the planner's words.

    on_new_request               add_request
    get_num_new_matched_tokens   match             pins nothing, may be asked every step
    update_state_after_alloc     begin_load        pins what the promised hit needs
    build_connector_meta         plan_step         every step, empty ones too
    take_report                  complete
    take_events                  (what has come to the tiers and left them)
    request_finished             finish_request

No hook raises. A request whose hook failed is computed without the cache; after a few failures, or
one that leaves doubt about what was planned, all requests are. What was promised to vLLM is always
kept: a request that waits for a load is in the next step's metadata, with its load or as failed.
"""

import logging
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from tierstore.bounded_log import bounded
from tierstore.clock import MonotonicClock
from tierstore.config import OffloadConfig, StoreConfig
from tierstore.manifest import Manifest
from tierstore.metrics import Counters
from tierstore.planner import NOTHING_PLANNED, EngineStep, OffloadPlanner, PlannedStep
from tierstore.tier.movement_log import MovementLog
from tierstore.tier.opening import open_stack
from tierstore.tier.secondary import STEP_SECONDS_MAX
from tierstore.tier.stack import TierStack
from tierstore_vllm.kv_events.engine_words import EventGroup
from tierstore_vllm.kv_events.feed import EventFeed
from tierstore_vllm.layout import EngineShape
from tierstore_vllm.lora.digests import AdapterRequests
from tierstore_vllm.messages import RankTally, StepMetadata, WorkerReport
from tierstore_vllm.scheduler.foreign_loads import ForeignLoads
from tierstore_vllm.scheduler.known_requests import KnownRequests
from tierstore_vllm.scheduler.question import Question
from tierstore_vllm.scheduler.step import StepReader
from tierstore_vllm.scheduler.trust import Trust, guarded
from tierstore_vllm.stats import StatsSource, TierStoreStats

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.request import Request

__all__ = ["SchedulerHalf"]

_logger = bounded(logging.getLogger(__name__))

_PAUSE_SECONDS = 0.001
"""As long as vLLM's own."""


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
        movements: MovementLog | None = None,
        event_groups: Sequence[EventGroup] = (),
    ) -> None:
        """Take over open tiers; `close` closes them. `movements` is what the stack writes to."""
        self._stack = stack
        self._manifest = manifest
        self._config = config
        self._stats = StatsSource(counters)
        self._tally = RankTally(shape.rank_count)
        self._groups = manifest.group_specs()
        self._adapters = AdapterRequests(shape.rank_count)
        self._events = EventFeed.of(
            movements,
            self._groups,
            manifest.namespace,
            hash_tokens=shape.hash_block_tokens,
            own_hash=self._adapters.block_hash,
            event_groups=event_groups,
        )
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
        self._requests = KnownRequests(self._planner, self._adapters)
        self._questions: dict[str, Question] = {}
        self._promised: set[str] = set()
        """Requests that wait for a load of which no worker was told yet."""
        self._foreign_loads = ForeignLoads(self._groups)
        self._reader = StepReader(self._requests.by_id, self._planner.completing, config.decode)
        self.trust = Trust()

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

        `event_groups`: what events say of each group; None: no events are wanted.

        Raises:
            ConfigError: a capacity is too small.
            CatalogError, ManifestError: a secondary tier cannot be opened.
        """
        counters = Counters()
        movements = None if event_groups is None else MovementLog()
        stack = open_stack(
            config,
            manifest,
            rank_count=shape.rank_count,
            counters=counters,
            movements=movements,
            lookup_seconds_max=STEP_SECONDS_MAX,
        )
        return cls(
            stack,
            manifest,
            shape,
            counters,
            config=config.offload,
            movements=movements,
            event_groups=event_groups or (),
        )

    @property
    def has_given_up(self) -> bool:
        """Whether nothing is cached any more."""
        return self.trust.is_lost

    @guarded(None, is_fatal=False)
    def on_new_request(self, request: "Request") -> None:
        """Get to know a request.

        One that says `"tierstore.cache": false` in its `kv_transfer_params` stays unknown, so that
        nothing is cached for it.
        """
        self._requests.add(request)

    @guarded((0, False), is_fatal=False)
    def get_num_new_matched_tokens(
        self, request: "Request", local_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens beyond the local ones can be loaded; None: ask again."""
        self._foreign_loads.note_asked(request.request_id, local_tokens)
        if request.skip_reading_prefix_cache:
            return 0, False
        if self._adapters.shall_ask_again(request.request_id):
            return None, False
        answer = self._planner.match(request.request_id, local_tokens, request.num_tokens)
        if answer.ask_again:
            return None, False
        self._questions[request.request_id] = Question(local_tokens)
        return answer.token_count, answer.token_count > 0

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int
    ) -> None:
        """Plan the load of a hit that vLLM accepted; note blocks that were set aside otherwise."""
        if external_tokens > 0:
            self._foreign_loads.forget_question(request.request_id)
            self._promised.add(request.request_id)
            self._begin_load(request, blocks, external_tokens)
        elif not self.has_given_up:
            self._foreign_loads.note_allocated(request.request_id, blocks)

    @guarded(None, is_fatal=True)
    def _begin_load(
        self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int
    ) -> None:
        question = self._questions[request.request_id]
        target = question.target(self._groups, blocks, external_tokens)
        question.disk_tokens = self._planner.begin_load(request.request_id, target) or 0
        self._events.describe_load(request, target.hit_tokens)

    @guarded({}, is_fatal=False)
    def get_external_cache_hit_sources(
        self, request: "Request", external_tokens: int
    ) -> "dict[CacheHitSource, int]":
        """Split the tokens of the load that was just planned by where they come from."""
        question = self._questions.get(request.request_id, Question(0))
        return question.sources(external_tokens)

    def build_connector_meta(self, output: "SchedulerOutput") -> StepMetadata:
        """Plan the transfers around this step."""
        metadata = self._announce(self._plan(output))
        if not output.num_scheduled_tokens and metadata.is_empty():
            # The engine waits for our threads, and would ask again at once: it would keep the
            # interpreter, which lookups and I/O threads ask for with every key and every checksum
            # (1,300 instead of 200 ms for 146 MB). vLLM's server pauses by itself, its offline
            # engine does not. A wait in the worker would still starve the lookups before a load.
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
        return StepMetadata(
            planned.plan,
            planned.load_requests,
            tuple(failed),
            self._requests.claims(planned.load_requests),
            asks_for_adapters=asks_for_adapters,
        )

    @guarded(NOTHING_PLANNED, is_fatal=True)
    def _plan(self, output: "SchedulerOutput | None") -> PlannedStep:
        if output is None:
            step = EngineStep()
        else:
            step = self._reader.read(output)
            for block_ids in self._foreign_loads.take(step):
                self._planner.note_foreign_load(block_ids)
        planned = self._planner.plan_step(step)
        self._events.describe_step(step, self._requests.by_id)
        return planned

    @guarded(None, is_fatal=True)
    def take_report(self, report: WorkerReport) -> None:
        """Take the workers' answers; publish what all ranks have."""
        if report.adapter_uses:
            # Before the answers: an offload may hold what other weights have computed.
            self._requests.learn(report.adapter_uses)
        for done in self._tally.add(report):
            self._planner.complete(done)
        if report.has_given_up:
            # Not answered as failed one by one: its every load would fail, and under
            # `kv_load_failure_policy: fail` vLLM ends the requests that wait for them.
            self.trust.lose("a worker moves no bytes any more")

    @guarded(None, is_fatal=True)
    def drop_offloads(self) -> None:
        """Let nothing be found that is on its way from the engine's blocks.

        Another connector could not load blocks for a step that has been computed with them. vLLM
        computes it again. Which offloads read blocks of that step is unknown, so all are dropped.
        """
        self._planner.drop_offloads()

    def take_missed_reports(self, reports: Sequence[WorkerReport]) -> None:
        """Take those of a local worker's last reports that vLLM did not deliver.

        With asynchronous scheduling it may be shut down before it looked at its last steps.
        """
        for report in self._tally.missed(reports):
            self.take_report(report)

    @guarded(None, is_fatal=False)
    def request_finished(self, request: "Request", block_ids: Sequence[Sequence[int]] = ()) -> None:
        """Forget a request; its blocks may be freed at once, fences guard those being read.

        `block_ids` are what it held, per group; the next step offloads what was not offered yet.
        """
        self._requests.remove(request.request_id)
        self._questions.pop(request.request_id, None)
        self._foreign_loads.forget_question(request.request_id)
        last = self._reader.last_table(request, block_ids) if block_ids else None
        if last is not None:
            self._events.note_ended(request)
        self._planner.finish_request(request.request_id, last)

    @guarded(False, is_fatal=True)
    def has_work(self) -> bool:
        """Return whether the engine should go on stepping without a request."""
        return self._planner.has_work()

    @guarded(True, is_fatal=True)
    def reset_cache(self) -> bool:
        """Forget all cached chunks, and begin an epoch of this engine's own.

        vLLM does not tell why. Weights that changed, or will before the next request, are those of
        no manifest, so what is computed from now on must not be found by an engine that loads the
        weights again, nor by one that shares the path. An operator who knows that they never change
        may have the disk left as it is.
        """
        if self._config.on_reset == "keep_disk":
            self._planner.reset(self._manifest, keeps_records=True)
            self._adapters.reset()
            _logger.info("cache was reset: what is on disk stays, as offload.on_reset says")
            return True
        self._manifest = self._manifest.in_epoch(secrets.token_hex(8))
        # The tiers also forget the namespace of the weights that were loaded, for all engines on
        # the path: requests between an update and this reset may have stored there.
        self._planner.reset(self._manifest)
        self._adapters.reset()
        self._events.reset(self._manifest.namespace)
        _logger.info("cache was reset: what is stored from now on is found by this engine only")
        return True

    @guarded(None, is_fatal=False)
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
        self.trust.is_lost = True
        try:
            self._stack.close()
        except Exception:
            _logger.exception("tiers could not be closed")
