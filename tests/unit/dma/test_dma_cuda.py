"""The CUDA copy engine over the fake: what waits for what, borders, and what is left."""

import threading

import numpy as np
import pytest
from cuda_engines import BATCHES, KERNELS, RECTANGLES, make_engine
from cuda_setup import COMPUTE, PAGE, Setup
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.dma.gpu.pinning import PIECE_BYTES
from tierstore.dma.protocol import CopyId
from tierstore.errors import DeviceError, LayoutError
from tierstore.host_pool import HostPool
from tierstore.layout import PAGE_BYTES, ChunkOrder
from tierstore.testing.copy_conformance import BLOCK_COUNT, make_caches
from tierstore.testing.fake_cuda import FakeCuda, FakeDeviceMemory

seeds = st.integers(0, 1 << 30)


@pytest.mark.parametrize(
    ("config", "call"),
    [(BATCHES, "copy_batch"), (KERNELS, "copy_by_kernel"), (RECTANGLES, "copy_pitched")],
)
def test_the_configuration_forces_a_method(config, call) -> None:
    setup = Setup(config)
    setup.fill(3, 7)
    setup.offload(1, [3], [5])
    setup.wait(1)
    assert (setup.slot(5) == 7).all()
    assert [name for name in setup.api.calls if name.startswith("copy_")] == [call]
    setup.engine.close()


@given(seeds, st.sampled_from([BATCHES, KERNELS, RECTANGLES]))
def test_an_offload_reads_what_the_launched_steps_wrote(seed, config) -> None:
    setup = Setup(config, seed=seed)
    setup.compute(3, 7)
    setup.offload(1, [3], [5])
    setup.wait(1)
    assert (setup.slot(5) == 7).all()
    setup.engine.close()


@given(seeds, st.sampled_from([BATCHES, KERNELS, RECTANGLES]))
def test_a_fence_keeps_the_next_step_from_writing_too_early(seed, config) -> None:
    setup = Setup(config, seed=seed)
    setup.compute(3, 7)
    setup.offload(1, [3], [5])
    setup.engine.fence((CopyId(1),))
    setup.compute(3, 8)
    setup.wait(1)
    assert (setup.slot(5) == 7).all()
    setup.engine.close()


def test_without_a_fence_the_next_step_would_write_too_early() -> None:
    """The fake can tell: some order of events spoils the offload."""
    spoilt = 0
    for seed in range(50):
        setup = Setup(seed=seed)
        setup.compute(3, 7)
        setup.offload(1, [3], [5])
        setup.compute(3, 8)
        setup.wait(1)
        spoilt += bool((setup.slot(5) != 7).any())
        setup.engine.close()
    assert spoilt > 0


def test_a_fence_of_finished_or_unknown_copies_holds_nothing_up() -> None:
    setup = Setup()
    setup.offload(1, [3], [5])
    setup.wait(1)
    setup.api.calls.clear()
    setup.engine.fence((CopyId(1), CopyId(99)))
    setup.engine.fence(())
    assert setup.api.calls == []
    setup.engine.close()


@given(seeds, st.booleans())
def test_a_load_writes_after_the_step_that_still_uses_its_blocks(seed, urgent) -> None:
    setup = Setup(seed=seed)
    setup.slot(5)[:] = 9
    setup.compute(3, 7)
    mark = setup.engine.mark_compute()
    setup.load(1, [3], [5], after=mark, urgent=urgent)
    setup.wait(1)
    setup.api.run_all()
    assert (setup.block(3) == 9).all()
    setup.engine.close()


@given(seeds)
def test_a_load_writes_after_an_offload_that_was_fenced_before_its_mark(seed) -> None:
    setup = Setup(seed=seed)
    setup.slot(5)[:] = 9
    setup.compute(3, 7)
    setup.offload(1, [3], [6])
    setup.engine.fence((CopyId(1),))
    setup.load(2, [3], [5], after=setup.engine.mark_compute())
    setup.wait(1, 2)
    assert (setup.slot(6) == 7).all()
    assert (setup.block(3) == 9).all()
    setup.engine.close()


def test_a_load_does_not_wait_for_steps_launched_after_its_mark() -> None:
    setup = Setup()
    mark = setup.engine.mark_compute()
    setup.api.run_all()
    setup.api.streams.held.add(COMPUTE)
    setup.compute(2, 1)
    setup.load(1, [3], [5], after=mark)
    assert setup.wait(1) == [1]
    setup.api.streams.held.clear()
    setup.engine.close()


def test_a_passed_mark_costs_no_wait_and_its_event_is_used_again() -> None:
    setup = Setup()
    for copy_id in range(1, 20):
        mark = setup.engine.mark_compute()
        setup.api.run_all()
        setup.engine.poll()
        setup.api.calls.clear()
        setup.load(copy_id, [3], [5], after=mark)
        assert "wait_event" not in setup.api.calls
        setup.wait(copy_id)
    assert setup.api.streams.event_count <= 3
    setup.engine.close()


