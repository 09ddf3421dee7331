"""A connector whose loads take several engine steps, so that requests can be aborted meanwhile."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from tierstore_vllm import TierStoreConnector

__all__ = ["SlowConnector"]


class SlowConnector(TierStoreConnector):
    """Looks for answers in some steps only."""

    steps_per_answer = 1
    _step_count = 0

    def register_kv_caches(self, kv_caches: Any) -> None:
        self.kv_caches = kv_caches
        super().register_kv_caches(kv_caches)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        self._step_count += 1
        if self._step_count % self.steps_per_answer:
            return KVConnectorTransferResults()
        return super().get_transfer_results(finished_req_ids)
