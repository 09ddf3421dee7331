"""Tries the methods that not every driver has, before a chunk depends on them."""

import ctypes
import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress

import numpy as np

from tierstore.bounded_log import bounded
from tierstore.dma.gpu.cuda_api import CudaApi, DirectedRuns
from tierstore.dma.gpu.kernel_table import ROW_BYTES, fill_table, table_at
from tierstore.dma.gpu.methods import CopyDirection, CopyMethod
from tierstore.errors import DeviceError

__all__ = ["drop_failing_methods"]

_logger = bounded(logging.getLogger(__name__))

_SIZES = np.array([4096, 291, 16, 1])
"""Of runs one after the other: aligned and not, with tails."""
_AREA_BYTES = 8192

_Copy = Callable[[DirectedRuns, CopyDirection], None]


def drop_failing_methods(api: CudaApi) -> None:
    """Copy some bytes by batch and by kernel, and take from `api` what is refused or goes wrong.

    Otherwise it would fail every later copy, where plain copies are only slower. Also loads the
    kernel, which might wait for all work of the device at its first launch.

    Raises:
        DeviceError: no stream or no memory.
    """
    if not api.has_batch and not api.has_kernel:
        return
    with ExitStack() as owned:
        round_trip = _RoundTrip(api, owned)
        api.has_batch = api.has_batch and round_trip.passes(CopyMethod.BATCH, round_trip.copy_batch)
        api.has_kernel = api.has_kernel and round_trip.passes(
            CopyMethod.KERNEL, round_trip.copy_by_kernel
        )


class _RoundTrip:
    """A stream, and memory on both sides: what is sent, the device, what comes back, a table."""

    def __init__(self, api: CudaApi, owned: ExitStack) -> None:
        self._api = api
        self._stream = api.create_stream()
        owned.callback(api.destroy_stream, self._stream)
        self._device = api.alloc_device(_AREA_BYTES)
        owned.callback(api.free_device, self._device)
        self._host = api.alloc_host(2 * _AREA_BYTES + len(_SIZES) * ROW_BYTES)
        owned.callback(api.free_host, self._host)
        owned.callback(self._wait)
        self._table = table_at(self._host + 2 * _AREA_BYTES, len(_SIZES))

    def passes(self, method: CopyMethod, copy: _Copy) -> bool:
        """Return whether bytes arrive on the device and come back by this method."""
        bytes_sent = np.random.default_rng(0).bytes(int(_SIZES.sum()))
        ctypes.memmove(self._host, bytes_sent, len(bytes_sent))
        ctypes.memset(self._host + _AREA_BYTES, 0, _AREA_BYTES)
        try:
            copy(_runs(self._device, self._host), CopyDirection.LOAD)
            self._api.synchronize(self._stream)
            copy(_runs(self._host + _AREA_BYTES, self._device), CopyDirection.OFFLOAD)
            self._api.synchronize(self._stream)
        except DeviceError as error:
            _logger.warning("copies are slower: method=%s cause=%s", method.value, error)
            return False
        if ctypes.string_at(self._host + _AREA_BYTES, len(bytes_sent)) != bytes_sent:
            _logger.warning("copies are slower: method=%s cause=wrong bytes", method.value)
            return False
        return True

    def copy_batch(self, runs: DirectedRuns, direction: CopyDirection) -> None:
        """Copy in a batch."""
        early_reads = direction is CopyDirection.LOAD
        self._api.copy_batch(runs, self._stream, early_reads=early_reads)

    def copy_by_kernel(self, runs: DirectedRuns, _: CopyDirection) -> None:
        """Copy by the kernel."""
        fill_table(self._table, runs)
        self._api.copy_by_kernel(self._table, len(runs), self._stream)

    def _wait(self) -> None:
        # Before the memory is freed; a lost device has nothing under way.
        with suppress(DeviceError):
            self._api.synchronize(self._stream)


def _runs(target: int, source: int) -> DirectedRuns:
    offsets = np.cumsum(_SIZES) - _SIZES
    return DirectedRuns(target + offsets, source + offsets, _SIZES)
