"""The executor over the CUDA engine: each command is answered, with its bytes or a failure."""

import itertools
import threading
import time

import numpy as np
import pytest
from cuda_engines import BATCHES, make_engine
from hypothesis import given
from hypothesis import strategies as st

from tierstore.backend.opening import open_backend
from tierstore.clock import MonotonicClock
from tierstore.codec.record import PLACE_DTYPE
from tierstore.config import load_config
from tierstore.dma.gpu.engine import CudaCopyEngine
from tierstore.errors import DeviceError, LayoutError
from tierstore.executor import TransferExecutor
from tierstore.executor import executor as executor_module
from tierstore.host_pool import HostPool
from tierstore.key import Namespace, make_offload_keys
from tierstore.layout import PAGE_BYTES, CanonicalKVCaches, ChunkOrder
from tierstore.manifest import Manifest
from tierstore.metrics import Counters
from tierstore.testing.copy_conformance import BLOCK_COUNT, make_caches
from tierstore.testing.fake_cuda import FakeCuda, FakeDeviceMemory
from tierstore.testing.spread import spread_hashes
from tierstore.transfer import FailureReason, JobId, Load, LoadPart, Offload, Place, Promote

PAGE = 512


class Setup:
    def __init__(self, **fake) -> None:
        self.api = FakeCuda(**fake)
        self.memory = FakeDeviceMemory(self.api, np.zeros(BLOCK_COUNT * PAGE, np.uint8))
        self.pool = HostPool(BLOCK_COUNT * PAGE_BYTES)
        self.engine = make_engine(self.api, BATCHES)
        caches = make_caches(self.memory, [PAGE], 0, ChunkOrder.LAYER_MAJOR)
        self.engine.register(caches, 1, self.pool.address, self.pool.size_bytes)
        self.executor = TransferExecutor(
            manifest=Manifest.simple("m", PAGE),
            pool=self.pool,
            engine=self.engine,
            background=None,
            tiers=[],
            counters=Counters(),
            clock=MonotonicClock(),
        )
        self.blocks = self.memory._bytes.reshape(BLOCK_COUNT, PAGE)

    def compute(self, block: int, value: int) -> None:
        self.api.launch(0, lambda: self.blocks[block].fill(value))

    def slot(self, slot: int) -> np.ndarray:
        return self.pool.array[slot * PAGE_BYTES :][:PAGE]


def offload(job: int, blocks, slots) -> Offload:
    return Offload(
        job_id=JobId(job), group_idx=0, block_ids=np.array(blocks)[:, None], slots=np.array(slots)
    )


def load(job: int, blocks, slots) -> Load:
    part = LoadPart(group_idx=0, block_ids=np.array(blocks)[:, None], slots=np.array(slots))
    return Load(job_id=JobId(job), parts=(part,))


@given(st.integers(0, 1 << 30))
def test_a_block_that_changes_hands_keeps_both_owners_right(seed) -> None:
    """Its offload is fenced, a load fills it for the next owner, whose step then reads it."""
    setup = Setup(seed=seed)
    setup.slot(6)[:] = 9
    setup.compute(3, 7)
    setup.executor.submit([offload(1, [3], [5])])
    setup.executor.fence((JobId(1),))
    setup.executor.submit([load(2, [3], [6])])
    answers = setup.executor.drain(60.0)
    assert {answer.job_id: answer.ok for answer in answers} == {1: True, 2: True}
    assert (setup.slot(5) == 7).all()
    assert (setup.blocks[3] == 9).all()
    setup.executor.close()


@pytest.mark.parametrize("fault", range(5))
def test_a_refused_offload_fails_its_chunks_and_nothing_else(fault) -> None:
    setup = Setup()
    setup.blocks[:] = 4
    setup.api.fail_calls = {setup.api.fallible_count + fault}
    setup.executor.submit([offload(1, [3, 8], [5, 6])])
    setup.executor.submit([offload(2, [4, 9], [7, 8])])
    answers = {answer.job_id: answer for answer in setup.executor.drain(60.0)}
    assert answers[JobId(1)].failed == dict.fromkeys(range(2), FailureReason.IO_ERROR)
    assert not answers[JobId(1)].ok
    assert answers[JobId(2)].ok
    assert (setup.slot(7) == 4).all()
    setup.executor.close()
    assert setup.api.registered_bytes == 0


def test_a_refused_load_is_answered_as_failed() -> None:
    setup = Setup()
    mark_and_wait = 3
    setup.api.fail_calls = {setup.api.fallible_count + mark_and_wait}
    setup.executor.submit([load(1, [3, 8], [5, 6])])
    (answer,) = setup.executor.drain(60.0)
    assert not answer.ok
    setup.executor.close()


def test_a_load_from_memory_does_not_queue_behind_one_from_disks() -> None:
    setup = Setup()
    from_disks = setup.engine._streams[1]._stream
    setup.api.streams.held.add(from_disks)
    setup.executor.submit([load(1, [3], [5])])
    (answer,) = setup.executor.drain(60.0)
    assert answer.ok
    setup.api.streams.held.clear()
    setup.executor.close()


