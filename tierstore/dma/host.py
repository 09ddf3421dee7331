"""Copy engine of the CPU platform: the engine's blocks are host memory too."""

import ctypes
from collections import deque
from functools import partial

from tierstore.dma.host_memory import prefault
from tierstore.dma.pinning import Spawn
from tierstore.dma.protocol import ComputeMark, CopyId
from tierstore.dma.runs import GroupAddressing
from tierstore.errors import LayoutError
from tierstore.layout import CanonicalKVCaches
from tierstore.transfer import IntArray

__all__ = ["HostCopyEngine"]

_PIECE_BYTES = 16 << 20
"""What is prefaulted at once: a close waits for it."""


class HostCopyEngine:
    """Copies with `memmove`, at once, in the calling thread.

    A copy is complete when `submit_*` returns: fences have nothing to wait for, since the engine
    runs its step in the same thread. `memmove` releases the interpreter, so loads submitted by
    I/O threads run side by side. Costs about 0.4 us per run plus the bytes.
    """

    def __init__(self, spawn: Spawn | None = None) -> None:
        """`spawn` runs tasks that give the pool its pages; None: who uses them first waits."""
        self._spawn = spawn
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
        if self._spawn is not None and address < end and not self._is_closed:
            self._spawn(partial(self._prefault, address, end))

    def _prefault(self, address: int, end: int) -> None:
        """Give one piece of the pool its pages, and go on; first comes what is used first."""
        size_bytes = min(_PIECE_BYTES, end - address)
        if not self._is_closed and prefault(address, size_bytes):
            self._prefault_from(address + size_bytes, end)

    def submit_offload(
        self, copy_id: CopyId, group_idx: int, block_ids: IntArray, slots: IntArray
    ) -> None:
        """Copy blocks to slots."""
        runs = self._addressing(group_idx).runs(block_ids, slots)
        _copy(runs.pool_addresses, runs.device_addresses, runs.sizes_bytes)
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
        _copy(runs.device_addresses, runs.pool_addresses, runs.sizes_bytes)
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


def _copy(targets: IntArray, sources: IntArray, sizes: IntArray) -> None:
    deque(map(ctypes.memmove, targets.tolist(), sources.tolist(), sizes.tolist()), maxlen=0)
