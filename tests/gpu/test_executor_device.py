"""The executor as an engine opens it, on a real device: threads, pinned pool, pipeline."""

import itertools

import numpy as np
import pytest
from cuda_device import NEEDS_GPU, CudaMemory

from tierstore.codec.record import PLACE_DTYPE
from tierstore.config import load_config
from tierstore.executor import TransferExecutor
from tierstore.key import Namespace, make_offload_keys
from tierstore.layout import PAGE_BYTES, ChunkOrder
from tierstore.manifest import Manifest
from tierstore.metrics import Counters
from tierstore.testing.copy_conformance import BLOCK_COUNT, make_caches
from tierstore.testing.spread import spread_hashes
from tierstore.transfer import JobId, Load, LoadPart, Offload, Promote

pytestmark = NEEDS_GPU

PAGE = 4 << 20
"""A chunk is a batch of its own, so that its copy can overlap the next read."""
COUNT = 8


class CountingBackend:
    """Fills slots with 1, 2, ... in the order of the reads."""

    def __init__(self) -> None:
        self._reads = itertools.count(1)

    def read(self, records):
        for record in records:
            record.slot[:] = bytes([next(self._reads)]) * len(record.slot)
        return {}

    def close(self) -> None:
        pass


@pytest.fixture
def memory():
    return CudaMemory(np.random.default_rng(0).integers(0, 256, BLOCK_COUNT * PAGE, np.uint8))


@pytest.fixture
def counters():
    return Counters()


@pytest.fixture
def executor(memory, counters):
    tier = {"name": "disk", "backend": "file", "path": "unused", "capacity": "64MiB"}
    tier["io"] = {"threads": 1}
    primary = {"capacity": f"{COUNT * PAGE}B"}
    executor = TransferExecutor.open(
        load_config({"version": 1, "primary": primary, "secondary": [tier]}),
        Manifest.simple("m", PAGE),
        rank=0,
        rank_count=1,
        caches=make_caches(memory, [PAGE], 0, ChunkOrder.LAYER_MAJOR),
        counters=counters,
        open_backend=lambda *_, **__: CountingBackend(),
    )
    yield executor
    executor.close()
    assert counters.snapshot()["pinned_bytes"] == 0


BLOCKS = np.array([7, 2, 9, 4, 0, 15, 11, 5])
SLOTS = np.arange(COUNT) * PAGE // PAGE_BYTES


def part() -> LoadPart:
    return LoadPart(group_idx=0, block_ids=BLOCKS[:, None], slots=SLOTS)


def test_blocks_go_to_slots_and_back(executor, memory) -> None:
    before = memory.read()
    offload = Offload(job_id=JobId(1), group_idx=0, block_ids=BLOCKS[:, None], slots=SLOTS)
    executor.submit([offload])
    assert [answer.ok for answer in executor.drain(60)] == [True]
    spoilt = before ^ np.uint8(0xFF)
    memory.write(spoilt)
    executor.submit([Load(job_id=JobId(2), parts=(part(),))])
    assert [answer.ok for answer in executor.drain(60)] == [True]
    expected = spoilt.reshape(BLOCK_COUNT, PAGE)
    expected[BLOCKS] = before.reshape(BLOCK_COUNT, PAGE)[BLOCKS]
    assert np.array_equal(memory.read(), expected.reshape(-1))


def test_chunks_that_threads_read_arrive_in_their_blocks(executor, memory) -> None:
    places = np.zeros(COUNT, PLACE_DTYPE)
    places["header_page"] = np.arange(COUNT)
    promote = Promote(
        tier_idx=0,
        group_idx=0,
        keys=tuple(make_offload_keys(Namespace(b"n" * 8), 0, spread_hashes(range(COUNT)))),
        places=places,
        slots=SLOTS,
    )
    executor.submit([Load(job_id=JobId(1), parts=(part(),), promotes=(promote,))])
    assert [answer.ok for answer in executor.drain(60)] == [True]
    blocks = memory.read().reshape(BLOCK_COUNT, PAGE)[BLOCKS]
    assert (blocks == np.arange(1, COUNT + 1)[:, None]).all()