def test_a_device_without_an_engine_is_refused_by_name() -> None:
    config = load_config({"primary": {"capacity": "64KiB"}})
    caches = CanonicalKVCaches(
        tensors=(), group_refs=(), chunk_order=ChunkOrder.LAYER_MAJOR, device="xpu:0"
    )
    with pytest.raises(LayoutError, match="'xpu:0': expected cpu or cuda:<index>"):
        TransferExecutor.open(
            config,
            Manifest.simple("m", PAGE),
            rank=0,
            rank_count=1,
            caches=caches,
            counters=Counters(),
        )


class OpenedOnFake:
    """`TransferExecutor.open` on a fake GPU, whose pool is pinned by the executor's threads."""

    def __init__(self, monkeypatch, *, page: int = PAGE) -> None:
        self.page = page
        self._threads_of_others = set(threading.enumerate())
        self.api = FakeCuda()
        self.memory = FakeDeviceMemory(self.api, np.zeros(BLOCK_COUNT * page, np.uint8))
        monkeypatch.setattr(executor_module, "open_copy_engine", self._open_engine)

    def _open_engine(self, device, config, *, counters, spawn, is_io_under_way, compute_stream):
        return CudaCopyEngine(
            self.api,
            device=device,
            config=config,
            counters=counters,
            spawn=spawn,
            is_io_under_way=is_io_under_way,
            compute_stream=compute_stream,
        )

    def open(self, open_backend) -> TransferExecutor:
        tier = {"name": "disk", "backend": "file", "path": "unused", "capacity": "64MiB"}
        tier["io"] = {"threads": 1}
        return TransferExecutor.open(
            load_config({"version": 1, "primary": {"capacity": "16MiB"}, "secondary": [tier]}),
            Manifest.simple("m", self.page),
            rank=0,
            rank_count=1,
            caches=make_caches(self.memory, [self.page], 0, ChunkOrder.LAYER_MAJOR),
            counters=Counters(),
            open_backend=open_backend,
        )

    def is_idle(self) -> bool:
        self.api.free_device(self.memory.address)
        threads = set(threading.enumerate()) - self._threads_of_others
        has_threads = any(thread.name.startswith("tierstore-") for thread in threads)
        return self.api.resource_count == 0 and not has_threads


def test_an_executor_that_cannot_open_unpins_its_pool_and_gives_the_gpu_back(monkeypatch) -> None:
    def broken(*_, **__):
        raise RuntimeError("a plug-in's bug")

    fake = OpenedOnFake(monkeypatch)
    with pytest.raises(RuntimeError, match="plug-in"):
        fake.open(broken)
    assert fake.is_idle()


def test_a_gpu_that_refuses_streams_leaves_no_thread_behind(monkeypatch) -> None:
    fake = OpenedOnFake(monkeypatch)
    monkeypatch.setattr(fake.api, "create_stream", refuse)
    with pytest.raises(DeviceError):
        fake.open(open_backend)
    assert fake.is_idle()


def refuse() -> None:
    raise DeviceError("cudaStreamCreate: refused")


class SteppedBackend:
    """Fills slots with 1, 2, ...; each read but the first waits for a go of its own."""

    def __init__(self) -> None:
        self.goes = threading.Semaphore(1)
        self._reads = itertools.count(1)

    def read(self, records):
        assert self.goes.acquire(timeout=60)
        (record,) = records
        record.slot[:] = bytes([next(self._reads)]) * len(record.slot)
        return {}

    def close(self) -> None:
        pass


def test_a_chunk_is_on_the_gpu_before_the_next_is_read(monkeypatch) -> None:
    """The read of chunk i + 1 waits until a test saw chunk i in its block: they overlap."""
    page, count = 4 << 20, 4  # each a batch of its own
    fake, backend = OpenedOnFake(monkeypatch, page=page), SteppedBackend()
    executor = fake.open(lambda *_, **__: backend)
    slots = np.arange(count) * page // PAGE_BYTES
    places = np.zeros(count, PLACE_DTYPE)
    places["header_page"] = np.arange(count)
    promote = Promote(
        tier_idx=0,
        group_idx=0,
        keys=tuple(make_offload_keys(Namespace(b"n" * 8), 0, spread_hashes(range(count)))),
        places=tuple(Place(place.tobytes()) for place in places),
        slots=slots,
    )
    block_ids = np.array([7, 2, 9, 4])
    part = LoadPart(group_idx=0, block_ids=block_ids[:, None], slots=slots)
    executor.submit([Load(job_id=JobId(1), parts=(part,), promotes=(promote,))])
    blocks = fake.memory._bytes.reshape(BLOCK_COUNT, page)
    until = time.monotonic() + 60
    for number, block in enumerate(block_ids.tolist(), start=1):
        while not (blocks[block] == number).all():
            answered = executor.poll()
            assert answered == [] or number == count
            assert time.monotonic() < until
        backend.goes.release()
    executor.close()
    assert fake.is_idle()
