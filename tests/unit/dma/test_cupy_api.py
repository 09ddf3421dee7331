"""`CupyApi` over a stand-in for CuPy and the driver: which call gets which argument in which place.

The stand-in copies host memory at once; on top of it the CUDA engine passes the conformance suite.
"""

# ruff: noqa: N802, N815, PLR0917 - names and signatures are those of CUDA and CuPy

import ctypes
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_engines import BATCHES, KERNELS, RECTANGLES, make_engine

from tierstore.dma.gpu import cupy_api
from tierstore.dma.gpu.cuda_api import DirectedRuns, Rectangles
from tierstore.dma.gpu.cupy_api import CupyApi
from tierstore.dma.gpu.kernel_source import KERNEL_SOURCE
from tierstore.errors import DeviceBusyError, DeviceError, MissingExtraError
from tierstore.testing.copy_conformance import CopyConformance, HostMemory


class StandInError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"error {status}")
        self.status = status


class Runtime:
    CUDARuntimeError = StandInError

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.kernel_grids: list[tuple[int, ...]] = []
        self.register_status = 0
        self.query_status = 0
        self.same_pointer = 1
        self.batch_attributes: list[tuple[int, int]] = []
        self._kept: dict[int, object] = {}

    def setDevice(self, device):
        assert device == 0

    def deviceGetAttribute(self, attribute, device):
        assert (attribute, device) == (91, 0)
        return self.same_pointer

    def deviceGetPCIBusId(self, device):
        return "0000:FF:1F.7"

    def memcpyAsync(self, target, source, size, kind, stream):
        assert kind == 4
        assert stream
        self.calls.append("memcpyAsync")
        ctypes.memmove(target, source, size)

    def memcpy2DAsync(
        self, target, target_pitch, source, source_pitch, width, height, kind, stream
    ):
        assert kind == 4
        assert stream
        assert min(target_pitch, source_pitch) >= width
        self.calls.append("memcpy2DAsync")
        for row in range(height):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)

    def hostAlloc(self, size, flags):
        assert flags == 3
        return self.malloc(size)

    def malloc(self, size):
        buffer = np.zeros(size, np.uint8)
        self._kept[buffer.ctypes.data] = buffer
        return buffer.ctypes.data

    def free(self, address):
        del self._kept[address]

    freeHost = free

    def hostRegister(self, address, size, flags):
        assert flags == 3
        if self.register_status:
            raise StandInError(self.register_status)

    def hostUnregister(self, address):
        pass

    def eventCreateWithFlags(self, flags):
        assert flags == 2
        return 7

    def eventRecord(self, event, stream):
        pass

    eventDestroy = streamWaitEvent = streamSynchronize = lambda *arguments: None


class Stream:
    handles = 100

    def __init__(self, *, non_blocking):
        assert non_blocking
        Stream.handles += 1
        self.ptr = Stream.handles


