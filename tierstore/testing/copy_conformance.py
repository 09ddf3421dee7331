"""Conformance suite of copy engines: what every one of them must do with bytes.

Subclass `CopyConformance`, give it memory of the device, and pytest runs the rest:

    class TestHostCopyEngine(CopyConformance):
        def make_engine(self): return HostCopyEngine()
        def make_memory(self, data): return HostMemory(data)
"""

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierstore.arrays import ByteArray
from tierstore.dma.protocol import CopyEngine, CopyId
from tierstore.errors import LayoutError
from tierstore.host_pool import HostPool
from tierstore.layout import (
    PAGE_BYTES,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    ChunkOrder,
    round_up,
)

__all__ = [
    "BLOCK_COUNT",
    "SLOT_COUNT",
    "CopyConformance",
    "DeviceMemory",
    "HostMemory",
    "make_caches",
]

BLOCK_COUNT = 16
SLOT_COUNT = 8


class DeviceMemory(Protocol):
    """Some bytes on the engine's device."""

    device: str
    address: int

    def read(self) -> ByteArray:
        """Copy all bytes to a new host array, after everything that is in flight."""

    def write(self, data: ByteArray) -> None:
        """Overwrite all bytes."""


class HostMemory:
    """Device memory of the CPU platform."""

    def __init__(self, data: ByteArray) -> None:
        self._data = data.copy()
        self.device = "cpu"
        self.address = self._data.ctypes.data

    def read(self) -> ByteArray:
        """Copy all bytes."""
        return self._data.copy()

    def write(self, data: ByteArray) -> None:
        """Overwrite all bytes."""
        self._data[:] = data


def make_caches(
    memory: DeviceMemory,
    pages: list[int],
    gap: int,
    order: ChunkOrder,
    *,
    blocks_outside: bool = False,
) -> CanonicalKVCaches:
    """Lay layers out one after the other, each page of `pages[layer]` followed by `gap` bytes.

    With `blocks_outside` all pages of a block lie together instead, and then those of the next.
    """
    tensors = []
    address = memory.address
    for page in pages:
        tensors.append(
            CanonicalKVCacheTensor(
                address=address,
                block_count=BLOCK_COUNT,
                block_stride_bytes=sum(pages) + len(pages) * gap if blocks_outside else page + gap,
                page_bytes=page,
                owner=memory,
            )
        )
        address += (page + gap) * (1 if blocks_outside else BLOCK_COUNT)
    refs = tuple(CanonicalKVCacheRef(layer_name=str(i), tensor_idx=i) for i in range(len(pages)))
    return CanonicalKVCaches(
        tensors=tuple(tensors), group_refs=(refs,), chunk_order=order, device=memory.device
    )


