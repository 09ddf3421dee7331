"""Copy engine of the CPU platform: the engine's blocks are host memory too."""

import ctypes
import os
import threading
from collections import deque
from functools import partial

import numpy as np

from tierstore.dma.gpu.pinning import SPAWN_MAX, Spawn
from tierstore.dma.host_memory import prefault
from tierstore.dma.protocol import ComputeMark, CopyId
from tierstore.dma.runs import GroupAddressing
from tierstore.errors import LayoutError
from tierstore.layout import CanonicalKVCaches
from tierstore.transfer import IntArray

__all__ = ["HostCopyEngine"]

_PREFAULT_BYTES = 16 << 20
"""What is prefaulted at once; `close` waits for it."""

_SHARE_BYTES_MIN = 8 << 20
"""Below that a copy is over before another thread is awake."""

_SHARE_RUN_BYTES_MIN = 64 << 10
"""Mean size of a run below which threads wait for the interpreter longer than they copy."""

_PIECES_PER_THREAD = 8
"""Of a shared copy: threads that start late or run slowly leave more to the others."""


class HostCopyEngine:
    """Copies with `memmove`, at once, in the calling thread; others help it with a large copy.

    A copy is complete when `submit_*` returns: fences have nothing to wait for, since the engine
    runs its step in the same thread. `memmove` releases the interpreter, so loads submitted by
    I/O threads run side by side. Costs about 0.4 us per run plus the bytes.
    """

    def __init__(
        self,
        spawn: Spawn | None = None,
        *,
        share_bytes_min: int = _SHARE_BYTES_MIN,
        share_run_bytes_min: int = _SHARE_RUN_BYTES_MIN,
    ) -> None:
        """`spawn` runs tasks that populate the pool's pages, and that help with large copies.

        Without it, the first use of a page waits for it, and one thread makes each copy. Copies are
        large from `share_bytes_min` on, if their runs have `share_run_bytes_min` on average.
        """
        self._spawn = spawn
        self._share_bytes_min = share_bytes_min
        self._share_run_bytes_min = share_run_bytes_min
        self._helper_count = min(SPAWN_MAX, len(os.sched_getaffinity(0)) - 1)
        self._is_closed = False
        self._groups: dict[int, GroupAddressing] = {}
        self._caches: CanonicalKVCaches | None = None
        self._complete: deque[CopyId] = deque()

    def register(
        self, caches: CanonicalKVCaches, blocks_per_chunk: int, pool_address: int, pool_bytes: int
    ) -> None:
        """Learn the regions.

        Raises:
            LayoutError: the caches are not in host memory.
        """
        if caches.device != "cpu":
            raise LayoutError(f"host copy engine: expected device cpu, got {caches.device}")
        self._caches = caches
        self._groups = {
            group_idx: GroupAddressing(
                caches, group_idx, blocks_per_chunk, pool_address, pool_bytes
            )
            for group_idx, refs in enumerate(caches.group_refs)
            if refs
        }
        self._prefault_from(pool_address, pool_address + pool_bytes)

    def _prefault_from(self, address: int, end: int) -> None:
        # In the background, since an engine fills its pool: a load that waits for each new page
        # takes 490 instead of 90 ms for 146 MB. An embedded store may never fill its memory.
        if self._spawn is not None and address < end and not self._is_closed:
            self._spawn(partial(self._prefault, address, end))

    def _prefault(self, address: int, end: int) -> None:
        """Give one piece of the pool its pages, and go on; first comes what is used first."""
        size_bytes = min(_PREFAULT_BYTES, end - address)
        if not self._is_closed and prefault(address, size_bytes):
            self._prefault_from(address + size_bytes, end)

    def submit_offload(
        self, copy_id: CopyId, group_idx: int, block_ids: IntArray, slots: IntArray
    ) -> None:
        """Copy blocks to slots."""
        runs = self._addressing(group_idx).runs(block_ids, slots)
        self._copy(runs.pool_addresses, runs.device_addresses, runs.sizes_bytes)
        self._complete.append(copy_id)

    def submit_load(
        self,
        copy_id: CopyId,
        group_idx: int,
        block_ids: IntArray,
        slots: IntArray,
        *,
        after: ComputeMark | None = None,  # noqa: ARG002 - the contract; what it names is done
        urgent: bool = False,  # noqa: ARG002 - the contract; nothing is queued here
    ) -> None:
        """Copy slots to blocks."""
        runs = self._addressing(group_idx).runs(block_ids, slots)
        self._copy(runs.device_addresses, runs.pool_addresses, runs.sizes_bytes)
        self._complete.append(copy_id)

    def mark_compute(self) -> ComputeMark:
        """Name what is done: the engine works in the calling thread."""
        return ComputeMark()

    def poll(self) -> list[CopyId]:
        """Return the copies made since the last call."""
        return [self._complete.popleft() for _ in range(len(self._complete))]

    def take_failed(self) -> list[CopyId]:
        """Return none: `memmove` does not fail."""
        return []

    def fence(self, copy_ids: tuple[CopyId, ...]) -> None:
        """Do nothing: a submitted copy is a finished copy."""

    def close(self) -> None:
        """Forget the regions; prefault no further piece."""
        self._is_closed = True
        self._groups = {}
        self._caches = None

    def _addressing(self, group_idx: int) -> GroupAddressing:
        addressing = self._groups.get(group_idx)
        if addressing is None:
            raise LayoutError(f"group {group_idx} is not registered for copies")
        return addressing

    def _copy(self, targets: IntArray, sources: IntArray, sizes: IntArray) -> None:
        """Copy alone, or with the help of whoever is free."""
        size_min = max(self._share_bytes_min, len(sizes) * self._share_run_bytes_min)
        if self._spawn is None or int(sizes.sum()) < size_min:
            _move(targets, sources, sizes)
            return
        piece_count = _PIECES_PER_THREAD * (self._helper_count + 1)
        pieces = (np.array_split(array, piece_count) for array in (targets, sources, sizes))
        shared = _SharedCopy(deque(zip(*pieces, strict=True)))
        for _ in range(self._helper_count):
            self._spawn(shared.help)
        shared.finish()


class _SharedCopy:
    """A copy in pieces: each thread takes the next one until none is left."""

    def __init__(self, pieces: deque[tuple[IntArray, IntArray, IntArray]]) -> None:
        self._pieces = pieces
        self._unfinished_count = len(pieces)
        # An interruption cannot keep a lock from being left, as it can a condition, which is left
        # by a function in Python.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def help(self) -> None:
        """Copy pieces until none is left."""
        while True:
            try:
                piece = self._pieces.popleft()
            except IndexError:
                return
            is_moved = False
            try:
                _move(*piece)
                is_moved = True
            finally:
                with self._lock:
                    if is_moved:
                        self._unfinished_count -= 1
                    else:  # no memory, say; to copy it once more does no harm
                        self._pieces.append(piece)
                    self._changed.notify_all()

    def finish(self) -> None:
        """Copy pieces, then wait for those that helpers took."""
        while self._unfinished_count:
            self.help()
            with self._lock:
                self._changed.wait_for(lambda: self._pieces or not self._unfinished_count)


def _move(targets: IntArray, sources: IntArray, sizes: IntArray) -> None:
    deque(map(ctypes.memmove, targets.tolist(), sources.tolist(), sizes.tolist()), maxlen=0)
