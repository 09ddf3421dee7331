"""A connector that loads one block too few, to prove that the tests would notice."""

from dataclasses import replace
from typing import Any

import torch

from tierstore.transfer import Load
from tierstore_vllm import TierStoreConnector
from tierstore_vllm.messages import StepMetadata

__all__ = ["ShorteningConnector"]


class ShorteningConnector(TierStoreConnector):
    """Leaves the last block of each load as it was, and says that it is loaded."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._layers = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._get_connector_metadata()
        assert isinstance(step, StepMetadata)
        commands = tuple(
            self._shortened(command) if isinstance(command, Load) else command
            for command in step.plan.commands
        )
        self.bind_connector_metadata(replace(step, plan=replace(step.plan, commands=commands)))
        super().start_load_kv(forward_context, **kwargs)

    def _shortened(self, load: Load) -> Load:
        *parts, last = load.parts
        block_ids = last.block_ids.copy()
        block = int(block_ids[-1, -1])
        block_ids[-1, -1] = -1
        for layer in self._layers:
            layer[block].zero_()  # it may hold the same bytes from the request before
        return replace(load, parts=(*parts, replace(last, block_ids=block_ids)))
