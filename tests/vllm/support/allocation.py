"""One allocation of KV caches as vLLM makes it, on host memory, with chunks moved through it.

Grouping, placement and views come from vLLM's own code; nothing of a model is needed for that.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from tierstore.config import load_config
from tierstore.dma.host import HostCopyEngine
from tierstore.dma.protocol import CopyId
from tierstore.layout import PAGE_BYTES
from tierstore_vllm.layout import WorkerLayout, describe_worker

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:  # vLLM 0.32 has the same functions in another module
    from vllm.v1.core import kv_cache_utils as planning

__all__ = [
    "BLOCK_COUNT",
    "LAYOUTS",
    "Memory",
    "Specs",
    "attention",
    "latent_attention",
    "latent_window",
    "make_vllm_config",
    "state",
    "window",
]

BLOCK_COUNT = 24
LAYOUTS = sorted(KVCacheLayout.__members__)
_FILLER = 0xA5

Specs = dict[str, specs.KVCacheSpec]


def attention(**changes: Any) -> specs.FullAttentionSpec:
    """Describe K and V of 4 heads of 32 halves: 8192 bytes per 16 tokens."""
    fields = {"block_size": 16, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float16}
    return specs.FullAttentionSpec(**(fields | changes))


def window(**changes: Any) -> specs.SlidingWindowSpec:
    """Describe the same page for layers that look back 64 tokens."""
    fields = {
        "block_size": 16,
        "num_kv_heads": 4,
        "head_size": 32,
        "dtype": torch.float16,
        "sliding_window": 64,
        "dcp_sharded": False,
    }
    return specs.SlidingWindowSpec(**(fields | changes))


def latent_attention(**changes: Any) -> specs.MLAAttentionSpec:
    """Describe one latent vector of 576 per token: 73728 bytes per 64 tokens."""
    fields = {"block_size": 64, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
    return specs.MLAAttentionSpec(**(fields | changes))


def latent_window(**changes: Any) -> specs.SlidingWindowMLASpec:
    """Describe the packed rows of 584 bytes of a DeepSeek-V4-like window."""
    fields = {
        "block_size": 64,
        "num_kv_heads": 1,
        "head_size": 512,
        "dtype": torch.uint8,
        "state_content_bytes": 584,
        "alignment": 576,
        "sliding_window": 128,
    }
    return specs.SlidingWindowMLASpec(**(fields | changes))


def state(page_bytes: int | None, *, mode: str = "align", **changes: Any) -> specs.MambaSpec:
    """Describe a state of 3 x 40 halves and 2 x 8 x 16 floats: 1264 bytes in a larger page."""
    fields = {
        "block_size": 16,
        "shapes": ((3, 40), (2, 8, 16)),
        "dtypes": (torch.bfloat16, torch.float32),
        "page_size_padded": page_bytes,
        "mamba_cache_mode": mode,
    }
    return specs.MambaSpec(**(fields | changes))


def make_vllm_config(layout: KVCacheLayout | None = None) -> SimpleNamespace:
    """Only what the allocation code and the connector read."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            cache_dtype="auto",
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            prefix_caching_hash_algo="sha256",
            hash_block_size=None,
            block_size=16,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None, indexer_kv_dtype="auto"),
        max_concurrent_batches=1,
        speculative_config=None,
        lora_config=None,
        model_config=make_model_config(),
        load_config=SimpleNamespace(load_format="auto"),
        compilation_config=SimpleNamespace(static_forward_context={}),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            distributed_executor_backend="uni",
            cp_kv_cache_interleave_size=1,
        ),
    )


def make_model_config(**changes: Any) -> SimpleNamespace:
    """Only what the identity reads."""
    fields = {
        "model": "some/model",
        "model_weights": "",
        "revision": "main",
        "code_revision": None,
        "hf_config_path": None,
        "quantization": None,
        "quantization_config": None,
        "dtype": torch.float16,
        "seed": 0,
        "model_impl": "auto",
        "model_class_overrides": {},
        "multimodal_config": None,
        "original_max_model_len": 4096,
        "max_model_len": 4096,
        "hf_config": SimpleNamespace(to_dict=dict, model_type="llama"),
    }
    return SimpleNamespace(**(fields | changes))


