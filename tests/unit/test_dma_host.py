"""The host copy engine passes the conformance suite; the address arithmetic coalesces."""

import numpy as np
import pytest

from tierstore.dma.host import HostCopyEngine
from tierstore.dma.runs import GroupAddressing
from tierstore.errors import LayoutError
from tierstore.layout import PAGE_BYTES, CanonicalKVCaches, ChunkOrder
from tierstore.testing.copy_conformance import (
    BLOCK_COUNT,
    CopyConformance,
    HostMemory,
    make_caches,
)


class TestHostCopyEngine(CopyConformance):
    def make_engine(self):
        return HostCopyEngine()

    def make_memory(self, data):
        return HostMemory(data)


def test_adjacent_blocks_in_adjacent_slots_become_one_run():
    memory = HostMemory(np.zeros(BLOCK_COUNT * PAGE_BYTES, np.uint8))
    caches = make_caches(memory, [PAGE_BYTES], 0, ChunkOrder.LAYER_MAJOR)
    addressing = GroupAddressing(caches, 0, 1, 1 << 20, 64 * PAGE_BYTES)
    runs = addressing.runs(np.array([[2], [3], [4], [9]]), np.array([7, 8, 9, 10]))
    assert runs.sizes_bytes.tolist() == [3 * PAGE_BYTES, PAGE_BYTES]
    assert runs.pool_addresses.tolist() == [(1 << 20) + 7 * PAGE_BYTES, (1 << 20) + 10 * PAGE_BYTES]


def test_caches_of_another_device_are_refused():
    caches = CanonicalKVCaches(
        tensors=(), group_refs=(), chunk_order=ChunkOrder.LAYER_MAJOR, device="cuda:0"
    )
    with pytest.raises(LayoutError, match="expected device cpu, got cuda:0"):
        HostCopyEngine().register(caches, 1, 0, 0)
