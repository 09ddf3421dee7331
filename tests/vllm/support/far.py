"""A connector as those of prefill/decode disaggregation are, for tests beside tierstore.

It insists on its own handshake, asks for the layout by vLLM's name, and loads whole prompts over
several engine steps into blocks that it overwrites at once. Its far side is a folder of files. Its
configuration may say `fails_every`: so many loads, of which the last leaves rubbish and says so;
and `is_sync`: loads end within the step that computes with them.
"""

from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

__all__ = ["FarConnector"]

_STEPS_PER_LOAD = 3


@dataclass
class FarHello(KVConnectorHandshakeMetadata):
    address: str


@dataclass
class FarCopy:
    request_id: str
    file: str
    block_ids: list[int]
    first_block: int = 0
    steps_left: int = _STEPS_PER_LOAD


@dataclass
class FarStep(KVConnectorMetadata):
    stores: list[FarCopy] = field(default_factory=list)
    loads: list[FarCopy] = field(default_factory=list)


class FarConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores prompts when they are computed, loads them as a whole."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer_config = vllm_config.kv_transfer_config
        self._folder = Path(transfer_config.get_from_extra_config("folder", ""))
        self._rank = vllm_config.parallel_config.rank
        self._block_tokens = vllm_config.cache_config.block_size
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._has_met_workers = False
        self._step = FarStep()
        self._loading: list[FarCopy] = []
        self._is_sync = bool(transfer_config.get_from_extra_config("is_sync", False))
        self._fails_every = int(transfer_config.get_from_extra_config("fails_every", 1 << 60))
        self._load_count = 0
        self._failed_blocks: set[int] = set()
        self._asked: set[str] = set()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        return "LBHNC"

    # Worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._kv_caches = kv_caches

    def get_handshake_metadata(self) -> FarHello:
        return FarHello("far://rank")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for copy in self._get_connector_metadata().loads:
            for layer in self._kv_caches.values():
                layer[copy.block_ids] = 7
            if not self._is_sync:
                self._loading.append(copy)
            elif not self._load(copy):
                self._failed_blocks.update(copy.block_ids)

    def _load(self, copy: FarCopy) -> bool:
        self._load_count += 1
        if self._load_count % self._fails_every == 0:
            print(f"far: load failed, {len(copy.block_ids)} blocks", flush=True)
            return False
        pages = torch.load(f"{copy.file}.{self._rank}")
        for name, layer in self._kv_caches.items():
            layer[copy.block_ids] = pages[name][copy.first_block :]
        return True

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: Any, kv_layer: Any, attn_metadata: Any, **kw: Any): ...

    def wait_for_save(self) -> None:
        for copy in self._get_connector_metadata().stores:
            pages = {name: layer[copy.block_ids] for name, layer in self._kv_caches.items()}
            torch.save(pages, f"{copy.file}.{self._rank}")

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        for copy in self._loading:
            copy.steps_left -= 1
            if not copy.steps_left:
                results.finished_recving.add(copy.request_id)
                if not self._load(copy):
                    results.failed_recving.add(copy.request_id)
        self._loading = [copy for copy in self._loading if copy.steps_left]
        return results

    # Scheduler.

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        if not metadata or not all(isinstance(hello, FarHello) for hello in metadata.values()):
            raise ValueError(f"far: not my handshake: {metadata}")
        self._has_met_workers = True

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int):
        assert self._has_met_workers
        file, token_count = self._prompt(request.prompt_token_ids)
        if request.request_id in self._asked or not Path(f"{file}.0").exists():
            return 0, False
        token_count = max(0, token_count - num_computed_tokens)
        return token_count, token_count > 0 and not self._is_sync

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._asked.add(request.request_id)
            file, token_count = self._prompt(request.prompt_token_ids)
            first = (token_count - num_external_tokens) // self._block_tokens
            block_ids = [block.block_id for block in blocks.blocks[0]][first:]
            block_ids = block_ids[: num_external_tokens // self._block_tokens]
            self._step.loads.append(FarCopy(request.request_id, file, block_ids, first))

    def build_connector_meta(self, scheduler_output: Any) -> FarStep:
        step, self._step = self._step, FarStep()
        for new in scheduler_output.scheduled_new_reqs:
            file, token_count = self._prompt(new.prompt_token_ids)
            ready = new.num_computed_tokens + scheduler_output.num_scheduled_tokens[new.req_id]
            if 0 < token_count <= ready and not Path(f"{file}.0").exists():
                block_ids = new.block_ids[0][: token_count // self._block_tokens]
                step.stores.append(FarCopy(new.req_id, file, block_ids))
        return step

    def request_finished_all_groups(self, request: Any, block_ids: Any):
        return False, {"far": request.request_id}

    def _prompt(self, tokens: list[int]) -> tuple[str, int]:
        """Name the file of a prompt, and how many of its tokens are in it."""
        token_count = (len(tokens) - 1) // self._block_tokens * self._block_tokens
        name = sha256(str(tokens[:token_count]).encode()).hexdigest()
        return str(self._folder / name), token_count
