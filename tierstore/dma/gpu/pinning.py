"""Pins the primary pool in the background, piece by piece, from its first slot upwards.

    pool  |piece 0|piece 1|piece 2|piece 3| ...        pieces are registered one after the other;
           pinned  pinned  prefault  -                 the threads prefault ahead of that

The pool is usable at once: slots are given out from the low addresses upwards, so that those in use
are pinned first, and a copy of a slot that is not pinned yet works too. It is slower, and the
thread that submits it waits for its bytes. Pinning gives way to transfers, at each piece and for a
bounded time.
"""

import logging
import threading
from collections import deque

import numpy as np
import numpy.typing as npt

from tierstore.bounded_log import bounded
from tierstore.clock import Clock, MonotonicClock
from tierstore.dma.background import SPAWN_MAX, BackgroundTurns, Spawn, no_io
from tierstore.dma.gpu.cuda_api import CudaApi
from tierstore.dma.host_memory import bind_to_node, keep_from_children
from tierstore.dma.populator import prefault_in_steps
from tierstore.errors import DeviceBusyError, DeviceError
from tierstore.layout import PAGE_BYTES, round_up
from tierstore.metrics import Counters, Metric
from tierstore.transfer import IntArray

__all__ = ["PIECE_BYTES", "PoolPinner"]

_logger = bounded(logging.getLogger(__name__))

PIECE_BYTES = 64 << 20
"""Small enough that other calls of the process get their turn at the driver between two pieces. One
registration of the whole pool lost: usable only at its end, and the driver is locked for seconds.
Runs are cut where registrations meet (`RegionBorders`)."""

_PIECES_MAX = 1 << 15
_CLOSE_TIMEOUT_SECONDS = 30.0
_BUSY_SECONDS = 0.1
"""Between two attempts at a driver that refuses while a CUDA graph is captured."""


class PoolPinner:
    """Registers a range of host memory with a device, and unregisters it. Thread-safe."""

    def __init__(
        self,
        api: CudaApi,
        address: int,
        size_bytes: int,
        counters: Counters,
        *,
        turns: BackgroundTurns | None = None,
        piece_bytes: int = PIECE_BYTES,
        clock: Clock | None = None,
    ) -> None:
        """Do nothing yet; see `open`. `size_bytes` 0 stands for a pool that is never pinned.

        `turns` says when a piece may be pinned (None: always); `close` ends it.
        """
        self._api = api
        self._address = address
        self._size_bytes = size_bytes
        self._piece_bytes = max(piece_bytes, round_up(-(-size_bytes // _PIECES_MAX), PAGE_BYTES))
        self._counters = counters
        self._clock = clock or MonotonicClock()
        self._turns = turns or BackgroundTurns(no_io)
        piece_count = -(-size_bytes // self._piece_bytes)
        self._pinned = np.zeros(piece_count, bool)
        # An interruption cannot keep a lock from being left, as it can a condition, which is left
        # by a function in Python.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue = deque(range(piece_count))
        self._task_count = 0
        self._all_pinned = False
        self._closing = False
        self._registering = threading.Lock()
        self._seconds = 0.0

    @property
    def borders(self) -> list[int]:
        """Addresses at which a piece starts or ends."""
        stop = self._address + self._size_bytes
        return [*range(self._address, stop, self._piece_bytes), stop]

    def open(self, spawn: Spawn) -> None:
        """Start to pin in the background, next to the device where the kernel allows it."""
        if not self._size_bytes:
            return
        keep_from_children(self._address, self._size_bytes)
        node = self._api.numa_node()
        if node is not None:
            bind_to_node(self._address, self._size_bytes, node)
        with self._lock:
            self._task_count = min(SPAWN_MAX, len(self._queue))
        for _ in range(self._task_count):
            spawn(self._run)

    def pinned(self, addresses: IntArray) -> npt.NDArray[np.bool_] | None:
        """Return which addresses of the pool lie in pinned pieces; None: all of them.

        What is pinned stays so until `close`.
        """
        if self._all_pinned:
            return None
        if len(self._pinned) == 0:
            return np.zeros(len(addresses), bool)
        flags: npt.NDArray[np.bool_] = self._pinned[
            (addresses - self._address) // self._piece_bytes
        ]
        return flags

    def close(self) -> None:
        """Stop, and unregister every piece; idempotent. No copy may be in flight."""
        self._turns.end()
        with self._lock:
            self._closing = True
            self._queue.clear()
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: not self._task_count, _CLOSE_TIMEOUT_SECONDS):
                _logger.error("pinning hangs at close: its memory stays pinned")
                return
        self._all_pinned = False
        for piece in np.flatnonzero(self._pinned).tolist():
            try:
                self._api.unregister_host(self._address + piece * self._piece_bytes)
            except DeviceError as error:
                _logger.error("unpin failed: piece=%d cause=%s", piece, error)
            self._counters.add(Metric.PINNED_BYTES, -self._bytes_of(piece))
        self._pinned[:] = False

    def _run(self) -> None:
        """Prefault and register pieces until none is left (in a background thread)."""
        try:
            self._api.use_device()
            self._api.relax_capture()
            while self._turns.wait() and (piece := self._next_piece()) is not None:
                prefault_in_steps(self._address + piece * self._piece_bytes, self._bytes_of(piece))
                # One at a time: the driver lets only one in anyway, and others want their turn.
                with self._registering:
                    self._turns.wait()
                    while not (self._closing or self._register(piece)):
                        self._wait_for_driver()
        except DeviceError as error:
            self._give_up(error)
        finally:
            with self._lock:
                self._task_count -= 1
                self._changed.notify_all()

    def _next_piece(self) -> int | None:
        with self._lock:
            return self._queue.popleft() if self._queue else None

    def _wait_for_driver(self) -> None:
        # Here, and not until the next `poll`: the worker polls only while transfers are under way.
        with self._lock:
            self._changed.wait_for(lambda: self._closing, _BUSY_SECONDS)

    def _register(self, piece: int) -> bool:
        """Register a piece; False: not now."""
        started_at = self._clock.seconds()
        try:
            self._api.register_host(
                self._address + piece * self._piece_bytes, self._bytes_of(piece)
            )
        except DeviceBusyError:
            return False
        seconds = self._clock.seconds() - started_at
        self._seconds += seconds
        self._pinned[piece] = True
        self._counters.add(Metric.PINNED_BYTES, self._bytes_of(piece))
        self._counters.add(Metric.PIN_SECONDS, seconds)
        if self._pinned.all():
            self._all_pinned = True
            _logger.info("pool pinned: bytes=%d seconds=%.1f", self._size_bytes, self._seconds)
        return True

    def _give_up(self, error: DeviceError) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._queue.clear()
        self._turns.end()
        _logger.warning(
            "pool is not pinned: pinned_bytes=%d of %d cause=%s; copies of the rest are slower and "
            "hold up the engine; raise the limit of locked memory (ulimit -l) or lower "
            "primary.capacity",
            sum(self._bytes_of(piece) for piece in np.flatnonzero(self._pinned).tolist()),
            self._size_bytes,
            error,
        )

    def _bytes_of(self, piece: int) -> int:
        return min(self._piece_bytes, self._size_bytes - piece * self._piece_bytes)