class Driver:
    """`libcuda.so.1` with the signatures of its header."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def cuEventQuery(self, event):
        assert event.value == 7
        return self._runtime.query_status

    def cuThreadExchangeStreamCaptureMode(self, mode):
        return 0

    def cuMemGetAddressRange_v2(self, base, size, address):
        return 500

    def cuMemcpyBatchAsync(
        self, targets, sources, sizes, count, attributes, indices, attribute_count, failed, stream
    ):
        self._runtime.calls.append("cuMemcpyBatchAsync")
        assert attribute_count.value == 1
        assert stream.value > 0
        attributes, indices = attributes._obj, indices._obj
        assert indices.value == 0
        order_and_flags = (attributes.source_access_order, attributes.flags)
        self._runtime.batch_attributes.append(order_and_flags)
        arrays = (
            ctypes.cast(a, ctypes.POINTER(ctypes.c_uint64)) for a in (targets, sources, sizes)
        )
        to, start, length = arrays
        for i in range(count.value):
            ctypes.memmove(to[i], start[i], length[i])
        return 0


def stand_in(monkeypatch) -> Runtime:
    runtime = Runtime()

    class Function:
        def __call__(self, grid, block, arguments, *, stream):
            assert stream.ptr > 100
            runtime.calls.append("kernel")
            runtime.kernel_grids.append(grid)
            assert block == (1024,)
            address, count, parts = (int(a) for a in arguments)
            assert 1 <= parts <= 16
            rows = (ctypes.c_int64 * (3 * count)).from_address(address)
            for i in range(count):
                ctypes.memmove(*rows[3 * i : 3 * i + 3])

    class Module:
        def load(self, binary):
            assert binary == b"cubin"

        def get_function(self, name):
            assert f" {name}(" in KERNEL_SOURCE
            return Function()

    def compile_using_nvrtc(source, *, cache_in_memory):
        assert source == KERNEL_SOURCE
        assert cache_in_memory  # else it leaves files
        return b"cubin", None

    cuda = SimpleNamespace(
        runtime=runtime,
        driver=SimpleNamespace(CUDADriverError=StandInError),
        compiler=SimpleNamespace(
            CompileException=StandInError, compile_using_nvrtc=compile_using_nvrtc
        ),
        Module=Module,
        Stream=Stream,
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(cupy_api, "_load_driver", lambda _: Driver(runtime))
    return runtime


CALLS_OF_TRIAL = 4
"""There and back in a batch and by the kernel, when an engine registers."""


class OverStandIn(CopyConformance):
    config = BATCHES
    call = "cuMemcpyBatchAsync"

    @pytest.fixture(autouse=True)
    def _stand_in(self, monkeypatch):
        runtime = stand_in(monkeypatch)
        type(self).runtime = runtime

    def make_memory(self, data):
        memory = HostMemory(data)
        memory.device = "cuda:0"
        return memory

    def make_engine(self):
        return make_engine(CupyApi(0, kernel_sms=4), self.config)

    def test_the_expected_call_is_made(self) -> None:
        self.test_groups_that_share_memory_keep_their_bytes_apart()
        assert self.call in self.runtime.calls[CALLS_OF_TRIAL:]


class TestBatches(OverStandIn):
    pass


class TestRectangles(OverStandIn):
    config = RECTANGLES
    call = "memcpyAsync"


class TestKernels(OverStandIn):
    config = KERNELS
    call = "kernel"


def test_a_rectangle_reaches_every_row_and_nothing_between(monkeypatch) -> None:
    runtime = stand_in(monkeypatch)
    source = np.arange(100, dtype=np.uint8)
    target = np.zeros(60, np.uint8)
    numbers = (target.ctypes.data, source.ctypes.data, 4, 5, 10, 20)
    rectangles = Rectangles(*(np.array([number]) for number in numbers))
    api = CupyApi(0, kernel_sms=4)
    api.copy_pitched(rectangles, api.create_stream())
    expected = np.zeros(60, np.uint8)
    expected[:50].reshape(5, 10)[:, :4] = source.reshape(5, 20)[:, :4]
    assert np.array_equal(target, expected)
    assert runtime.calls == ["memcpy2DAsync"]


@pytest.mark.parametrize("early_reads", [False, True])
@pytest.mark.parametrize("size", [1, 128 << 10, (128 << 10) + 1])
def test_slots_are_read_early_and_small_runs_leave_the_compute_units_alone(
    monkeypatch, early_reads, size
) -> None:
    runtime = stand_in(monkeypatch)
    api = CupyApi(0, kernel_sms=4)
    source, target = np.full(size, 3, np.uint8), np.zeros(size, np.uint8)
    runs = DirectedRuns(*(np.array([n]) for n in (target.ctypes.data, source.ctypes.data, size)))
    api.copy_batch(runs, api.create_stream(), early_reads=early_reads)
    order = 3 if early_reads else 1  # CU_MEMCPY_SRC_ACCESS_ORDER_ANY, _STREAM
    assert runtime.batch_attributes == [(order, size <= 128 << 10)]
    assert (target == 3).all()


def test_a_kernel_takes_no_more_multiprocessors_than_it_may(monkeypatch) -> None:
    runtime = stand_in(monkeypatch)
    api = CupyApi(0, kernel_sms=4)
    for run_count in (1, 4096):
        api.copy_by_kernel(np.zeros((4096, 3), np.int64), run_count, api.create_stream())
    (few,), (many,) = runtime.kernel_grids[-2:]
    assert 1 <= few <= many == 4


def test_a_device_that_knows_memory_by_another_address_makes_plain_copies_only(monkeypatch) -> None:
    stand_in(monkeypatch).same_pointer = 0
    api = CupyApi(0, kernel_sms=4)
    assert (api.has_batch, api.has_kernel) == (False, False)


def test_the_attributes_of_a_batch_have_the_size_of_the_header() -> None:
    assert ctypes.sizeof(cupy_api._MemcpyAttributes) == 24


def test_without_cupy_the_error_names_the_extras(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingExtraError, match=r"tierstore\[cuda12\] or tierstore\[cuda13\]"):
        CupyApi(0, kernel_sms=4)


def test_a_home_that_cupy_cannot_write_to_is_named_with_the_remedy(monkeypatch, tmp_path) -> None:
    """CuPy 14 makes a folder in it when it is imported; an engine must not end of that."""
    (tmp_path / "cupy.py").write_text("raise PermissionError(13, 'denied', '/.cupy')")
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DeviceError, match=r"/\.cupy.*CUPY_CACHE_DIR"):
        CupyApi(0, kernel_sms=4)


def test_errors_of_cupy_become_ours(monkeypatch) -> None:
    runtime = stand_in(monkeypatch)
    api = CupyApi(0, kernel_sms=4)
    runtime.register_status = 900
    with pytest.raises(DeviceBusyError):
        api.register_host(4096, 4096)
    runtime.register_status = 2
    with pytest.raises(DeviceError, match="cudaHostRegister: error 2"):
        api.register_host(4096, 4096)
    event = api.create_event()
    assert api.is_complete(event)
    runtime.query_status = 600
    assert not api.is_complete(event)
    runtime.query_status = 700
    with pytest.raises(DeviceError, match="700"):
        api.is_complete(event)


def test_a_copy_is_not_given_up_because_a_graph_is_being_captured(monkeypatch) -> None:
    """CUDA then refuses to say whether the event is complete, and the copy is still under way."""
    runtime = stand_in(monkeypatch)
    api = CupyApi(0, kernel_sms=4)
    event = api.create_event()
    runtime.query_status = 900
    assert not api.is_complete(event)


def test_an_unknown_allocation_or_node_is_none(monkeypatch) -> None:
    stand_in(monkeypatch)
    api = CupyApi(0, kernel_sms=4)
    assert api.allocation_of(1 << 40) is None
    assert api.numa_node() is None
