"""What the scheduler half tells of its steps, so that events can say what chunks hold.

Whatever fails here ends the events, and nothing else.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from tierstore.bounded_log import bounded
from tierstore.key import Namespace
from tierstore.layout import GroupSpec
from tierstore.planner import EngineStep
from tierstore.tier.movement_log import MovementLog
from tierstore_vllm.kv_events.engine_words import EventGroup
from tierstore_vllm.kv_events.source import EventSource, TokenSpan

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request

__all__ = ["EventFeed"]

_logger = bounded(logging.getLogger(__name__))


class EventFeed:
    """Feeds the source of events, if there is one. One thread; costs nothing without a source."""

    def __init__(self, source: EventSource | None, log: MovementLog | None) -> None:
        """`log` is what the source reads, and is stopped with it."""
        self._source = source
        self._log = log
        self._ended: list[Request] = []
        """Finished requests whose last chunks the next step offloads."""

    @classmethod
    def of(
        cls,
        log: MovementLog | None,
        groups: Sequence[GroupSpec],
        namespace: Namespace,
        *,
        hash_tokens: int,
        own_hash: Callable[[bytes], bytes],
        event_groups: Sequence[EventGroup],
    ) -> Self:
        """Feed a source that reads `log`; None: no events are wanted. See `EventSource`."""
        if log is None:
            return cls(None, None)
        source = EventSource(
            log,
            groups,
            namespace,
            hash_tokens=hash_tokens,
            own_hash=own_hash,
            event_groups=event_groups,
        )
        return cls(source, log)

    def describe_load(self, request: "Request", hit_tokens: int) -> None:
        """Note what a load that was just reserved brings."""
        if self._source is not None:
            self._describe([TokenSpan(request, 0, hit_tokens)])

    def describe_step(self, step: EngineStep, requests: "Mapping[str, Request]") -> None:
        """Note what the offloads of a step that was just planned hold."""
        if self._source is None:
            return
        spans = [TokenSpan(request, 0, request.num_tokens) for request in self._ended]
        self._ended.clear()
        spans += [
            TokenSpan(
                requests[progress.request_id], progress.computed_tokens, progress.ready_tokens
            )
            for progress in step.progress
        ]
        spans += [
            TokenSpan(requests[block.request_id], block.boundary_tokens, block.boundary_tokens)
            for block in step.state_blocks
        ]
        self._describe(spans)

    def note_ended(self, request: "Request") -> None:
        """Keep a finished request whose last chunks the next step offloads."""
        if self._source is not None:
            self._ended.append(request)

    def reset(self, namespace: Namespace) -> None:
        """Take note of a reset; `namespace` is what chunks are named by from now on."""
        with self._feeding() as source:
            if source is not None:
                source.reset(namespace)

    def take(self) -> "Sequence[KVCacheEvent]":
        """Return what came to the tiers and what left them since the last call."""
        taken: Sequence[KVCacheEvent] = ()
        with self._feeding() as source:
            if source is not None:
                taken = source.take()
        return taken

    def _describe(self, spans: Sequence[TokenSpan]) -> None:
        with self._feeding() as source:
            if source is not None:
                source.describe(spans)

    @contextmanager
    def _feeding(self) -> Iterator[EventSource | None]:
        try:
            yield self._source
        except Exception as error:  # the outermost frame of the events
            _logger.exception("KV cache events end: cause=%s", type(error).__name__)
            self._source = None
            self._ended.clear()
            if self._log is not None:
                self._log.stop()
