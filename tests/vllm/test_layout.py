"""Layouts that the CPU build never produces, from vLLM's own allocation code on host buffers.

Random bytes are offloaded, the whole memory is overwritten, and the chunks are loaded into other
blocks. Every byte of the allocation is compared, neighbours and padding included, and what each
group keeps is compared with numbers that were computed by hand.
"""

from collections.abc import Callable
from typing import NoReturn

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from allocation import (
    BLOCK_COUNT,
    LAYOUTS,
    Memory,
    Specs,
    attention,
    latent_attention,
    latent_window,
    state,
    window,
)
from hypothesis import HealthCheck, event, given, reject, settings
from hypothesis import strategies as st
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size

from tierstore.errors import ConfigError
from tierstore.layout import ChunkOrder, GroupKind

pytestmark = pytest.mark.vllm

SOURCES, TARGETS = [1, 2, 9, 7, 4, 5], [3, 20, 21, 22, 6, 8]


def layers(count: int, spec: specs.KVCacheSpec, name: str = "layer") -> Specs:
    return {f"{name}.{i}": spec for i in range(count)}


def full() -> Specs:
    return layers(3, attention())


def grouped_query() -> Specs:
    return layers(3, attention(num_kv_heads=2))


def multi_query() -> Specs:
    return layers(2, attention(num_kv_heads=1, head_size=128))


def fp8() -> Specs:
    return layers(2, attention(dtype=torch.uint8))


def scaled_per_head() -> Specs:
    """One byte per element and a scale of four bytes each for K and V per token and head."""
    return layers(2, attention(dtype=torch.int8, state_content_bytes=72))


def wide_keys() -> Specs:
    return layers(2, attention(num_kv_heads=2, head_size=192, head_size_v=128))


def latent() -> Specs:
    return layers(3, latent_attention())


def latent_and_indexer() -> Specs:
    """DeepSeek sparse attention: two kinds of pages in one group."""
    rows = latent_attention(dtype=torch.uint8, state_content_bytes=656)
    keys = latent_attention(dtype=torch.uint8, head_size=132)
    return layers(3, rows) | layers(3, keys, "indexer")


def sliding() -> Specs:
    return layers(3, window())


def alternating() -> Specs:
    return {f"layer.{i}": (window() if i % 2 else attention()) for i in range(6)}


def five_to_one() -> Specs:
    return {f"layer.{i}": (attention() if i % 6 == 5 else window()) for i in range(12)}


def uneven_groups() -> Specs:
    return layers(3, attention()) | layers(4, window(), "local")


def unequal_pages() -> Specs:
    """Like Gemma 4: full attention has half the page, and so twice the tokens per block."""
    return layers(2, attention(num_kv_heads=1, head_size=64)) | layers(2, window(), "local")


def padded_pages() -> Specs:
    """A page that does not divide the larger one lies in a gap of its size."""
    return layers(2, attention(num_kv_heads=1, head_size=80)) | layers(2, window(), "local")


def chunked() -> Specs:
    local = specs.ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=4, head_size=32, dtype=torch.float16, attention_chunk_size=64
    )
    return {f"layer.{i}": (attention() if i == 3 else local) for i in range(4)}


def hybrid() -> Specs:
    return {f"layer.{i}": (attention() if i == 3 else state(8192)) for i in range(4)}


def convolution() -> Specs:
    short = state(8192, shapes=((2, 64),), dtypes=(torch.bfloat16,))
    return {f"layer.{i}": (attention() if i % 2 else short) for i in range(4)}