def test_copies_keep_their_place_in_the_work_of_the_engines_own_stream() -> None:
    streams = []
    setup = Setup(compute_stream=lambda: streams[-1])
    streams.append(setup.api.create_stream())
    setup.api.streams.held.add(streams[-1])
    setup.api.launch(streams[-1], lambda: setup.fill(3, 7))
    setup.offload(1, [3], [5])
    setup.engine.fence((CopyId(1),))
    setup.api.launch(streams[-1], lambda: setup.fill(3, 8))
    setup.slot(6)[:] = 9
    setup.load(2, [4], [6], after=setup.engine.mark_compute())
    setup.api.run_all()
    assert setup.engine.poll() == []
    setup.api.streams.held.clear()
    setup.wait(1, 2)
    setup.api.run_all()
    assert (setup.slot(5) == 7).all()
    assert (setup.block(3) == 8).all()
    assert (setup.block(4) == 9).all()
    setup.engine.close()


@pytest.mark.parametrize("urgent", [False, True])
def test_slots_may_be_read_before_a_load_has_its_turn_and_blocks_may_not(urgent) -> None:
    early = []

    class Watched(FakeCuda):
        def copy_batch(self, runs, stream, *, early_reads) -> None:
            early.append(early_reads)
            super().copy_batch(runs, stream, early_reads=early_reads)

    setup = Setup(api=Watched())
    early.clear()  # of the trial when the caches were registered
    setup.offload(1, [3], [5])
    setup.load(2, [4], [6], urgent=urgent)
    assert early == [False, True]
    setup.engine.close()


def test_an_urgent_load_does_not_queue_behind_others() -> None:
    setup = Setup()
    slow = setup.engine._streams[1]._stream
    setup.api.streams.held.add(slow)
    setup.load(1, [3], [5])
    setup.load(2, [4], [6], urgent=True)
    assert setup.wait(2) == [2]
    setup.api.streams.held.clear()
    assert setup.wait(1) == [1]
    setup.engine.close()


def test_a_copy_is_named_only_when_its_last_byte_has_arrived() -> None:
    setup = Setup(steps_per_query=0)
    setup.slot(5)[:] = 9
    setup.load(1, [3], [5])
    while not setup.engine.poll():
        assert setup.api.step()
    assert (setup.block(3) == 9).all()
    setup.engine.close()


def test_a_copy_of_no_block_arrives_too() -> None:
    setup = Setup()
    setup.load(1, [-1], [5])
    assert setup.wait(1) == [1]
    setup.engine.close()


