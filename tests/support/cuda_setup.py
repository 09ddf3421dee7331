"""A CUDA engine over the fake with its memory, for tests of what happens in which order."""

import numpy as np
from cuda_engines import BATCHES, make_engine

from tierstore.dma.protocol import CopyId
from tierstore.host_pool import HostPool
from tierstore.layout import PAGE_BYTES, ChunkOrder
from tierstore.testing.copy_conformance import BLOCK_COUNT, make_caches
from tierstore.testing.fake_cuda import FakeCuda, FakeDeviceMemory

COMPUTE = 0
PAGE = 256
LAYERS = 5


class Setup:
    """A registered engine, its device memory and its pool."""

    def __init__(
        self,
        config=BATCHES,
        *,
        slot_count=BLOCK_COUNT,
        pinned=True,
        compute_stream=None,
        api=None,
        **fake,
    ) -> None:
        self.api = api or FakeCuda(**fake)
        self.memory = FakeDeviceMemory(self.api, np.zeros(BLOCK_COUNT * PAGE * LAYERS, np.uint8))
        self.pool = HostPool(slot_count * PAGE_BYTES)
        self.engine = make_engine(self.api, config, pinned=pinned, compute_stream=compute_stream)
        caches = make_caches(self.memory, [PAGE] * LAYERS, 0, ChunkOrder.LAYER_MAJOR)
        self.engine.register(caches, 1, self.pool.address, self.pool.size_bytes)
        self.api.calls.clear()

    def fill(self, block: int, value: int) -> None:
        self.memory._bytes.reshape(LAYERS, BLOCK_COUNT, PAGE)[:, block] = value

    def block(self, block: int) -> np.ndarray:
        return self.memory._bytes.reshape(LAYERS, BLOCK_COUNT, PAGE)[:, block].copy()

    def slot(self, slot: int) -> np.ndarray:
        return self.pool.array[slot * PAGE_BYTES :][: PAGE * LAYERS]

    def compute(self, block: int, value: int) -> None:
        """Launch a step that writes a block."""
        self.api.launch(COMPUTE, lambda: self.fill(block, value))

    def offload(self, copy_id: int, blocks, slots) -> None:
        self.engine.submit_offload(CopyId(copy_id), 0, np.array(blocks)[:, None], np.array(slots))

    def load(self, copy_id: int, blocks, slots, **options) -> None:
        blocks = np.array(blocks)[:, None]
        self.engine.submit_load(CopyId(copy_id), 0, blocks, np.array(slots), **options)

    def wait(self, *copy_ids: int) -> list[int]:
        arrived: list[int] = []
        for _ in range(10_000):
            arrived += self.engine.poll()
            if set(copy_ids) <= set(arrived):
                return arrived
        raise AssertionError(f"{copy_ids} did not arrive")