class Memory:
    """One allocation, filled with random bytes, and a second one to compute with torch."""

    def __init__(
        self, layer_specs: Specs, layout_name: str, kernel_block_sizes: list[int] | None = None
    ) -> None:
        """Allocate; skip the test where vLLM itself cannot."""
        layout = KVCacheLayout[layout_name]
        self.vllm_config = make_vllm_config(layout)
        try:
            groups = planning.get_kv_cache_groups(self.vllm_config, dict(layer_specs))
            block_bytes = planning._get_kv_cache_bytes_per_block(groups, layout)
            self.config = planning.get_kv_cache_config_from_groups(
                self.vllm_config, groups, block_bytes * BLOCK_COUNT
            )
        except (ValueError, AssertionError, NotImplementedError) as error:
            pytest.skip(f"vLLM refuses this layout itself: {error}")
        self.config.kv_cache_layout = layout_name
        self.config.hash_block_size = 16
        device = torch.device("cpu")
        self.views = allocate_kv_cache(self.config, device, layout, kernel_block_sizes)
        self._expected_views = allocate_kv_cache(self.config, device, layout, kernel_block_sizes)
        self._generator = torch.Generator().manual_seed(3)
        self.bytes = raw_bytes(self.views)
        self._expected_bytes = raw_bytes(self._expected_views)

    def describe(self, **offload: Any) -> WorkerLayout:
        """Describe it as the connector does when vLLM registers it."""
        config = load_config({"version": 1, "primary": {"capacity": "64MiB"}, "offload": offload})
        return describe_worker(self.vllm_config, self.config, config, self.views)

    def assert_moves_exactly(
        self, layout: WorkerLayout, group_idx: int, sources: Sequence[int], targets: Sequence[int]
    ) -> None:
        """Offload blocks, overwrite the whole memory, load into other blocks; compare every byte.

        What the memory must hold is computed with torch through vLLM's own views.
        """
        spec = layout.manifest.group_specs()[group_idx]
        chunk_count = len(sources) // spec.blocks_per_chunk
        slot_pages = spec.slot_bytes // PAGE_BYTES
        pool = np.full((chunk_count + 1) * spec.slot_bytes, _FILLER, np.uint8)
        engine = HostCopyEngine()
        engine.register(layout.caches, spec.blocks_per_chunk, pool.ctypes.data, pool.size)
        slots = np.arange(chunk_count, dtype=np.int64)[::-1] * slot_pages
        shape = (chunk_count, spec.blocks_per_chunk)

        self.bytes.random_(generator=self._generator)
        self._expected_bytes.copy_(self.bytes)
        blocks = self._expected_blocks(group_idx)
        kept = [block[list(sources)].clone() for block in blocks]
        engine.submit_offload(CopyId(1), group_idx, np.array(sources).reshape(shape), slots)
        beyond = pool.reshape(-1, spec.slot_bytes)[:, spec.chunk_bytes :]
        assert (beyond == _FILLER).all(), "an offload wrote beyond its chunk"

        self.bytes.random_(generator=self._generator)
        self._expected_bytes.copy_(self.bytes)
        for block, bytes_of_sources in zip(blocks, kept, strict=True):
            block[list(targets)] = bytes_of_sources
        engine.submit_load(CopyId(2), group_idx, np.array(targets).reshape(shape), slots)
        assert torch.equal(self.bytes, self._expected_bytes)

    def _expected_blocks(self, group_idx: int) -> list[torch.Tensor]:
        """View a group's layers by block of the scheduler; as bytes, for a half may be NaN."""
        views = [
            self._expected_views[n] for n in self.config.kv_cache_groups[group_idx].layer_names
        ]
        return [view.view(torch.uint8).unflatten(0, (BLOCK_COUNT, -1)) for view in views]


def raw_bytes(views: dict[str, torch.Tensor]) -> torch.Tensor:
    """View the whole allocation behind some views."""
    storage = next(iter(views.values())).untyped_storage()
    return torch.tensor([], dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