def draft() -> Specs:
    """An fp8 target and the bf16 layer of its draft model, in one group."""
    target = attention(num_kv_heads=8, head_size=128, dtype=torch.uint8)
    return layers(3, target) | {
        "draft.0": attention(num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    }


def compressed() -> Specs:
    """DeepSeek-V4-like rows: compressed latents, indexer keys, windows and compressor states."""
    rows = {"dtype": torch.uint8, "block_size": 256, "alignment": 576}
    by_4 = latent_attention(**rows, state_content_bytes=584, tokens_per_state=4)
    by_128 = latent_attention(**rows, state_content_bytes=584, tokens_per_state=128)
    keys = latent_attention(**rows, head_size=132, tokens_per_state=4)
    partial = {"dtype": torch.float32, "state_content_bytes": None}
    states = latent_window(**partial, block_size=4, head_size=2048, sliding_window=8)
    return (
        layers(3, by_4, "c4")
        | layers(3, by_128, "c128")
        | layers(3, keys, "idx")
        | layers(6, latent_window(), "swa")
        | layers(3, states, "states")
    )


# Live bytes of one block of each group, by hand: states x heads x bytes of a state x layers. Where
# pages differ, block-major layouts pack them side by side, and vLLM groups otherwise.
# fmt: off
LIVE_BYTES: dict[Callable[[], Specs], list[int]] = {
    full:               [16 * 4 * 128 * 3],
    grouped_query:      [16 * 2 * 128 * 3],
    multi_query:        [16 * 1 * 512 * 2],
    fp8:                [16 * 4 * 64 * 2],
    scaled_per_head:    [16 * 4 * 72 * 2],
    wide_keys:          [16 * 2 * 640 * 2],
    latent:             [64 * 1152 * 3],
    latent_and_indexer: [64 * 656 * 3 + 64 * 132 * 3],
    sliding:            [16 * 4 * 128 * 3],
    alternating:        [16 * 4 * 128 * 3] * 2,
    five_to_one:        [16 * 4 * 128 * 2] * 6,
    uneven_groups:      [16 * 4 * 128 * 3, 16 * 4 * 128 * 4],
    unequal_pages:      [32 * 1 * 256 * 2, 16 * 4 * 128 * 2],
    padded_pages:       [16 * 1 * 320 * 2, 16 * 4 * 128 * 2],
    chunked:            [16 * 4 * 128] * 4,
    hybrid:             [3 * 40 * 2 + 2 * 8 * 16 * 4] * 3 + [16 * 4 * 128],
    convolution:        [2 * 64 * 2 * 2, 16 * 4 * 128 * 2],
    draft:              [16 * 8 * 256 * 3 + 16 * 8 * 512],
    compressed:         [],
}
PACKED_LIVE_BYTES: dict[Callable[[], Specs], list[int]] = {
    unequal_pages:      [16 * 1 * 256 * 2, 16 * 4 * 128, 16 * 4 * 128],
    padded_pages:       [16 * 1 * 320 * 2, 16 * 4 * 128, 16 * 4 * 128],
    compressed:         [(64 * 584 + 2 * 584 + 64 * 132) * 3, 64 * 584 * 3, 64 * 584 * 3,
                         4 * 8192 * 3],
}
# fmt: on


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("family", LIVE_BYTES, ids=lambda family: family.__name__)
def test_a_chunk_is_exactly_its_blocks_live_bytes(
    family: Callable[[], Specs], layout_name: str, blocks_per_chunk: int
):
    memory = Memory(family(), layout_name)
    if blocks_per_chunk > 1 and family in (hybrid, convolution):
        with pytest.raises(ConfigError, match="blocks_per_chunk"):
            memory.describe(blocks_per_chunk=blocks_per_chunk)
        return
    layout = memory.describe(blocks_per_chunk=blocks_per_chunk)
    live_bytes = LIVE_BYTES[family]
    if layout_name in ("BLHNC", "BLNHC"):
        live_bytes = PACKED_LIVE_BYTES.get(family, live_bytes)
    found = layout.manifest.group_specs()
    assert [spec.chunk_bytes for spec in found] == [n * blocks_per_chunk for n in live_bytes]
    for group_idx in range(len(found)):
        memory.assert_moves_exactly(layout, group_idx, SOURCES, TARGETS)


def test_packed_rows_are_not_kept_whole():
    memory = Memory(compressed(), "BLHNC")
    row_bytes = {tensor.block_stride for tensor in memory.config.kv_cache_tensors}
    assert row_bytes == {(37440 + 1728 + 8640) * 3}, "each page is padded to a multiple of 576"
    copies = memory.describe().caches.group_refs
    # The gaps between padded pages are left out, so no two pages are one copy.
    assert [len(refs) for refs in copies] == [9, 3, 3, 3]


@st.composite
def random_specs(draw: st.DrawFn) -> Specs:
    """Layers of up to three kinds with sizes that vLLM may have to equalise, pad or pack."""
    sizes = {
        "num_kv_heads": draw(st.sampled_from([1, 2, 3, 8])),
        "dtype": draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32])),
    }
    page_bytes = attention(**sizes, head_size=64).page_size_bytes
    kinds: dict[str, st.SearchStrategy[specs.KVCacheSpec]] = {
        "full": st.builds(
            lambda size, value_size: attention(**sizes, head_size=size, head_size_v=value_size),
            st.sampled_from([32, 64, 80]),
            st.sampled_from([None, 16, 64]),
        ),
        "local": st.builds(
            lambda size, length: window(**sizes, head_size=size, sliding_window=length),
            st.sampled_from([16, 32, 64]),
            st.sampled_from([8, 100]),
        ),
        "latent": st.builds(
            lambda size: latent_attention(block_size=16, head_size=size),
            st.sampled_from([64, 576]),
        ),
        "state": st.builds(
            lambda rows: state(page_bytes, shapes=((rows, 32),), dtypes=(torch.bfloat16,)),
            st.integers(1, page_bytes // 64),
        ),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=3, unique=True))
    found: Specs = {}
    for kind in chosen:
        found |= layers(draw(st.integers(1, 4)), draw(kinds[kind]), kind)
    return found


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(
    layer_specs=random_specs(),
    layout_name=st.sampled_from(LAYOUTS),
    block_ids=st.permutations(range(BLOCK_COUNT)),
    chunk_count=st.integers(1, 4),
    blocks_per_chunk=st.integers(1, 3),
)
def test_whatever_vllm_allocates_moves_exactly(
    layer_specs: Specs,
    layout_name: str,
    block_ids: list[int],
    chunk_count: int,
    blocks_per_chunk: int,
):
    try:
        memory = Memory(layer_specs, layout_name)
    except pytest.skip.Exception as refusal:
        reject_because(refusal)
    if any(isinstance(spec, specs.MambaSpec) for spec in layer_specs.values()):
        blocks_per_chunk = 1
    layout = memory.describe(blocks_per_chunk=blocks_per_chunk)
    count = chunk_count * blocks_per_chunk
    for group_idx, group in enumerate(memory.config.kv_cache_groups):
        live_bytes = sum(live_page_bytes(group, name) for name in group.layer_names)
        found = layout.manifest.group_specs()[group_idx]
        assert found.chunk_bytes == live_bytes * blocks_per_chunk
        memory.assert_moves_exactly(layout, group_idx, block_ids[:count], block_ids[-count:])


