"""Queues of the CUDA engine's streams over the fake: room, hurry, and calls that CUDA refuses."""

import numpy as np
import pytest
from cuda_engines import BATCHES, KERNELS, RECTANGLES
from cuda_setup import LAYERS, Setup

from tierstore.dma.gpu.copy_stream import ENTRIES_MAX
from tierstore.dma.gpu.methods import TABLE_ROWS
from tierstore.dma.protocol import CopyId
from tierstore.errors import DeviceError
from tierstore.testing.copy_conformance import BLOCK_COUNT


def test_a_full_queue_holds_copies_back_and_poll_submits_them() -> None:
    """Plain copies of one run per layer: a fraction of them fits."""
    setup = Setup(has_batch=False, has_kernel=False, steps_per_query=1)
    offloads = setup.engine._streams[0]._stream
    setup.api.streams.held.add(offloads)
    count = ENTRIES_MAX
    for copy_id in range(count):
        setup.slot(copy_id % BLOCK_COUNT)[:] = 0
        setup.offload(copy_id, [copy_id % BLOCK_COUNT], [copy_id % BLOCK_COUNT])
    assert setup.api.streams.depth_max <= ENTRIES_MAX
    setup.engine.poll()
    assert setup.api.streams.depth_max <= ENTRIES_MAX
    setup.api.streams.held.clear()
    assert setup.wait(*range(count)) == list(range(count))
    assert setup.api.streams.depth_max <= ENTRIES_MAX
    setup.engine.close()


def test_batches_fill_a_stream_by_their_runs() -> None:
    setup = Setup(slot_count=TABLE_ROWS)
    offloads = setup.engine._streams[0]._stream
    setup.api.streams.held.add(offloads)
    blocks = np.arange(TABLE_ROWS) % BLOCK_COUNT
    for copy_id in range(2):  # each five batches, for every chunk has five layers
        setup.offload(copy_id, blocks, np.arange(TABLE_ROWS))
    assert setup.api.calls.count("copy_batch") == 6
    setup.api.streams.held.clear()
    assert setup.wait(0, 1) == [0, 1]
    assert setup.api.calls.count("copy_batch") == 10
    setup.engine.close()


def test_a_queue_that_has_emptied_takes_as_many_copies_again() -> None:
    setup = Setup(has_batch=False, has_kernel=False)
    offloads = setup.engine._streams[0]._stream
    fitting = ENTRIES_MAX // LAYERS
    for _ in range(3):
        setup.api.calls.clear()
        setup.api.streams.held.add(offloads)
        for copy_id in range(fitting):
            setup.offload(copy_id, [copy_id % BLOCK_COUNT], [copy_id % BLOCK_COUNT])
        assert setup.api.calls.count("copy_each") == fitting
        setup.api.streams.held.clear()
        setup.wait(*range(fitting))
    setup.engine.close()


def test_a_fence_hurries_what_is_held_back() -> None:
    setup = Setup(has_batch=False, has_kernel=False)
    offloads = setup.engine._streams[0]._stream
    setup.api.streams.held.add(offloads)
    count = ENTRIES_MAX // LAYERS + 10
    for copy_id in range(count):
        setup.compute(copy_id % BLOCK_COUNT, copy_id % 251)
        setup.offload(copy_id, [copy_id % BLOCK_COUNT], [copy_id % BLOCK_COUNT])
        setup.api.run_all()
    last = count - 1
    setup.engine.fence((CopyId(last),))
    setup.compute(last % BLOCK_COUNT, 252)
    setup.api.streams.held.clear()
    setup.wait(*range(count))
    assert (setup.slot(last % BLOCK_COUNT) == last % 251).all()
    setup.api.run_all()
    assert (setup.block(last % BLOCK_COUNT) == 252).all()
    setup.engine.close()


@pytest.mark.parametrize(("has_batch", "call"), [(True, "copy_batch"), (False, "copy_each")])
def test_kernels_wait_for_a_free_table_and_a_fence_does_without(has_batch, call) -> None:
    setup = Setup(KERNELS, has_batch=has_batch)
    offloads = setup.engine._streams[0]._stream
    setup.api.streams.held.add(offloads)
    for copy_id in range(20):
        setup.fill(copy_id % BLOCK_COUNT, copy_id + 1)
        setup.offload(copy_id, [copy_id % BLOCK_COUNT], [copy_id % BLOCK_COUNT])
    assert setup.api.calls.count("copy_by_kernel") == 8
    setup.engine.fence((CopyId(19),))
    assert setup.api.calls.count("copy_by_kernel") == 8
    assert [name for name in setup.api.calls if name.startswith("copy_")][8:] == [call] * 12
    setup.api.streams.held.clear()
    setup.wait(*range(20))
    assert (setup.slot(3) == 20).all()
    setup.engine.close()


