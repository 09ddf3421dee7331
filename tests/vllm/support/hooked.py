"""Both connectors of an engine, driven through vLLM's hooks as a scheduler and its workers do."""

import pickle
from collections.abc import Callable
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

from allocation import Memory, attention
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

from tierstore_vllm.local import local_workers
from tierstore_vllm.plugin import register

__all__ = ["BLOCK_TOKENS", "HookedEngine", "block", "make_request", "scheduled"]

BLOCK_TOKENS = 16


def make_request(name: str, block_count: int, **changes: Any) -> SimpleNamespace:
    """Make a request whose prompt fills some blocks and one token more."""
    token_count = block_count * BLOCK_TOKENS + 1
    fields = {
        "request_id": name,
        "block_hashes": [sha256(f"{name}/{i}".encode()).digest() for i in range(block_count)],
        "prompt_token_ids": [*name.encode(), *range(token_count - len(name))],
        "num_tokens": token_count,
        "num_prompt_tokens": token_count,
        "num_computed_tokens": 0,
        "lora_request": None,
        "kv_transfer_params": None,
        "skip_reading_prefix_cache": False,
    }
    return SimpleNamespace(**(fields | changes))


def block(block_id: int, *, is_shared: bool = False) -> SimpleNamespace:
    return SimpleNamespace(block_id=block_id, block_hash=b"hash" if is_shared else None)


def scheduled(*news: tuple[SimpleNamespace, list[int]], computed_tokens: int = 0) -> Any:
    """Make the output of a scheduler that computes whole prompts."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=request.request_id,
                block_ids=(block_ids,),
                num_computed_tokens=computed_tokens,
                prompt_token_ids=request.prompt_token_ids,
            )
            for request, block_ids in news
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[]
        ),
        num_scheduled_tokens={
            request.request_id: request.num_tokens - computed_tokens for request, _ in news
        },
        kv_cache_block_copies=None,
        kv_connector_block_state=None,
        preempted_req_ids=None,
        finished_req_ids=set(),
    )


class HookedEngine:
    """One scheduler's connector and one per rank."""

    def __init__(
        self,
        transfer: dict[str, Any],
        *,
        rank_count: int = 1,
        shares_process: bool = True,
        spoil: Callable[[Any], Any] = lambda config: config,
    ) -> None:
        """Do what vLLM does before the first request; `spoil` makes the scheduler's KV config."""
        self._unseen: list[KVConnectorOutput] = []
        backend = "uni" if shares_process else "mp"
        self.memories = [Memory({"layer.0": attention()}, "LBHNC") for _ in range(rank_count)]
        transfer_config = KVTransferConfig(**transfer)
        for rank, memory in enumerate(self.memories):
            memory.vllm_config.kv_transfer_config = transfer_config
            memory.vllm_config.kv_events_config = None
            parallel = memory.vllm_config.parallel_config
            parallel.rank, parallel.world_size = rank, rank_count
            parallel.distributed_executor_backend = backend
        register()
        kind = KVConnectorFactory.get_connector_class(transfer_config)
        self.workers = [
            kind(memory.vllm_config, KVConnectorRole.WORKER, memory.config)
            for memory in self.memories
        ]
        for worker, memory in zip(self.workers, self.memories, strict=True):
            worker.register_kv_caches(memory.views)
        first = self.memories[0]
        config = spoil(first.config)
        self.scheduler = kind(first.vllm_config, KVConnectorRole.SCHEDULER, config)
        if not shares_process:
            local_workers._waiting.clear()
        hellos = {(0, i): worker.get_handshake_metadata() for i, worker in enumerate(self.workers)}
        hellos = {at: hello for at, hello in hellos.items() if hello is not None}
        self.scheduler.set_xfer_handshake_metadata_pp_aware(hellos)

    def step(
        self,
        output: Any = None,
        *,
        ranks: range | None = None,
        is_looked_at: bool = True,
        invalid_block_ids: frozenset[int] = frozenset(),
    ) -> Any:
        """Take one step; return what the workers were told.

        Ranks that are left out are told nothing. With asynchronous scheduling the next step is
        planned before vLLM has looked at this one.
        """
        metadata = self.scheduler.build_connector_meta(scheduled() if output is None else output)
        reports = []
        for rank in range(len(self.workers)) if ranks is None else ranks:
            worker = self.workers[rank]
            sent = pickle.loads(pickle.dumps(metadata))
            worker.handle_preemptions(sent)
            worker.bind_connector_metadata(sent)
            worker.start_load_kv(SimpleNamespace())
            worker.wait_for_save()
            worker.get_transfer_results(set())
            reports.append(pickle.loads(pickle.dumps(worker.build_connector_worker_meta())))
            worker.clear_connector_metadata()
        merged = None
        for report in reports:
            if report is not None:
                merged = report if merged is None else merged.aggregate(report)
        self._unseen.append(
            KVConnectorOutput(
                kv_connector_worker_meta=merged, invalid_block_ids=set(invalid_block_ids)
            )
        )
        if is_looked_at:
            for answer in self._unseen:
                self.scheduler.update_connector_output(answer)
            self._unseen.clear()
        return metadata

    def match(self, request: SimpleNamespace) -> tuple[int | None, bool]:
        return self.scheduler.get_num_new_matched_tokens(request, 0)

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()
