"""torch and CuPy in one process: torch's tensors are the KV caches, its streams do the work."""

import threading
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_device import (
    ALL,
    CYCLES,
    METHODS,
    NEEDS_GPU,
    make_api,
    offload_what_is_overwritten,
    registered,
    wait,
)

from tierstore.dma.gpu.pinning import PoolPinner
from tierstore.dma.protocol import CopyId
from tierstore.host_pool import HostPool
from tierstore.layout import PAGE_BYTES
from tierstore.metrics import Counters
from tierstore.testing.copy_conformance import BLOCK_COUNT

torch = pytest.importorskip("torch")
pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs torch with CUDA"),
]


def engine_beside(config, tensor, pool):
    """An engine beside torch's current stream; a page is a block's share of the tensor."""
    return registered(
        config,
        SimpleNamespace(address=tensor.data_ptr(), device="cuda:0"),
        pool,
        page=tensor.numel() // BLOCK_COUNT,
        compute_stream=lambda: int(torch.cuda.current_stream().cuda_stream),
    )


@METHODS
@pytest.mark.parametrize("page", [PAGE_BYTES, 256 << 10])
@pytest.mark.parametrize("make_stream", [torch.cuda.default_stream, torch.cuda.Stream])
def test_copies_keep_their_place_in_the_work_of_torchs_stream(config, page, make_stream) -> None:
    tensor = torch.zeros(BLOCK_COUNT * page, dtype=torch.uint8, device="cuda:0")
    tensor.fill_(1)  # loads torch's kernel before anything is timed
    torch.cuda.synchronize()
    slots = ALL * page // PAGE_BYTES
    with torch.cuda.stream(make_stream()), HostPool(tensor.numel()) as pool:
        engine = engine_beside(config, tensor, pool)
        torch.cuda._sleep(CYCLES)
        tensor.fill_(7)
        offload_what_is_overwritten(engine, slots, lambda: tensor.fill_(8))
        assert (pool.array == 7).all()
        pool.array[:] = 9
        torch.cuda._sleep(CYCLES)
        tensor.fill_(8)
        engine.submit_load(CopyId(2), 0, ALL[:, None], slots, after=engine.mark_compute())
        assert engine.poll() == []
        wait(engine, 2)
        # Also: "not ready", asked for many times, is no error that torch would raise.
        assert bool((tensor == 9).all())
        engine.close()


@METHODS
def test_one_run_reaches_across_the_segments_of_an_expandable_allocation(config) -> None:
    page = 4 << 20  # 64 MiB in all; torch maps 20 MiB at a time
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        tensor = torch.zeros(BLOCK_COUNT * page, dtype=torch.uint8, device="cuda:0")
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    slots = ALL * page // PAGE_BYTES
    with HostPool(tensor.numel()) as pool:
        pool.array.view(np.int64)[:] = np.arange(tensor.numel() // 8)
        engine = engine_beside(config, tensor, pool)
        engine.submit_load(CopyId(1), 0, ALL[:, None], slots)
        wait(engine, 1)
        assert np.array_equal(tensor.cpu().numpy(), pool.array)
        tensor.add_(1)
        engine.submit_offload(CopyId(2), 0, ALL[:, None], slots)
        wait(engine, 2)
        assert np.array_equal(tensor.cpu().numpy(), pool.array)
        engine.close()


def test_pinning_does_not_spoil_a_graph_that_torch_captures() -> None:
    api = make_api()
    tasks: deque = deque()
    values = torch.zeros(1024, device="cuda:0")
    values += 1  # loads torch's kernel
    torch.cuda.synchronize()
    with HostPool(8 << 20) as pool:
        pinner = PoolPinner(api, pool.address, pool.size_bytes, Counters(), piece_bytes=1 << 20)
        pinner.open(tasks.append)
        background = threading.Thread(target=tasks.popleft(), daemon=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            values += 1
            background.start()
            background.join(5)
        graph.replay()
        torch.cuda.synchronize()
        assert float(values[0]) == 2
        background.join(60)
        while tasks:
            tasks.popleft()()
        assert pinner.pinned(np.array([pool.address])) is None
        pinner.close()