def test_a_refused_copy_is_reported_as_failed_and_the_others_arrive() -> None:
    for config in (BATCHES, KERNELS, RECTANGLES):
        setup = Setup(config)
        setup.fill(2, 5)
        setup.offload(0, [0], [0])
        setup.wait(0)  # now there are events to use again
        refused = setup.api.fallible_count + 3  # after recording the mark and waiting for it
        setup.api.fail_calls = {refused - 1}
        setup.offload(1, [1], [1])
        setup.offload(2, [2], [2])
        assert setup.wait(2) == [2]
        assert setup.engine.take_failed() == [1]
        assert setup.engine.take_failed() == []
        assert (setup.slot(2) == 5).all()
        setup.engine.close()


@pytest.mark.parametrize("config", [BATCHES, KERNELS, RECTANGLES])
def test_no_fault_of_any_call_loses_a_copy_or_a_byte(config) -> None:
    """Fail the n-th call for n = 0, 1, ... until a run completes without a fault."""
    fault = 0
    while True:
        setup = Setup(config, has_batch=config is not RECTANGLES)
        first = setup.api.fallible_count
        setup.api.fail_calls = {first + fault}
        outcome = _offload_and_load(setup)
        setup.engine.close()
        setup.api.free_device(setup.memory.address)
        assert setup.api.resource_count == 0
        if setup.api.fallible_count <= first + fault:
            assert outcome == {1: True, 2: True}
            return
        fault += 1


def _offload_and_load(setup: Setup) -> dict[int, bool]:
    """Copy block 3 to slot 5 and on to block 4; check what is claimed to have arrived."""
    outcome: dict[int, bool] = {}
    setup.fill(3, 8)
    setup.fill(4, 1)
    for copy_id, submit in ((1, setup.offload), (2, setup.load)):
        try:
            submit(copy_id, [2 + copy_id], [5])
        except DeviceError:
            outcome[copy_id] = False
        while copy_id not in outcome:
            outcome.update(dict.fromkeys(setup.engine.poll(), True))
            outcome.update(dict.fromkeys(setup.engine.take_failed(), False))
        setup.api.run_all()
        if outcome[1]:
            assert (setup.slot(5) == 8).all()
        if outcome == {1: True, 2: True}:
            assert (setup.block(4) == 8).all()
    return outcome


def test_a_copy_whose_end_cannot_be_told_is_reported_when_nothing_is_under_way() -> None:
    setup = Setup(steps_per_query=0)
    setup.offload(0, [0], [0])
    setup.api.run_all()
    assert setup.engine.poll() == [0]  # now there are events to use again
    # Mark, wait, copy, and then the event behind it.
    setup.api.fail_calls = {setup.api.fallible_count + 3}
    setup.offload(1, [1], [1])
    assert setup.engine.poll() == []
    assert setup.engine.take_failed() == [1]
    setup.slot(1)[:] = 77
    setup.api.run_all()
    assert (setup.slot(1) == 77).all()
    setup.engine.close()


def test_a_copy_that_failed_halfway_is_reported_after_its_accepted_half() -> None:
    """Or its owner would take memory back that is still being written."""
    setup = Setup(has_batch=False, has_kernel=False, slot_count=400, steps_per_query=0)
    blocks = np.arange(300) % BLOCK_COUNT
    setup.engine.submit_offload(CopyId(0), 0, blocks[:1, None], np.arange(1))
    setup.api.run_all()
    setup.engine.poll()
    # Mark, wait, the first slice of 250 runs, its event; then the second slice.
    setup.api.fail_calls = {setup.api.fallible_count + 4}
    setup.engine.submit_offload(CopyId(1), 0, blocks[:, None], np.arange(300))
    assert setup.api.calls.count("copy_each") >= 2
    setup.engine.poll()
    assert setup.engine.take_failed() == []
    setup.api.run_all()
    assert setup.engine.poll() == []
    assert setup.engine.take_failed() == [1]
    setup.engine.close()


def test_a_submission_uses_the_room_of_copies_that_ended_since_the_last_poll() -> None:
    """I/O threads submit batch after batch while the engine's step, and so the poll, takes long."""
    setup = Setup(KERNELS)
    count = 3 * BLOCK_COUNT
    for copy_id in range(count):
        setup.load(copy_id, [copy_id % BLOCK_COUNT], [copy_id % BLOCK_COUNT])
        setup.api.run_all()
    assert setup.api.calls.count("copy_by_kernel") == count
    assert setup.engine.poll() == list(range(count))
    setup.engine.close()


def test_a_fence_uses_the_tables_of_kernels_that_ended_since_the_last_poll() -> None:
    setup = Setup(KERNELS)
    offloads = setup.engine._streams[0]._stream
    setup.api.streams.held.add(offloads)
    for copy_id in range(10):
        setup.offload(copy_id, [copy_id], [copy_id])
    setup.api.streams.held.clear()
    setup.api.run_all()
    setup.engine.fence((CopyId(9),))
    assert setup.api.calls.count("copy_by_kernel") == 10
    setup.wait(*range(10))
    setup.engine.close()
