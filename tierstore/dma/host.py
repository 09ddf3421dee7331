"""Copy engine of the CPU platform: the engine's blocks are host memory too."""

import os
import threading
from collections import deque
from collections.abc import Callable

from tierstore.dma.background import SPAWN_MAX, BackgroundTurns, Spawn, no_io
from tierstore.dma.populator import PoolPopulator
from tierstore.dma.protocol import ComputeMark, CopyId
from tierstore.dma.runs import GroupAddressing
from tierstore.dma.shared_copy import Piece, SharedCopy, move, pieces_of
from tierstore.errors import LayoutError
from tierstore.layout import CanonicalKVCaches
from tierstore.transfer import IntArray

__all__ = ["HostCopyEngine"]

_SHARE_BYTES_MIN = 8 << 20
"""Below that a copy is over before another thread is awake."""

_SHARE_RUN_BYTES_MIN = 64 << 10
"""Mean size of a run below which threads wait for the interpreter longer than they copy."""

_PIECES_PER_THREAD = 8
"""Of a shared copy: threads that start late or run slowly leave more to the others."""

_PART_BYTES_MIN = 1 << 20
"""Of a run that is cut: below that, taking the next piece begins to cost something."""


class HostCopyEngine:
    """Copies with `memmove`, at once, in the calling thread; others help it with a large copy.

    A copy is complete when `submit_*` returns: fences have nothing to wait for, since the engine
    runs its step in the same thread. `memmove` releases the interpreter, so loads submitted by
    I/O threads run side by side. Costs about 0.4 us per run plus the bytes.
    """

    def __init__(
        self,
        spawn: Spawn | None = None,
        is_io_under_way: Callable[[], bool] = no_io,
        *,
        share_bytes_min: int = _SHARE_BYTES_MIN,
        share_run_bytes_min: int = _SHARE_RUN_BYTES_MIN,
        part_bytes_min: int = _PART_BYTES_MIN,
    ) -> None:
        """`spawn` runs tasks that populate the pool's pages, and that help with large copies.

        Without it, the first use of a page waits for it, and one thread makes each copy. Copies are
        large from `share_bytes_min` on, if their runs have `share_run_bytes_min` on average; runs
        are cut into parts of `part_bytes_min` or more. Populating gives way to copies, and while
        `is_io_under_way`: while slots are read or written.
        """
        self._spawn = spawn
        self._share_bytes_min = share_bytes_min
        self._share_run_bytes_min = share_run_bytes_min
        self._helper_count = min(SPAWN_MAX, len(os.sched_getaffinity(0)) - 1)
        self._part_bytes_min = part_bytes_min
        self._is_io_under_way = is_io_under_way
        self._turns = BackgroundTurns(self._is_transferring)
        self._copying_lock = threading.RLock()
        self._copying_count = 0
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
        if self._spawn is not None:
            # In the background, since an engine fills its pool: a load that waits for each new page
            # takes 490 instead of 90 ms for 146 MB. An embedded store may never fill its memory.
            self._spawn(PoolPopulator(pool_address, pool_bytes, self._turns).run)

    def submit_offload(
        self, copy_id: CopyId, group_idx: int, block_ids: IntArray, slots: IntArray
    ) -> None:
        """Copy blocks to slots."""
        runs = self._addressing(group_idx).runs(block_ids, slots)
        self._copy((runs.pool_addresses, runs.device_addresses, runs.sizes_bytes))
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
        self._copy((runs.device_addresses, runs.pool_addresses, runs.sizes_bytes))
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
        """Forget the regions; populate no further page."""
        self._turns.end()
        self._groups = {}
        self._caches = None

    def _addressing(self, group_idx: int) -> GroupAddressing:
        addressing = self._groups.get(group_idx)
        if addressing is None:
            raise LayoutError(f"group {group_idx} is not registered for copies")
        return addressing

    def _copy(self, runs: Piece) -> None:
        """Copy, and let what gives way to copies know."""
        with self._copying_lock:
            self._copying_count += 1
        try:
            self._move(runs)
        finally:
            with self._copying_lock:
                self._copying_count -= 1

    def _move(self, runs: Piece) -> None:
        """Copy alone, or with the help of whoever is free."""
        sizes = runs[2]
        size_min = max(self._share_bytes_min, len(sizes) * self._share_run_bytes_min)
        if self._spawn is None or not self._helper_count or int(sizes.sum()) < size_min:
            move(runs)
            return
        piece_count = _PIECES_PER_THREAD * (self._helper_count + 1)
        shared = SharedCopy(pieces_of(runs, piece_count, self._part_bytes_min))
        for _ in range(self._helper_count):
            self._spawn(shared.help)
        shared.finish()

    def _is_transferring(self) -> bool:
        return self._copying_count > 0 or self._is_io_under_way()
