"""How the scheduler half comes to be: from what the workers say of themselves.

    in one process      the worker half has registered its KV caches before the engine starts
    in several          the ranks are asked with every step until all have answered; the engine
                        steps for that alone, so it is done before most first requests

Requests that come earlier wait for it, for a bounded number of steps; what was computed before is
not offloaded. Where the ranks' KV caches cannot be cached, one warning says why, and that is all.
"""

import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from tierstore.bounded_log import bounded
from tierstore.config import StoreConfig
from tierstore.errors import ConfigError, TierStoreError
from tierstore.manifest import Manifest
from tierstore.quoting import named
from tierstore_vllm.drain import drain
from tierstore_vllm.kv_events.engine_words import describe_event_groups
from tierstore_vllm.layout import describe_engine
from tierstore_vllm.local import local_workers
from tierstore_vllm.messages import StepMetadata, WorkerHello, WorkerReport
from tierstore_vllm.scheduler import SchedulerHalf
from tierstore_vllm.worker import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

__all__ = ["ASKING_STEPS_MAX", "Opening"]

_logger = bounded(logging.getLogger(__name__))

ASKING_STEPS_MAX = 64
"""Steps for which requests wait for the ranks' answers, and the engine steps for these alone.

An answer comes with the step that asks, which is looked at a few steps later where several are
under way at once. Later answers are still taken.
"""

_PAUSE_SECONDS = 0.001


class Opening:
    """Collects what the workers say until the scheduler half can be opened. One thread."""

    def __init__(
        self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", config: StoreConfig
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._report = WorkerReport()
        """What all ranks have reported so far; no command was given to them yet."""
        self._requests: dict[str, Request] = {}
        """Those that came meanwhile and have not been finished."""
        self._local_worker: WorkerHalf | None = None
        self._asking_steps = 0
        self._is_reset = False
        self._is_over = False

    def open_local(self) -> SchedulerHalf | None:
        """Open at once if the one worker lives in this process.

        Raises:
            ConfigError: the configuration cannot work; the message says what to change.
        """
        worker = None if self._is_over else self._find_local_worker()
        if worker is None:
            return None
        return self._open({self._vllm_config.parallel_config.rank: worker.hello})

    def _find_local_worker(self) -> WorkerHalf | None:
        if self._vllm_config.parallel_config.world_size == 1 and self._local_worker is None:
            engine_id = str(self._vllm_config.kv_transfer_config.engine_id)
            self._local_worker = local_workers.take(engine_id, self._config)
        return self._local_worker

    def take(self, report: WorkerReport) -> SchedulerHalf | None:
        """Take what ranks said; open when it was the last of them. Never raises."""
        if self._is_over:
            return None
        self._report.aggregate(report)
        hellos = self._report.hellos
        if len(hellos) < self._vllm_config.parallel_config.world_size:
            return None
        try:
            return self._open(hellos)
        except ConfigError as error:
            # The engine runs, and may have served requests: it is too late to refuse it.
            self._refuse(str(error))
            return None

    def _open(self, hellos: Mapping[int, WorkerHello]) -> SchedulerHalf | None:
        self._is_over = True
        refusal, manifest = _agree(hellos)
        if manifest is None:
            self._refuse(refusal)
            return None
        try:
            shape = describe_engine(self._vllm_config, self._kv_cache_config)
            half = SchedulerHalf.open(
                self._config,
                manifest,
                shape,
                event_groups=describe_event_groups(
                    self._config, self._vllm_config, self._kv_cache_config
                ),
            )
        except ConfigError:
            raise
        except TierStoreError as error:
            self._refuse(str(error))
            return None
        except Exception as error:  # the outermost frame below the engine
            _logger.exception("the engine could not be described")
            self._refuse(named(error))
            return None
        self._introduce(half)
        return half

    def _introduce(self, half: SchedulerHalf) -> None:
        """Tell the half what happened before it came."""
        worker = self._find_local_worker()
        if worker is not None:
            # vLLM shuts the worker down first and takes no step any more. With workers in other
            # processes there is an engine process, which steps on until nothing is outstanding.
            worker.before_close = partial(drain, worker, half)
        half.take_report(self._report)
        if self._is_reset:
            half.reset_cache()
        for request in self._requests.values():
            if not request.num_computed_tokens:  # the first blocks of others have passed by
                half.on_new_request(request)
        self._requests.clear()

    def _refuse(self, cause: str) -> None:
        self._requests.clear()
        _logger.warning("tierstore caches nothing: cause=%s", cause)

    def is_awaited(self) -> bool:
        """Return whether requests should wait, and the engine step, for the ranks' answers."""
        return not self._is_over and self._asking_steps < ASKING_STEPS_MAX

    def on_new_request(self, request: "Request") -> None:
        """Remember a request for the half that is to come."""
        if not self._is_over:
            self._requests[request.request_id] = request

    def request_finished(self, request_id: str) -> None:
        """Forget a request."""
        self._requests.pop(request_id, None)

    def reset_cache(self) -> None:
        """Let the half begin with a reset."""
        self._is_reset = True

    def build_connector_meta(self, output: "SchedulerOutput") -> StepMetadata:
        """Ask the ranks."""
        if self._is_over:
            return StepMetadata()
        self._asking_steps += 1
        if self._asking_steps == ASKING_STEPS_MAX:
            _logger.warning(
                "tierstore caches nothing until all workers have described their KV caches: "
                "answered=%d ranks=%d",
                len(self._report.hellos),
                self._vllm_config.parallel_config.world_size,
            )
        if not output.num_scheduled_tokens:
            time.sleep(_PAUSE_SECONDS)  # the engine would ask again at once
        return StepMetadata(asks_for_hello=True)


def _agree(hellos: Mapping[int, WorkerHello]) -> tuple[str, Manifest | None]:
    """Return the manifest that holds for all ranks, or why there is none.

    Ranks may name their layers differently (pipeline stages), but one decision serves all of them
    only if their chunks are alike.
    """
    manifest: Manifest | None = None
    for _, hello in sorted(hellos.items()):
        if hello.manifest is None:
            return hello.refusal, None
        if manifest is None:
            manifest = hello.manifest
        elif manifest.group_specs() != hello.manifest.group_specs():
            return "the ranks' KV caches differ in their chunks", None
    return "", manifest
