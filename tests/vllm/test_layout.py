"""Layouts that the CPU build never produces, from vLLM's own allocation code on host buffers.

Random bytes are offloaded from some blocks and loaded into others. What the memory must hold then
is computed with torch through vLLM's views; every byte of it is compared, neighbours and padding
included.
"""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from tierstore.config import load_config
from tierstore.dma.host import HostCopyEngine
from tierstore.dma.protocol import CopyId
from tierstore.errors import ConfigError, LayoutError
from tierstore.layout import PAGE_BYTES, ChunkOrder, GroupKind
from tierstore_vllm.layout import WorkerLayout, describe_worker

pytestmark = pytest.mark.vllm

BLOCK_COUNT = 24
LAYOUTS = sorted(KVCacheLayout.__members__)

Specs = dict[str, specs.KVCacheSpec]


def attention(**changes: object) -> specs.FullAttentionSpec:
    fields = {"block_size": 16, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float16}
    return specs.FullAttentionSpec(**(fields | changes))


def window(**changes: object) -> specs.SlidingWindowSpec:
    fields = {
        "block_size": 16,
        "num_kv_heads": 4,
        "head_size": 32,
        "dtype": torch.float16,
        "sliding_window": 64,
        "dcp_sharded": False,
    }
    return specs.SlidingWindowSpec(**(fields | changes))


