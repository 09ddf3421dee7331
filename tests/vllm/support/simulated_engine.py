"""vLLM's engine without a model: its scheduler, both roles of the connector, known bytes.

The scheduler, the allocation of KV caches and the block hashes are vLLM's own; the steps follow
`EngineCore.step` and, with asynchronous scheduling, `step_with_batch_queue`.
"""

from collections import deque
from random import Random
from types import SimpleNamespace
from typing import Any

from known_bytes import open_groups
from simulated_peer import Peer, SharedConnector
from simulated_runner import SimulatedRunner
from simulated_settings import DRAFT_LAYER, EngineMemory, EngineSettings, make_engine_config
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

__all__ = ["SimulatedEngine"]


class SimulatedEngine:
    """Requests in, steps, known bytes; everything in the calling thread."""

    def __init__(
        self, settings: EngineSettings, config: dict[str, Any], machine: Any, random: Random
    ) -> None:
        """Open it; `machine` is installed."""
        self.settings = settings
        self.machine = machine
        self.vllm_config = make_engine_config(settings, config)
        memory = EngineMemory(self.vllm_config, settings)
        groups = open_groups(memory.scheduler.kv_cache_groups, memory.views, (DRAFT_LAYER,))
        self.worker = SharedConnector(self.vllm_config, KVConnectorRole.WORKER, memory.worker)
        self.worker.register_kv_caches(memory.views)
        self.runner = SimulatedRunner(groups, self.worker, settings.speculation, random, {})
        self.runner.is_async = settings.is_async
        kind = AsyncScheduler if settings.is_async else Scheduler
        self.scheduler: Any = kind(
            vllm_config=self.vllm_config,
            kv_cache_config=memory.scheduler,
            structured_output_manager=_NO_STRUCTURE,
            block_size=memory.block_tokens,
            hash_block_size=memory.hash_tokens,
        )
        self.connector = self.scheduler.connector
        hello = self.worker.get_handshake_metadata()
        hellos = {} if hello is None else {(0, 0): hello}
        self.connector.set_xfer_handshake_metadata_pp_aware(hellos)
        self.peer = Peer(
            groups,
            self.runner,
            machine,
            settings.peer_chance,
            memory.block_tokens,
            is_sync=settings.peer_is_sync,
        )
        hash_function = get_hash_fn_by_name("sha256")
        kv_cache_utils.init_none_hash(hash_function)
        self._hasher = kv_cache_utils.get_request_block_hasher(memory.hash_tokens, hash_function)
        self._queue: deque[tuple[Any, Any]] = deque()
        self.answers: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}

    # What a scenario does.

    def add(self, name: str, prompt: list[int], answer_tokens: int) -> None:
        """Bring a request."""
        sampling = SamplingParams(temperature=0, max_tokens=answer_tokens, ignore_eos=True)
        self.prompts[name] = prompt
        self.scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=self._hasher))

    def abort(self, name: str) -> None:
        """Give a request up, wherever it is."""
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def forget_gpu(self) -> bool:
        """Empty vLLM's own prefix cache, if no block is in use."""
        return bool(self.scheduler.reset_prefix_cache())

    def change_weights(self) -> bool:
        """Compute other bytes from now on, if vLLM can be emptied for it."""
        self._drain_queue()
        aborted = any(request.is_finished() for request in self.scheduler.requests.values())
        if self.scheduler.kv_holding_waiting or aborted:
            return False  # vLLM cannot take their blocks away while something is loaded into them
        reset = self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        assert reset, "vLLM's prefix cache could not be emptied"
        self.runner.weights += 1
        return True

    def abort_deadlocked(self) -> bool:
        """Abort one of the requests that are loaded, wait for blocks and hold them from each other.

        vLLM admits more loads than a nearly empty pool can complete. Says no where any request
        waits for a load: that is tierstore's to end.
        """
        holding = list(self.scheduler.kv_holding_waiting)
        loaded = self.scheduler.finished_recving_kv_req_ids
        for request in holding:
            is_waiting = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            if is_waiting and request.request_id not in loaded:
                return False
        if not holding or self.scheduler.running:
            return False
        self.abort(holding[-1].request_id)
        return True

    @property
    def active(self) -> list[str]:
        """Requests that vLLM has not forgotten."""
        return [n for n, r in self.scheduler.requests.items() if not r.is_finished()]

    def step(self) -> None:
        """Take one step as the engine's process does."""
        with _shared(self.peer):
            if self.settings.is_async:
                self._step_async()
            else:
                output = self.scheduler.schedule()
                result = self.runner.execute(output, self.machine)
                self._update(output, result)
                drafts = self.runner.take_draft_token_ids(output)
                if drafts is not None:
                    self.scheduler.update_draft_token_ids(drafts)

    def _step_async(self) -> None:
        scheduler = self.scheduler
        if scheduler.has_requests():
            output = scheduler.schedule()
            self._queue.appendleft((output, self.runner.execute(output, self.machine)))
            is_executed = output.total_num_scheduled_tokens > 0
            if len(self._queue) < 2 and (is_executed or scheduler.has_requests()):
                return
        elif not self._queue:
            return
        self._update(*self._queue.pop())

    def _drain_queue(self) -> None:
        while self._queue:
            self._update(*self._queue.pop())

    def _update(self, output: Any, result: Any) -> None:
        for outputs in self.scheduler.update_from_output(output, result).values():
            for part in outputs.outputs:
                self.answers.setdefault(part.request_id, []).extend(part.new_token_ids)

    def has_work(self) -> bool:
        """Whether anything is left to step for."""
        return bool(self._queue) or bool(self.scheduler.has_requests())

    def leaks(self) -> list[str]:
        """Name what is left of requests that are gone; empty: nothing."""
        half = self.connector._scheduler
        is_lost = half is None or half.has_given_up
        found: list[str] = ["tierstore has given up"] if is_lost else half.check()
        pool = self.scheduler.kv_cache_manager.block_pool
        missing = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        if missing:
            found.append(f"{missing} blocks of vLLM are not free")
        if self.scheduler.requests:
            found.append(f"vLLM still has {sorted(self.scheduler.requests)}")
        return found

    def abandon(self) -> None:
        """Close the files of a run that went wrong; nothing of it is carried on."""
        if self.connector._scheduler is not None:
            self.connector._scheduler.close()

    def close(self) -> None:
        """Shut down in vLLM's order."""
        self.worker.shutdown()
        self.scheduler.shutdown()


class _shared:  # noqa: N801 - reads as a verb where it is used
    """Give the connectors of this engine its peer."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def __enter__(self) -> None:
        SharedConnector.peer = self._peer

    def __exit__(self, *_: object) -> None:
        SharedConnector.peer = None


_NO_STRUCTURE = SimpleNamespace(
    accept_tokens=lambda _request, _tokens: True,
    validate_tokens=lambda _request, tokens: tokens,
)