def reject_because(refusal: BaseException) -> NoReturn:
    """Try other specs: vLLM cannot run these in this layout."""
    event(str(refusal)[:60])
    reject()


def live_page_bytes(group: specs.KVCacheGroupSpec, layer_name: str) -> int:
    """Compute from a spec's sizes alone, not from vLLM's own properties."""
    spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(layer_name, group.kv_cache_spec)
    if isinstance(spec, specs.MambaSpec):
        ((rows, columns),) = spec.shapes
        return rows * columns * 2
    per_token = spec.num_kv_heads * (spec.head_size + spec.head_size_v) * spec.dtype.itemsize
    return spec.block_size * per_token


@pytest.mark.parametrize("layout_name", ["LBHNC", "LBNHC"])
def test_blocks_that_kernels_split_move_whole(layout_name: str):
    memory = Memory(layers(2, attention(block_size=64)), layout_name, [16])
    assert memory.views["layer.0"].shape[0] == 4 * BLOCK_COUNT
    layout = memory.describe()
    assert layout.manifest.chunk_bytes(0) == 64 * 4 * 128 * 2
    memory.assert_moves_exactly(layout, 0, [1, 2, 9], [3, 20, 21])


def test_split_blocks_beside_whole_states_move_exactly():
    layer_specs = {"layer.0": state(32768, block_size=64), "layer.1": attention(block_size=64)}
    memory = Memory(layer_specs, "LBHNC", [64, 16])
    assert [memory.views[f"layer.{i}"].shape[0] for i in (0, 1)] == [BLOCK_COUNT, 4 * BLOCK_COUNT]
    layout = memory.describe()
    assert [layout.manifest.chunk_bytes(i) for i in (0, 1)] == [1264, 32768]
    for group_idx in (0, 1):
        memory.assert_moves_exactly(layout, group_idx, [1, 2, 9], [3, 20, 21])


def test_blocks_that_kernels_split_differently_are_other_bytes():
    whole, split = (
        Memory({"layer.0": attention(block_size=64)}, "LBHNC", sizes).describe()
        for sizes in (None, [16])
    )
    assert whole.manifest.namespace != split.manifest.namespace


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


def test_tokens_that_vllm_retains_behind_a_window_belong_to_it():
    layout = Memory(layers(2, window(extra_retained_tokens=5)), "LBHNC").describe()
    assert [group.window_tokens for group in layout.manifest.groups] == [63 + 5]


def test_a_layer_that_shares_anothers_pages_is_kept_once():
    memory = Memory(full(), "LBHNC")
    before = memory.describe().manifest
    memory.views["layer.3"] = memory.views["layer.1"]
    memory.config.kv_cache_groups[0].layer_names.append("layer.3")
    assert memory.describe().manifest == before


def test_the_runs_of_a_page_are_kept_in_order_of_their_addresses():
    """The order is part of what is on disk, and a round trip would not notice another one."""
    memory = Memory({"layer.0": attention()}, "LBHNC")
    scattered = torch.zeros(4, 16, BLOCK_COUNT, 64, dtype=torch.float16)
    memory.views["layer.0"] = scattered.permute(2, 0, 1, 3)
    caches = memory.describe().caches
    addresses = [caches.tensors[ref.tensor_idx].address for ref in caches.group_refs[0]]
    first, step = scattered.data_ptr(), BLOCK_COUNT * 64 * 2
    assert addresses == [first + i * step for i in range(4 * 16)]


@pytest.mark.parametrize("family", [full, alternating, hybrid, latent_and_indexer])
def test_a_block_holds_the_tokens_that_vllm_says_it_holds(family: Callable[[], Specs]):
    """Context parallel ranks share the tokens of a block, but not where layers are replicated."""
    memory = Memory(family(), "LBHNC")
    memory.vllm_config.parallel_config.decode_context_parallel_size = 2
    found = [group.tokens_per_block for group in memory.describe().manifest.groups]
    assert found == [
        resolve_dcp_kv_block_size(group.kv_cache_spec, 2) for group in memory.config.kv_cache_groups
    ]
