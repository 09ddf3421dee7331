"""A connector that spoils what it loads, to prove that the tests would notice."""

from typing import Any

import torch

from tierstore.transfer import Load
from tierstore_vllm import TierStoreConnector
from tierstore_vllm.messages import StepMetadata

__all__ = ["FlippingConnector"]

_LARGE_EXPONENT_BIT = 0x40


class FlippingConnector(TierStoreConnector):
    """Flips one bit of one loaded block when its load is complete."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._first_layer = next(iter(kv_caches.values()))
        self._loaded_block: dict[str, int] = {}

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._get_connector_metadata()
        assert isinstance(step, StepMetadata)
        for command in step.plan.commands:
            if isinstance(command, Load):
                block_ids = command.parts[0].block_ids
                request_id = step.load_requests[command.job_id]
                self._loaded_block[request_id] = int(block_ids[block_ids >= 0][-1])
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving - results.failed_recving:
            block = self._first_layer[self._loaded_block.pop(request_id)]
            # The last byte of a float has its sign and the upper bits of its exponent.
            last = block.element_size() - 1
            block[0, 0, :1].view(torch.uint8)[last] ^= _LARGE_EXPONENT_BIT
        return results