class CopyConformance(ABC):
    """Tests that every copy engine passes."""

    @abstractmethod
    def make_engine(self) -> CopyEngine:
        """Return an engine without regions."""

    @abstractmethod
    def make_memory(self, data: ByteArray) -> DeviceMemory:
        """Return device memory with these bytes."""

    # Every subclass runs the same test: that is what a suite is for.
    @settings(
        max_examples=50, deadline=None, suppress_health_check=[HealthCheck.differing_executors]
    )
    @given(
        pages=st.lists(st.sampled_from([64, 192, 4096]), min_size=1, max_size=3),
        gap=st.sampled_from([0, 32]),
        order=st.sampled_from(ChunkOrder),
        blocks_outside=st.booleans(),
        blocks_per_chunk=st.integers(1, 3),
        data=st.data(),
    )
    def test_a_round_trip_restores_live_bytes_and_no_others(
        self,
        *,
        pages: list[int],
        gap: int,
        order: ChunkOrder,
        blocks_outside: bool,
        blocks_per_chunk: int,
        data: st.DataObject,
    ) -> None:
        """Offload, spoil everything, load: live bytes are back, all others stay spoilt."""
        random = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
        size = BLOCK_COUNT * sum(page + gap for page in pages)
        before = random.integers(0, 256, size, np.uint8)
        memory = self.make_memory(before)
        caches = make_caches(memory, pages, gap, order, blocks_outside=blocks_outside)
        slot_pages = round_up(sum(pages) * blocks_per_chunk, PAGE_BYTES) // PAGE_BYTES
        chunk_count = data.draw(st.integers(1, min(SLOT_COUNT, BLOCK_COUNT // blocks_per_chunk)))
        block_ids = random.permutation(BLOCK_COUNT)[: chunk_count * blocks_per_chunk]
        chunks = block_ids.reshape(chunk_count, blocks_per_chunk)
        slots = random.permutation(SLOT_COUNT)[:chunk_count] * slot_pages
        pool = HostPool(SLOT_COUNT * slot_pages * PAGE_BYTES)
        engine = self.make_engine()
        engine.register(caches, blocks_per_chunk, pool.address, pool.size_bytes)

        engine.submit_offload(CopyId(1), 0, chunks, slots)
        _wait(engine, {CopyId(1)})
        spoilt = before ^ np.uint8(0xFF)
        memory.write(spoilt)
        engine.submit_load(CopyId(2), 0, chunks, slots)
        _wait(engine, {CopyId(2)})

        expected = spoilt.copy()
        for tensor in caches.tensors:
            for block in block_ids.tolist():
                start = tensor.address - memory.address + block * tensor.block_stride_bytes
                page = slice(start, start + tensor.page_bytes)
                expected[page] = before[page]
        assert np.array_equal(memory.read(), expected)
        engine.close()
        pool.close()

    @pytest.mark.parametrize(
        ("order", "pages_in_slot"),
        [
            (ChunkOrder.LAYER_MAJOR, [(0, 3), (0, 5), (1, 3), (1, 5)]),
            (ChunkOrder.BLOCK_MAJOR, [(0, 3), (1, 3), (0, 5), (1, 5)]),
        ],
    )
    def test_the_chunk_order_decides_the_order_of_pages_in_a_slot(
        self, order: ChunkOrder, pages_in_slot: list[tuple[int, int]]
    ) -> None:
        """A slot's bytes are the record's bytes: their order is part of the identity."""
        layers = np.random.default_rng(0).integers(0, 256, (2, BLOCK_COUNT, 64), np.uint8)
        memory = self.make_memory(layers.reshape(-1))
        pool = HostPool(PAGE_BYTES)
        engine = self.make_engine()
        caches = make_caches(memory, [64, 64], 0, order)
        engine.register(caches, 2, pool.address, pool.size_bytes)
        engine.submit_offload(CopyId(1), 0, np.array([[3, 5]]), np.array([0]))
        _wait(engine, {CopyId(1)})
        expected = np.concatenate([layers[layer, block] for layer, block in pages_in_slot])
        assert np.array_equal(pool.array[:256], expected)
        engine.close()

    def test_a_negative_block_is_left_out_of_a_load(self) -> None:
        """The engine wants only some blocks of a chunk (the others are hits of its own)."""
        memory = self.make_memory(np.full(BLOCK_COUNT * 64, 7, np.uint8))
        pool = HostPool(PAGE_BYTES)
        engine = self.make_engine()
        caches = make_caches(memory, [64], 0, ChunkOrder.LAYER_MAJOR)
        engine.register(caches, 2, pool.address, pool.size_bytes)
        engine.submit_load(CopyId(1), 0, np.array([[-1, 4]]), np.array([0]))
        _wait(engine, {CopyId(1)})
        zeroed = (memory.read().reshape(BLOCK_COUNT, 64) == 0).all(axis=1)
        assert np.flatnonzero(zeroed).tolist() == [4]
        engine.close()

    def test_groups_that_share_memory_keep_their_bytes_apart(self) -> None:
        """Two groups with pages of different sizes in the same blocks (packed, aliased)."""
        before = np.random.default_rng(1).integers(0, 256, BLOCK_COUNT * 256, np.uint8)
        memory = self.make_memory(before)
        tensors = tuple(
            CanonicalKVCacheTensor(
                address=memory.address + offset,
                block_count=BLOCK_COUNT,
                block_stride_bytes=256,
                page_bytes=page,
                owner=memory,
            )
            for offset, page in [(0, 64), (64, 192), (0, 256)]
        )
        groups = (
            tuple(CanonicalKVCacheRef(layer_name=str(i), tensor_idx=i) for i in (0, 1)),
            (CanonicalKVCacheRef(layer_name="2", tensor_idx=2),),
        )
        caches = CanonicalKVCaches(
            tensors=tensors,
            group_refs=groups,
            chunk_order=ChunkOrder.BLOCK_MAJOR,
            device=memory.device,
        )
        pool = HostPool(2 * PAGE_BYTES)
        engine = self.make_engine()
        engine.register(caches, 2, pool.address, pool.size_bytes)
        engine.submit_offload(CopyId(1), 0, np.array([[3, 4]]), np.array([1]))
        engine.submit_offload(CopyId(2), 1, np.array([[9, 4]]), np.array([0]))
        _wait(engine, {CopyId(1), CopyId(2)})
        blocks = before.reshape(BLOCK_COUNT, 256)
        slots = pool.array.reshape(2, PAGE_BYTES)[:, :512].reshape(2, 2, 256)
        assert np.array_equal(slots, blocks[[[9, 4], [3, 4]]])
        engine.close()

    @pytest.mark.parametrize(
        ("block_ids", "slots"),
        [([[BLOCK_COUNT]], [0]), ([[0]], [1]), ([[0]], [-1]), ([[0, 1]], [0]), ([[0]], [0, 0])],
    )
    def test_an_address_outside_its_region_is_refused_and_nothing_is_copied(
        self, block_ids: list[list[int]], slots: list[int]
    ) -> None:
        """A wrong id must never become a wild pointer."""
        memory = self.make_memory(np.full(BLOCK_COUNT * 64, 7, np.uint8))
        pool = HostPool(PAGE_BYTES)
        engine = self.make_engine()
        caches = make_caches(memory, [64], 0, ChunkOrder.LAYER_MAJOR)
        engine.register(caches, 1, pool.address, pool.size_bytes)
        with pytest.raises(LayoutError):
            engine.submit_load(CopyId(1), 0, np.array(block_ids), np.array(slots))
        assert (memory.read() == 7).all()  # noqa: PLR2004
        assert engine.poll() == []
        engine.close()


def _wait(engine: CopyEngine, copy_ids: set[CopyId]) -> None:
    while copy_ids:
        copy_ids = copy_ids.difference(engine.poll())