@settings(max_examples=30)
@given(seeds)
def test_loads_may_be_submitted_from_many_threads(seed) -> None:
    setup = Setup(seed=seed)
    for slot in range(BLOCK_COUNT):
        setup.slot(slot)[:] = slot + 1
    mark = setup.engine.mark_compute()

    def submit(first: int) -> None:
        for slot in range(first, BLOCK_COUNT, 4):
            setup.load(slot, [slot], [slot], after=mark)

    threads = [threading.Thread(target=submit, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    arrived = setup.engine.poll()
    for thread in threads:
        thread.join()
    arrived += setup.wait(*set(range(BLOCK_COUNT)) - set(arrived))
    assert sorted(arrived) == list(range(BLOCK_COUNT))
    assert [int(setup.block(slot)[0, 0]) for slot in range(BLOCK_COUNT)] == [
        slot + 1 for slot in range(BLOCK_COUNT)
    ]
    setup.engine.close()


@pytest.mark.parametrize("config", [BATCHES, KERNELS, RECTANGLES])
def test_nothing_on_the_engines_step_waits_for_the_device(config) -> None:
    setup = Setup(config)
    setup.api.streams.held.update(setup.api.streams.handles)  # whoever waits now waits for ever
    setup.compute(3, 7)
    for copy_id in range(1, 100, 2):
        setup.offload(copy_id, [3], [5])
        setup.engine.fence((CopyId(copy_id),))
        mark = setup.engine.mark_compute()
        setup.load(copy_id + 1, [3], [5], after=mark, urgent=copy_id % 3 == 0)
        assert setup.engine.poll() == []
    assert "synchronize" not in setup.api.calls
    setup.api.streams.held.clear()
    setup.engine.close()


def test_close_waits_for_what_was_submitted_and_gives_everything_back() -> None:
    setup = Setup(KERNELS, steps_per_query=0)
    setup.fill(3, 4)
    for copy_id in range(30):
        setup.offload(copy_id, [3], [copy_id % BLOCK_COUNT])
    setup.engine.mark_compute()
    setup.engine.close()
    setup.engine.close()
    assert (setup.slot(13) == 4).all()
    setup.api.free_device(setup.memory.address)
    assert setup.api.resource_count == 0
    assert setup.engine.poll() == []


def test_a_closed_engine_refuses_copies() -> None:
    setup = Setup()
    setup.engine.close()
    with pytest.raises(LayoutError):
        setup.load(1, [3], [5])


@pytest.mark.parametrize("config", [BATCHES, KERNELS, RECTANGLES])
def test_no_copy_reaches_across_two_allocations_of_the_device(config) -> None:
    """Layer 0 and 1 are adjacent but allocated apart; their last and first block make one run."""
    api = FakeCuda()
    memory = FakeDeviceMemory(api, np.full(2 * BLOCK_COUNT * PAGE, 3, np.uint8))
    both = api._device.ranges.pop(memory.address)
    for half in np.split(both, 2):
        api._device.ranges[int(half.ctypes.data)] = half
    pool = HostPool(PAGE_BYTES)
    engine = make_engine(api, config)
    caches = make_caches(memory, [PAGE, PAGE], 0, ChunkOrder.LAYER_MAJOR)
    engine.register(caches, 2, pool.address, pool.size_bytes)
    engine.submit_offload(CopyId(1), 0, np.array([[0, BLOCK_COUNT - 1]]), np.array([0]))
    while not engine.poll():
        assert engine.take_failed() == []
    assert (pool.array[: 4 * PAGE] == 3).all()
    engine.close()


@pytest.mark.parametrize("config", [BATCHES, KERNELS, RECTANGLES])
def test_no_copy_reaches_across_two_registrations_of_the_pool(config) -> None:
    api = FakeCuda()
    memory = FakeDeviceMemory(api, np.full(BLOCK_COUNT * PAGE_BYTES, 3, np.uint8))
    pool = HostPool(PIECE_BYTES + BLOCK_COUNT * PAGE_BYTES)
    engine = make_engine(api, config)
    caches = make_caches(memory, [PAGE_BYTES], 0, ChunkOrder.LAYER_MAJOR)
    engine.register(caches, 1, pool.address, pool.size_bytes)
    blocks = np.arange(4)
    slots = PIECE_BYTES // PAGE_BYTES - 2 + blocks  # two on either side
    engine.submit_offload(CopyId(1), 0, blocks[:, None], slots)
    while not engine.poll():
        assert engine.take_failed() == []
    start = PIECE_BYTES - 2 * PAGE_BYTES
    assert (pool.array[start : start + 4 * PAGE_BYTES] == 3).all()
    engine.close()


def test_caches_of_another_device_are_refused() -> None:
    api = FakeCuda()
    memory = FakeDeviceMemory(api, np.zeros(BLOCK_COUNT * PAGE, np.uint8))
    memory.device = "cuda:1"
    caches = make_caches(memory, [PAGE], 0, ChunkOrder.LAYER_MAJOR)
    with pytest.raises(LayoutError, match="expected device cuda:0, got cuda:1"):
        make_engine(api).register(caches, 1, 0, 0)


def test_no_fault_while_registering_leaves_anything_behind() -> None:
    fault = 0
    while True:
        api = FakeCuda(steps_per_query=10)
        memory = FakeDeviceMemory(api, np.zeros(BLOCK_COUNT * PAGE, np.uint8))
        caches = make_caches(memory, [PAGE], 0, ChunkOrder.LAYER_MAJOR)
        pool = HostPool(PAGE_BYTES)
        engine = make_engine(api, KERNELS)
        first = api.fallible_count
        api.fail_calls = {first + fault}
        try:
            engine.register(caches, 1, pool.address, pool.size_bytes)
        except DeviceError:
            assert fault < api.fallible_count - first
        engine.close()
        api.free_device(memory.address)
        assert api.resource_count == 0
        if api.fallible_count <= first + fault:
            return
        fault += 1


def test_a_device_without_memory_to_measure_with_still_copies() -> None:
    from tierstore.config import GpuConfig

    class Poor(FakeCuda):
        def alloc_device(self, size_bytes: int) -> int:
            if size_bytes > 1 << 20:
                raise DeviceError("cudaMalloc: out of memory")
            return super().alloc_device(size_bytes)

    api = Poor()
    memory = FakeDeviceMemory(api, np.full(BLOCK_COUNT * PAGE, 3, np.uint8))
    pool = HostPool(PAGE_BYTES)
    engine = make_engine(api, GpuConfig())
    engine.register(
        make_caches(memory, [PAGE], 0, ChunkOrder.LAYER_MAJOR), 1, pool.address, pool.size_bytes
    )
    engine.submit_offload(CopyId(1), 0, np.array([[2]]), np.array([0]))
    while not engine.poll():
        pass
    assert (pool.array[:PAGE] == 3).all()
    engine.close()
    api.free_device(memory.address)
    assert api.resource_count == 0
