"""Measures, in some milliseconds, which way of copying a device does best at which size."""

import logging
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from tierstore.bounded_log import bounded
from tierstore.clock import Clock
from tierstore.dma.gpu.cuda_api import CudaApi, DirectedRuns, Rectangles
from tierstore.dma.gpu.kernel_table import ROW_BYTES, fill_table, table_at
from tierstore.dma.gpu.methods import CopyDirection, CopyMethod, Thresholds

__all__ = ["measure_thresholds"]

_logger = bounded(logging.getLogger(__name__))

_RUN_BYTES = (2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10)
"""Pages have such sizes; copy engines can lose most of their bandwidth between two of them."""
_RUN_COUNTS = (1, 4, 16, 64)
_RUN_COUNT_MANY = 128
_SAMPLE_BYTES_MAX = 4 << 20
_SCRATCH_BYTES = 2 * _SAMPLE_BYTES_MAX
_REPEATS = 3
_WORTH_IT = 0.95
"""A method must take less than this share of the others' time to be preferred to them."""


def measure_thresholds(api: CudaApi, clock: Clock) -> dict[CopyDirection, Thresholds]:
    """Time every method on scattered runs of some sizes and counts, in both directions.

    Takes 8 MiB of device memory and 8 MiB of pinned memory for the time of the call.

    Raises:
        DeviceError: no memory, or a copy was refused.
    """
    started_at = clock.seconds()
    bench = _Bench(api, clock)
    try:
        thresholds = {direction: _measure(bench, direction) for direction in CopyDirection}
    finally:
        bench.close()
    _logger.info("copies measured: seconds=%.3f %s", clock.seconds() - started_at, thresholds)
    return thresholds


def _measure(bench: "_Bench", direction: CopyDirection) -> Thresholds:
    kernel_below_bytes = 0
    for size in _RUN_BYTES:
        if not bench.kernel_wins(direction, size, _RUN_COUNT_MANY):
            break
        kernel_below_bytes = size + size // 2  # the next size tried is twice as large
    kernel_runs_min = next(
        (count for count in _RUN_COUNTS if bench.kernel_wins(direction, _RUN_BYTES[0], count)),
        _RUN_COUNT_MANY,
    )
    pitched_from_bytes = None
    for size in reversed(_RUN_BYTES):
        if not bench.pitched_wins(direction, size):
            break
        pitched_from_bytes = size
    return Thresholds(
        kernel_below_bytes=kernel_below_bytes,
        kernel_runs_min=kernel_runs_min,
        pitched_from_bytes=pitched_from_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Sample:
    method: CopyMethod
    direction: CopyDirection
    size_bytes: int
    run_count: int


class _Bench:
    """A stream with scratch memory on both sides."""

    def __init__(self, api: CudaApi, clock: Clock) -> None:
        self._api = api
        self._clock = clock
        with ExitStack() as owned:
            self._stream = api.create_stream()
            owned.callback(api.destroy_stream, self._stream)
            self._device = api.alloc_device(_SCRATCH_BYTES)
            owned.callback(api.free_device, self._device)
            self._host = api.alloc_host(_SCRATCH_BYTES + _RUN_COUNT_MANY * ROW_BYTES)
            owned.callback(api.free_host, self._host)
            self._owned = owned.pop_all()
        self._table = table_at(self._host + _SCRATCH_BYTES, _RUN_COUNT_MANY)
        self._seconds: dict[_Sample, float] = {}

    def kernel_wins(self, direction: CopyDirection, size_bytes: int, run_count: int) -> bool:
        """Return whether the kernel beats the copy engines."""
        if not self._api.has_kernel:
            return False
        others = [
            self._time(_Sample(method, direction, size_bytes, run_count))
            for method in self._engine_methods()
        ]
        kernel = self._time(_Sample(CopyMethod.KERNEL, direction, size_bytes, run_count))
        return kernel < _WORTH_IT * min(others)

    def pitched_wins(self, direction: CopyDirection, size_bytes: int) -> bool:
        """Return whether one 2-D copy beats separate and batched ones."""
        others = [
            self._time(_Sample(method, direction, size_bytes, _RUN_COUNT_MANY))
            for method in self._engine_methods()
        ]
        sample = _Sample(CopyMethod.PITCHED, direction, size_bytes, _RUN_COUNT_MANY)
        return self._time(sample) < _WORTH_IT * min(others)

    def close(self) -> None:
        """Free the scratch memory when nothing uses it any more."""
        with self._owned:
            self._api.synchronize(self._stream)

    def _engine_methods(self) -> list[CopyMethod]:
        return [CopyMethod.PLAIN] + [CopyMethod.BATCH] * self._api.has_batch

    def _time(self, sample: _Sample) -> float:
        """Return the seconds of the best of some repeats, from the call to the last byte."""
        if sample not in self._seconds:
            self._seconds[sample] = min(self._time_once(sample) for _ in range(_REPEATS))
        return self._seconds[sample]

    def _time_once(self, sample: _Sample) -> float:
        count = min(sample.run_count, _SAMPLE_BYTES_MAX // sample.size_bytes)
        index = np.arange(count)
        # Scattered on the device, one after the other in the slot.
        device = self._device + index * 2 * sample.size_bytes
        host = self._host + index * sample.size_bytes
        sizes = np.full(count, sample.size_bytes)
        if sample.direction is CopyDirection.OFFLOAD:
            runs = DirectedRuns(host, device, sizes)
        else:
            runs = DirectedRuns(device, host, sizes)
        started_at = self._clock.seconds()
        self._copy(sample, runs)
        self._api.synchronize(self._stream)
        return self._clock.seconds() - started_at

    def _copy(self, sample: _Sample, runs: DirectedRuns) -> None:
        match sample.method:
            case CopyMethod.PLAIN:
                self._api.copy_each(runs, self._stream)
            case CopyMethod.BATCH:
                self._api.copy_batch(
                    runs, self._stream, early_reads=sample.direction is CopyDirection.LOAD
                )
            case CopyMethod.KERNEL:
                fill_table(self._table, runs)
                self._api.copy_by_kernel(self._table, len(runs), self._stream)
            case CopyMethod.PITCHED:
                self._api.copy_pitched(_as_rectangle(runs), self._stream)


def _as_rectangle(runs: DirectedRuns) -> Rectangles:
    first = slice(0, 1)
    return Rectangles(
        runs.targets[first],
        runs.sources[first],
        runs.sizes_bytes[first],
        np.array([len(runs)]),
        np.diff(runs.targets[:2]),
        np.diff(runs.sources[:2]),
    )
