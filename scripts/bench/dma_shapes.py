"""The cases of `bench_dma`: pages and chunks of all sizes, in registered caches and slots."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bench.dma_devices import Device
from tierstore.dma.protocol import CopyEngine
from tierstore.dma.runs import GroupAddressing
from tierstore.host_pool import HostPool
from tierstore.layout import (
    PAGE_BYTES,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    ChunkOrder,
    round_up,
)

PAGES_KIB = (4, 16, 64, 256, 1024)
CHUNKS_KIB = (64, 512, 8192)
RUN_COUNTS = (1, 10, 100, 1000, 10_000)
LAYOUTS = ("hnd", "padded", "blocks")
LAYER_COUNT = 32
GAP_BYTES = 512


@dataclass(frozen=True)
class Shape:
    """The chunks of one copy."""

    layout: str
    page_bytes: int
    layer_count: int
    blocks_per_chunk: int
    chunk_count: int

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk."""
        return self.page_bytes * self.layer_count * self.blocks_per_chunk


def shapes(options: argparse.Namespace) -> Iterator[Shape]:
    """Return pages and chunks of all sizes in every layout, then single pages by number."""
    total_bytes = options.mib << 20
    for layout in options.layouts:
        for page_kib in options.pages:
            for chunk_kib in options.chunks:
                if chunk_kib >= page_kib:
                    yield chunk_shape(layout, page_kib << 10, chunk_kib << 10, total_bytes)
    for page_kib in options.pages:
        for run_count in options.runs:
            if run_count * (page_kib << 10) <= total_bytes:
                yield Shape("single", page_kib << 10, 1, 1, run_count)


def chunk_shape(layout: str, page_bytes: int, chunk_bytes: int, total_bytes: int) -> Shape:
    """Fill chunks with pages, and as many bytes as asked for, but no more than 10,000 runs."""
    layers = min(LAYER_COUNT, chunk_bytes // page_bytes)
    blocks_per_chunk = chunk_bytes // (layers * page_bytes)
    runs_per_chunk = blocks_per_chunk * (1 if layout == "blocks" else layers)
    count = min(total_bytes // chunk_bytes, max(RUN_COUNTS) // runs_per_chunk)
    return Shape(layout, page_bytes, layers, blocks_per_chunk, max(1, count))


class Setup:
    """Registered caches and slots of one shape: half of each for offloads, half for loads."""

    def __init__(self, device: Device, shape: Shape) -> None:
        self.device = device
        self.shape = shape
        slot_pages = round_up(shape.chunk_bytes, PAGE_BYTES) // PAGE_BYTES
        self.block_count = 2 * shape.chunk_count * shape.blocks_per_chunk
        pool_bytes = 2 * shape.chunk_count * slot_pages * PAGE_BYTES
        self.pool = HostPool(pool_bytes, huge_pages=True)  # as a configuration has it
        gap = GAP_BYTES if shape.layout == "padded" else 0
        self._address = device.alloc(
            self.block_count * shape.layer_count * (shape.page_bytes + gap)
        )
        self.caches = self._caches(shape.layout, shape.page_bytes, gap, shape.layer_count)
        random = np.random.default_rng(0)
        halves = (2, shape.chunk_count, shape.blocks_per_chunk)
        self.blocks = random.permutation(self.block_count).reshape(halves)
        self.slots = random.permutation(2 * shape.chunk_count).reshape(2, -1) * slot_pages
        addressing = GroupAddressing(
            self.caches, 0, shape.blocks_per_chunk, self.pool.address, self.pool.size_bytes
        )
        self.run_count = len(addressing.runs(self.blocks[0], self.slots[0]))

    def _caches(self, layout: str, page_bytes: int, gap: int, layers: int) -> CanonicalKVCaches:
        layer_bytes = self.block_count * (page_bytes + gap)
        together = layout == "blocks"
        tensors = tuple(
            CanonicalKVCacheTensor(
                address=self._address + layer * (page_bytes if together else layer_bytes),
                block_count=self.block_count,
                block_stride_bytes=layers * page_bytes if together else page_bytes + gap,
                page_bytes=page_bytes,
                owner=self,
            )
            for layer in range(layers)
        )
        refs = tuple(CanonicalKVCacheRef(layer_name=str(i), tensor_idx=i) for i in range(layers))
        order = ChunkOrder.BLOCK_MAJOR if together else ChunkOrder.LAYER_MAJOR
        return CanonicalKVCaches(
            tensors=tensors, group_refs=(refs,), chunk_order=order, device=self.device.name
        )

    def engine(self, method: str) -> CopyEngine:
        """Return an engine that copies by one method, with the whole pool pinned."""
        engine = self.device.engine(method)
        engine.register(
            self.caches, self.shape.blocks_per_chunk, self.pool.address, self.pool.size_bytes
        )
        return engine

    def copied_bytes(self, direction: str) -> int:
        """Return the bytes of one run of a case."""
        half = self.shape.chunk_count * self.shape.chunk_bytes
        return half * (2 if direction == "both" else 1)

    def large_copy(self, direction: str) -> float:
        """Return the seconds of copying the same bytes at once."""
        half = self.shape.chunk_count * self.shape.chunk_bytes
        return self.device.large_copy(direction, self._address, self.pool.address, half)

    def close(self) -> None:
        """Give the memory back."""
        self.device.free(self._address)
        self.pool.close()