def state(page_bytes: int | None, *, mode: str = "align") -> specs.MambaSpec:
    return specs.MambaSpec(
        block_size=16,
        shapes=((3, 40), (2, 8, 16)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=page_bytes,
        mamba_cache_mode=mode,
    )


def full() -> Specs:
    return {f"layer.{i}": attention() for i in range(3)}


def latent() -> Specs:
    return {
        f"layer.{i}": specs.MLAAttentionSpec(
            block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16
        )
        for i in range(3)
    }


def alternating() -> Specs:
    return {f"layer.{i}": (window() if i % 2 else attention()) for i in range(6)}


def hybrid() -> Specs:
    page_bytes = attention().page_size_bytes
    return {f"layer.{i}": (attention() if i == 3 else state(page_bytes)) for i in range(4)}


def unequal_pages() -> Specs:
    """One group with a page size per layer, such as latent attention with its indexer."""
    return {
        f"layer.{i}": attention(num_kv_heads=1, head_size=128 if i % 2 else 32) for i in range(4)
    }


FAMILIES = [full, latent, alternating, hybrid, unequal_pages]


def make_vllm_config(layout: KVCacheLayout) -> SimpleNamespace:
    """Only what the allocation code and the identity read."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            prefix_caching_hash_algo="sha256",
            hash_block_size=None,
            block_size=16,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        model_config=SimpleNamespace(
            model="some/model",
            revision="main",
            quantization=None,
            dtype=torch.float16,
            hf_config=SimpleNamespace(to_dict=dict, model_type="llama"),
        ),
        load_config=SimpleNamespace(load_format="auto"),
        compilation_config=SimpleNamespace(static_forward_context={}),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
        ),
    )


class Memory:
    """One allocation as vLLM makes it, filled with random bytes."""

    def __init__(
        self, layer_specs: Specs, layout_name: str, kernel_block_sizes: list[int] | None = None
    ) -> None:
        layout = KVCacheLayout[layout_name]
        self.vllm_config = make_vllm_config(layout)
        groups = kv_cache_utils.get_kv_cache_groups(self.vllm_config, dict(layer_specs))
        try:
            block_bytes = kv_cache_utils._get_kv_cache_bytes_per_block(groups, layout)
            self.config = kv_cache_utils.get_kv_cache_config_from_groups(
                self.vllm_config, groups, block_bytes * BLOCK_COUNT
            )
        except (ValueError, AssertionError) as error:
            pytest.skip(f"vLLM refuses this layout itself: {error}")
        self.config.kv_cache_layout = layout_name
        self.config.hash_block_size = 16
        device = torch.device("cpu")
        self.views = allocate_kv_cache(self.config, device, layout, kernel_block_sizes)
        self.expected_views = allocate_kv_cache(self.config, device, layout, kernel_block_sizes)
        generator = torch.Generator().manual_seed(3)
        self.bytes = raw_bytes(self.views)
        self.bytes.random_(generator=generator)
        self.expected_bytes = raw_bytes(self.expected_views)
        self.expected_bytes.copy_(self.bytes)

    def describe(self, **offload: object) -> WorkerLayout:
        config = load_config({"version": 1, "primary": {"capacity": "64MiB"}, "offload": offload})
        return describe_worker(self.vllm_config, self.config, config, self.views)

    def expect_move(self, group_idx: int, sources: list[int], targets: list[int]) -> None:
        """Do with torch, block by block, what an offload and a load shall have done."""
        for name in self.config.kv_cache_groups[group_idx].layer_names:
            view = self.expected_views[name]
            blocks = view.unflatten(0, (BLOCK_COUNT, -1))
            blocks[targets] = blocks[sources].clone()


def raw_bytes(views: dict[str, torch.Tensor]) -> torch.Tensor:
    storage = next(iter(views.values())).untyped_storage()
    return torch.tensor([], dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def move(layout: WorkerLayout, group_idx: int, sources: list[int], targets: list[int]) -> int:
    """Offload, then load elsewhere; return how many bytes of the slot were used."""
    blocks_per_chunk = layout.manifest.blocks_per_chunk
    spec = layout.manifest.group_specs()[group_idx]
    pool = np.zeros(1 << 22, np.uint8)
    engine = HostCopyEngine()
    engine.register(layout.caches, blocks_per_chunk, pool.ctypes.data, pool.size)
    chunk_count = len(sources) // blocks_per_chunk
    slots = np.arange(chunk_count, dtype=np.int64)[::-1] * (spec.slot_bytes // PAGE_BYTES)
    shape = (chunk_count, blocks_per_chunk)
    engine.submit_offload(CopyId(1), group_idx, np.array(sources).reshape(shape), slots)
    engine.submit_load(CopyId(2), group_idx, np.array(targets).reshape(shape), slots)
    return spec.chunk_bytes


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_a_chunk_moves_exactly_its_blocks_live_bytes(
    family: Callable[[], Specs], layout_name: str, blocks_per_chunk: int
):
    memory = Memory(family(), layout_name)
    if blocks_per_chunk > 1 and family is hybrid:
        with pytest.raises(ConfigError, match="blocks_per_chunk"):
            memory.describe(blocks_per_chunk=blocks_per_chunk)
        return
    layout = memory.describe(blocks_per_chunk=blocks_per_chunk)
    sources, targets = [1, 2, 9, 7, 4, 5], [3, 20, 21, 22, 6, 8]
    for group_idx in range(len(memory.config.kv_cache_groups)):
        move(layout, group_idx, sources, targets)
        memory.expect_move(group_idx, sources, targets)
        assert torch.equal(memory.bytes, memory.expected_bytes)


@pytest.mark.parametrize("layout_name", ["LBHNC", "LBNHC"])
def test_blocks_that_kernels_split_move_whole(layout_name: str):
    layer_specs = {f"layer.{i}": attention(block_size=64) for i in range(2)}
    memory = Memory(layer_specs, layout_name, [16])
    assert memory.views["layer.0"].shape[0] == 4 * BLOCK_COUNT
    layout = memory.describe()
    move(layout, 0, [1, 2, 9], [3, 20, 21])
    memory.expect_move(0, [1, 2, 9], [3, 20, 21])
    assert torch.equal(memory.bytes, memory.expected_bytes)


def test_blocks_that_kernels_split_differently_are_other_bytes():
    whole, split = (
        Memory({"layer.0": attention(block_size=64)}, "LBHNC", sizes).describe()
        for sizes in (None, [16])
    )
    assert whole.manifest.namespace != split.manifest.namespace


def test_padding_is_not_kept():
    layout = Memory(hybrid(), "LBHNC").describe()
    kinds = {group.kind: group.page_bytes[0] for group in layout.manifest.groups}
    assert kinds[GroupKind.STATE] == 3 * 40 * 2 + 2 * 8 * 16 * 4
    assert kinds[GroupKind.FULL] == attention().page_size_bytes


def test_adjacent_layers_are_one_copy_where_the_engine_packs_them():
    layout = Memory(full(), "BLHNC").describe()
    assert layout.manifest.chunk_order is ChunkOrder.BLOCK_MAJOR
    assert len(layout.caches.group_refs[0]) == 1
    assert layout.caches.tensors[0].page_bytes == 3 * attention().page_size_bytes


def test_groups_that_overlay_each_other_share_their_regions():
    layout = Memory(alternating(), "LBHNC").describe()
    assert [group.kind for group in layout.manifest.groups] == [
        GroupKind.FULL,
        GroupKind.SLIDING_WINDOW,
    ]
    assert layout.manifest.groups[1].window_tokens == 63
    assert len(layout.caches.tensors) == 3


def test_a_layer_that_shares_anothers_pages_is_kept_once():
    memory = Memory(full(), "LBHNC")
    before = memory.describe().manifest
    memory.views["layer.3"] = memory.views["layer.1"]
    memory.config.kv_cache_groups[0].layer_names.append("layer.3")
    assert memory.describe().manifest == before


@pytest.mark.parametrize(
    ("layer_specs", "problem"),
    [
        ({"layer.0": attention(non_causal=True)}, "prefix cache"),
        ({"layer.0": state(None, mode="none")}, "prefix cache"),
        (
            {
                "layer.0": specs.RSWASpec(
                    block_size=16,
                    num_kv_heads=2,
                    head_size=32,
                    dtype=torch.float16,
                    rswa_window=64,
                )
            },
            "RSWASpec",
        ),
    ],
)
def test_a_group_that_cannot_be_cached_is_refused_by_name(layer_specs: Specs, problem: str):
    with pytest.raises(LayoutError, match=problem):
        Memory(layer_specs, "LBHNC").describe()


def test_registered_memory_that_contradicts_the_configuration_is_refused():
    memory = Memory(full(), "LBHNC")
    memory.views["layer.1"] = memory.views["layer.1"][:, :2]
    with pytest.raises(LayoutError, match=r"layer\.1: vLLM specifies"):
        memory.describe()
    del memory.views["layer.1"]
    with pytest.raises(LayoutError, match="not registered"):
        memory.describe()
