"""From block ids and slots to runs: every page once, and nothing adjacent left apart."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tierstore.dma.runs import CopyRuns, GroupAddressing
from tierstore.layout import PAGE_BYTES, CanonicalKVCaches, ChunkOrder, round_up
from tierstore.testing.copy_conformance import BLOCK_COUNT, make_caches

POOL = 1 << 30
DEVICE = SimpleNamespace(address=1 << 40, device="cuda:0")


def caches_of(pages, order, *, together=False, gap=0) -> CanonicalKVCaches:
    return make_caches(DEVICE, pages, gap, order, blocks_outside=together)


def runs_of(caches, block_ids, slots) -> CopyRuns:
    block_ids = np.array(block_ids)
    addressing = GroupAddressing(caches, 0, block_ids.shape[1], POOL, 1 << 24)
    return addressing.runs(block_ids, np.array(slots))


def pages_of(caches, block_ids, slots) -> list[tuple[int, int, int]]:
    """The same page by page: (device address, pool address, bytes)."""
    found = []
    for blocks, slot in zip(block_ids, slots, strict=True):
        at = POOL + slot * PAGE_BYTES
        pairs = [(block, tensor) for block in blocks for tensor in caches.tensors]
        if caches.chunk_order is ChunkOrder.LAYER_MAJOR:
            pairs = [(block, tensor) for tensor in caches.tensors for block in blocks]
        for block, tensor in pairs:
            if block >= 0:
                device = tensor.address + block * tensor.block_stride_bytes
                found.append((device, at, tensor.page_bytes))
            at += tensor.page_bytes
    return found


@given(
    pages=st.lists(st.sampled_from([64, 192, 4096]), min_size=1, max_size=4),
    order=st.sampled_from(ChunkOrder),
    together=st.booleans(),
    gap=st.sampled_from([0, 0, 32]),
    blocks_per_chunk=st.integers(1, 3),
    data=st.data(),
)
def test_runs_are_the_pages_joined_as_far_as_they_go(
    *, pages, order, together, gap, blocks_per_chunk, data
) -> None:
    caches = caches_of(pages, order, together=together, gap=gap)
    slot_pages = round_up(sum(pages) * blocks_per_chunk, PAGE_BYTES) // PAGE_BYTES
    chunk_count = data.draw(st.integers(1, 4))
    ids = st.integers(0, BLOCK_COUNT - blocks_per_chunk)
    consecutive = [
        [first + i for i in range(blocks_per_chunk)]
        for first in data.draw(st.lists(ids, min_size=chunk_count, max_size=chunk_count))
    ]
    block_ids = [
        [block if data.draw(st.booleans()) else -1 for block in blocks] for blocks in consecutive
    ]
    first_slot = data.draw(st.integers(0, 3))
    slots = [(first_slot + i) * slot_pages for i in range(chunk_count)]
    expected: list[tuple[int, int, int]] = []
    for device, pool, size in pages_of(caches, block_ids, slots):
        if expected:
            last_device, last_pool, last_size = expected[-1]
            if (last_device + last_size, last_pool + last_size) == (device, pool):
                expected[-1] = (last_device, last_pool, last_size + size)
                continue
        expected.append((device, pool, size))
    runs = runs_of(caches, block_ids, slots)
    parts = (runs.device_addresses, runs.pool_addresses, runs.sizes_bytes)
    assert list(zip(*(part.tolist() for part in parts), strict=True)) == expected


def test_adjacent_blocks_of_a_layer_are_one_run_per_layer() -> None:
    caches = caches_of([512] * 3, ChunkOrder.LAYER_MAJOR)
    assert runs_of(caches, [[4, 5, 6, 7]], [0]).sizes_bytes.tolist() == [2048] * 3


def test_adjacent_layers_of_a_block_are_one_run() -> None:
    caches = caches_of([512] * 4, ChunkOrder.BLOCK_MAJOR, together=True)
    assert runs_of(caches, [[4], [6]], [0, 1]).sizes_bytes.tolist() == [2048] * 2


def test_adjacent_whole_chunks_in_adjacent_slots_are_one_run() -> None:
    caches = caches_of([2048] * 2, ChunkOrder.BLOCK_MAJOR, together=True)
    runs = runs_of(caches, [[2, 3], [4, 5], [8, 9]], [6, 8, 10])
    assert runs.sizes_bytes.tolist() == [4 * 4096, 2 * 4096]


def test_gaps_between_pages_are_never_copied() -> None:
    caches = caches_of([512] * 2, ChunkOrder.BLOCK_MAJOR, together=True, gap=64)
    assert runs_of(caches, [[4, 5]], [0]).sizes_bytes.tolist() == [512] * 4
