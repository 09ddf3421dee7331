"""The executor when it is closed over a hung read, or when a copy raises an unforeseen error.

And what it tells background work of reads that are under way.
"""

import threading
from collections.abc import Callable

import numpy as np

from tierstore.codec.record import PLACE_BYTES
from tierstore.config import load_config
from tierstore.executor import TransferExecutor
from tierstore.executor import executor as executor_module
from tierstore.key import Namespace, make_offload_keys
from tierstore.layout import ChunkOrder
from tierstore.manifest import Manifest
from tierstore.metrics import Counters
from tierstore.testing.copy_conformance import BLOCK_COUNT, HostMemory, make_caches
from tierstore.transfer import FailureReason, JobId, Load, LoadPart, Place, Promote

PAGE = 512
BLOCK, SLOT = 3, 5


class StubBackend:
    """Fills every slot with sevens, after `wait` has returned."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self._wait = wait

    def read(self, records):
        self._wait()
        for record in records:
            record.slot[:] = b"\7" * len(record.slot)
        return {}

    def close(self) -> None:
        pass


def open_executor(tmp_path, memory: HostMemory, wait: Callable[[], object]) -> TransferExecutor:
    tier = {"name": "disk", "backend": "file", "path": str(tmp_path), "capacity": "64MiB"}
    return TransferExecutor.open(
        load_config({"version": 1, "primary": {"capacity": "1MiB"}, "secondary": [tier]}),
        Manifest.simple("m", PAGE),
        rank=0,
        rank_count=1,
        caches=make_caches(memory, [PAGE], 0, ChunkOrder.LAYER_MAJOR),
        counters=Counters(),
        open_backend=lambda *_, **__: StubBackend(wait),
    )


def load() -> Load:
    slots = np.array([SLOT])
    promote = Promote(
        tier_idx=0,
        group_idx=0,
        keys=tuple(make_offload_keys(Namespace(b"n" * 8), 0, [b"h" * 32])),
        places=(Place(bytes(PLACE_BYTES)),),
        slots=slots,
    )
    part = LoadPart(group_idx=0, block_ids=np.array([[BLOCK]]), slots=slots)
    return Load(job_id=JobId(1), parts=(part,), promotes=(promote,))


def test_a_read_that_hung_at_close_never_reaches_the_engines_blocks(tmp_path):
    data = np.zeros(BLOCK_COUNT * PAGE, np.uint8)
    memory = HostMemory(data)
    reading, may_end = threading.Event(), threading.Event()

    def hang() -> None:
        reading.set()
        may_end.wait()

    executor = open_executor(tmp_path, memory, hang)
    executor.submit([load()])
    assert reading.wait(60)
    executor.close(0.01)
    may_end.set()
    (tier,) = executor._tiers
    assert tier.pool.close(60), "the thread did not end"
    assert not memory.read().any()


def test_a_copy_that_raises_in_an_io_thread_fails_its_load(tmp_path, monkeypatch):
    memory = HostMemory(np.zeros(BLOCK_COUNT * PAGE, np.uint8))
    executor = open_executor(tmp_path, memory, lambda: None)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(executor._engine, "submit_load", fail)
    executor.submit([load()])
    (answer,) = executor.drain(60)
    assert not answer.ok
    assert FailureReason.DEADLINE not in answer.failed.values()
    executor.close()


def test_a_load_from_disk_reaches_its_block(tmp_path):
    memory = HostMemory(np.zeros(BLOCK_COUNT * PAGE, np.uint8))
    executor = open_executor(tmp_path, memory, lambda: None)
    executor.submit([load()])
    (answer,) = executor.drain(60)
    assert answer.ok
    block = memory.read()[BLOCK * PAGE :][:PAGE]
    assert (block == 7).all()
    executor.close()


def test_background_work_is_told_of_reads_until_they_end(tmp_path, monkeypatch):
    told = []
    open_copy_engine = executor_module.open_copy_engine

    def open_told(*args, is_io_under_way, **kwargs):
        told.append(is_io_under_way)
        return open_copy_engine(*args, is_io_under_way=is_io_under_way, **kwargs)

    monkeypatch.setattr(executor_module, "open_copy_engine", open_told)
    may_end = threading.Event()
    memory = HostMemory(np.zeros(BLOCK_COUNT * PAGE, np.uint8))
    executor = open_executor(tmp_path, memory, lambda: may_end.wait(60))
    (is_io_under_way,) = told
    assert not is_io_under_way()
    executor.submit([load()])
    assert is_io_under_way()
    may_end.set()
    (answer,) = executor.drain(60)
    assert answer.ok
    assert not is_io_under_way()
    executor.close()
    assert not is_io_under_way()
