"""Address arithmetic and the host copy engine, on random layouts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.dma.host import HostCopyEngine
from tierstore.dma.protocol import CopyId
from tierstore.dma.runs import GroupAddressing
from tierstore.errors import LayoutError
from tierstore.layout import (
    PAGE_BYTES,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    ChunkOrder,
    round_up,
)

BLOCK_COUNT = 16


def make_caches(memory, pages, gap, order):
    """Lay the layers out one after the other; each page is followed by a gap of `gap` bytes."""
    tensors, address = [], memory.ctypes.data
    for page in pages:
        tensors.append(
            CanonicalKVCacheTensor(
                address=address,
                block_count=BLOCK_COUNT,
                block_stride_bytes=page + gap,
                page_bytes=page,
                owner=memory,
            )
        )
        address += BLOCK_COUNT * (page + gap)
    refs = tuple(CanonicalKVCacheRef(layer_name=str(i), tensor_idx=i) for i in range(len(pages)))
    return CanonicalKVCaches(
        tensors=tuple(tensors), group_refs=(refs,), chunk_order=order, device="cpu"
    )


layouts = st.tuples(
    st.lists(st.sampled_from([64, 192, 4096]), min_size=1, max_size=3),
    st.sampled_from([0, 32]),
    st.sampled_from(list(ChunkOrder)),
    st.integers(1, 3),
)


@settings(max_examples=150, deadline=None)
@given(layouts, st.randoms(use_true_random=False))
def test_a_round_trip_restores_every_live_byte_and_touches_no_neighbour(layout, random):
    pages, gap, order, blocks_per_chunk = layout
    memory = np.frombuffer(
        random.randbytes(BLOCK_COUNT * sum(page + gap for page in pages)), np.uint8
    ).copy()
    chunk_bytes = sum(pages) * blocks_per_chunk
    slot_pages = round_up(chunk_bytes, PAGE_BYTES) // PAGE_BYTES
    pool = np.zeros(8 * slot_pages * PAGE_BYTES, np.uint8)
    caches = make_caches(memory, pages, gap, order)
    engine = HostCopyEngine()
    engine.register(caches, blocks_per_chunk, pool.ctypes.data, pool.nbytes)
    chunk_count = random.randint(1, BLOCK_COUNT // blocks_per_chunk)
    chunk_count = min(chunk_count, 8)
    ids = random.sample(range(BLOCK_COUNT), chunk_count * blocks_per_chunk)
    block_ids = np.array(ids, np.int64).reshape(chunk_count, blocks_per_chunk)
    slots = np.array(random.sample(range(8), chunk_count), np.int64) * slot_pages
    before = memory.copy()
    engine.submit_offload(CopyId(1), 0, block_ids, slots)
    for tensor in caches.tensors:
        for block in ids:
            start = tensor.address - memory.ctypes.data + block * tensor.block_stride_bytes
            memory[start : start + tensor.page_bytes] ^= 0xFF
    engine.submit_load(CopyId(2), 0, block_ids, slots)
    assert np.array_equal(memory, before)
    assert engine.poll() == [1, 2]
    assert engine.poll() == []


def test_slot_bytes_follow_the_chunk_order():
    memory = np.arange(BLOCK_COUNT * 2 * 64, dtype=np.uint32).astype(np.uint8)
    for order, expected_blocks in (
        (ChunkOrder.LAYER_MAJOR, [(0, 3), (0, 5), (1, 3), (1, 5)]),
        (ChunkOrder.BLOCK_MAJOR, [(0, 3), (1, 3), (0, 5), (1, 5)]),
    ):
        pool = np.zeros(PAGE_BYTES, np.uint8)
        engine = HostCopyEngine()
        engine.register(
            make_caches(memory, [64, 64], 0, order), 2, pool.ctypes.data, pool.nbytes
        )
        engine.submit_offload(CopyId(1), 0, np.array([[3, 5]]), np.array([0]))
        layers = memory.reshape(2, BLOCK_COUNT, 64)
        expected = np.concatenate([layers[layer, block] for layer, block in expected_blocks])
        assert np.array_equal(pool[:256], expected)


def test_adjacent_blocks_in_adjacent_pages_become_one_run():
    memory = np.zeros(BLOCK_COUNT * PAGE_BYTES, np.uint8)
    caches = make_caches(memory, [PAGE_BYTES], 0, ChunkOrder.LAYER_MAJOR)
    addressing = GroupAddressing(caches, 0, 1, 1 << 20, 64 * PAGE_BYTES)
    runs = addressing.runs(np.array([[2], [3], [4], [9]]), np.array([7, 8, 9, 10]))
    assert runs.sizes_bytes.tolist() == [3 * PAGE_BYTES, PAGE_BYTES]
    assert runs.pool_addresses.tolist() == [(1 << 20) + 7 * PAGE_BYTES, (1 << 20) + 10 * PAGE_BYTES]


def test_a_negative_block_is_left_out_of_a_load():
    memory = np.full(BLOCK_COUNT * 64, 7, np.uint8)
    pool = np.zeros(PAGE_BYTES, np.uint8)
    engine = HostCopyEngine()
    engine.register(
        make_caches(memory, [64], 0, ChunkOrder.LAYER_MAJOR), 2, pool.ctypes.data, pool.nbytes
    )
    engine.submit_load(CopyId(1), 0, np.array([[-1, 4]]), np.array([0]))
    changed = np.flatnonzero(memory.reshape(BLOCK_COUNT, 64).any(axis=1) == 0)
    assert changed.tolist() == [4]


@pytest.mark.parametrize(
    ("block_ids", "slots"),
    [([[BLOCK_COUNT]], [0]), ([[0]], [1]), ([[0]], [-1]), ([[0, 1]], [0]), ([[0]], [0, 0])],
)
def test_an_address_outside_its_region_is_refused_and_nothing_is_copied(block_ids, slots):
    memory = np.full(BLOCK_COUNT * 64, 7, np.uint8)
    pool = np.zeros(PAGE_BYTES, np.uint8)
    engine = HostCopyEngine()
    engine.register(
        make_caches(memory, [64], 0, ChunkOrder.LAYER_MAJOR), 1, pool.ctypes.data, pool.nbytes
    )
    with pytest.raises(LayoutError):
        engine.submit_load(CopyId(1), 0, np.array(block_ids), np.array(slots))
    assert (memory == 7).all()
    assert engine.poll() == []


def test_caches_of_another_device_are_refused():
    caches = CanonicalKVCaches(
        tensors=(), group_refs=(), chunk_order=ChunkOrder.LAYER_MAJOR, device="cuda:0"
    )
    with pytest.raises(LayoutError, match="expected device cpu, got cuda:0"):
        HostCopyEngine().register(caches, 1, 0, 0)
