"""Has the kernel give pages to the pool before a copy needs them.

The first touch of a page costs more than the copy into it, and the copy of an offload is on the
engine's step. Slots are given out from the low addresses upwards, so a window ahead of the highest
slot in use is enough, and the pool takes no more memory than is used plus that window.
"""

from functools import partial

from tierstore.dma.host_memory import prefault
from tierstore.io_pool import IoPool
from tierstore.layout import PAGE_BYTES
from tierstore.memory import HostPool
from tierstore.transfer import IntArray

__all__ = ["PoolPrefault"]

AHEAD_BYTES = 256 << 20
PIECE_BYTES = 16 << 20


class PoolPrefault:
    """One background thread and how far it was sent. One caller."""

    def __init__(self, pool: HostPool) -> None:
        """Start the thread; `close` ends it."""
        self._pool = pool
        self._sent_bytes = 0
        self._closing = False
        self._threads = IoPool(1, "tierstore-prefault")
        self._threads.open()
        self._send(AHEAD_BYTES)

    def reach(self, slots: IntArray) -> None:
        """Learn which slots are in use; costs a microsecond."""
        if self._sent_bytes < self._pool.size_bytes and len(slots):
            self._send(int(slots.max()) * PAGE_BYTES + AHEAD_BYTES)

    def close(self, timeout_seconds: float) -> bool:
        """Stop; False: the thread hangs. The pool must stay mapped until then."""
        self._closing = True
        return self._threads.close(timeout_seconds)

    def _send(self, end_byte: int) -> None:
        end_byte = min(end_byte, self._pool.size_bytes)
        while self._sent_bytes < end_byte:
            piece_bytes = min(PIECE_BYTES, self._pool.size_bytes - self._sent_bytes)
            address = self._pool.address + self._sent_bytes
            self._threads.submit_write(partial(self._prefault, address, piece_bytes))
            self._sent_bytes += piece_bytes

    def _prefault(self, address: int, size_bytes: int) -> None:
        if not self._closing:
            prefault(address, size_bytes)
