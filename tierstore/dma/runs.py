"""From (block ids, slots) to few large copies: address arithmetic without a device.

    chunk in its slot, LAYER_MAJOR, two layers, two blocks per chunk:

        slot * PAGE_BYTES
        |L0 b0|L0 b1|L1 b0|L1 b1|
         ^ row 0     ^ row 2         one row per page: (device address, slot address, bytes)

Rows that are neighbours on both sides become one run.
"""

from dataclasses import dataclass

import numpy as np

from tierstore.errors import LayoutError
from tierstore.layout import PAGE_BYTES, CanonicalKVCaches, ChunkOrder
from tierstore.transfer import IntArray

__all__ = ["CopyRuns", "GroupAddressing"]


@dataclass(frozen=True, slots=True)
class CopyRuns:
    """Copies to make, as three arrays of one length."""

    device_addresses: IntArray
    pool_addresses: IntArray
    sizes_bytes: IntArray

    def __len__(self) -> int:
        return len(self.sizes_bytes)


class GroupAddressing:
    """The address arithmetic of one group: everything that does not change between copies."""

    def __init__(
        self,
        caches: CanonicalKVCaches,
        group_idx: int,
        blocks_per_chunk: int,
        pool_address: int,
        pool_bytes: int,
    ) -> None:
        tensors = [caches.tensors[ref.tensor_idx] for ref in caches.group_refs[group_idx]]
        if not tensors:
            raise LayoutError(f"group {group_idx} is not cached: it has no layers")
        bases = np.array([tensor.address for tensor in tensors], dtype=np.int64)
        strides = np.array([tensor.block_stride_bytes for tensor in tensors], dtype=np.int64)
        pages = np.array([tensor.page_bytes for tensor in tensors], dtype=np.int64)
        layer_count, block_count = len(tensors), blocks_per_chunk
        # One entry per page of a chunk, in slot order.
        if caches.chunk_order is ChunkOrder.LAYER_MAJOR:
            layer_of = np.repeat(np.arange(layer_count), block_count)
            self._block_of = np.tile(np.arange(block_count), layer_count)
        else:
            layer_of = np.tile(np.arange(layer_count), block_count)
            self._block_of = np.repeat(np.arange(block_count), layer_count)
        self._bases = bases[layer_of]
        self._strides = strides[layer_of]
        self._sizes = pages[layer_of]
        self._offsets = np.cumsum(self._sizes) - self._sizes
        self._group_idx = group_idx
        self._blocks_per_chunk = blocks_per_chunk
        self._block_count = min(tensor.block_count for tensor in tensors)
        self._chunk_bytes = int(self._sizes.sum())
        self._pool_address = pool_address
        self._slot_max = (pool_bytes - self._chunk_bytes) // PAGE_BYTES

    def runs(self, block_ids: IntArray, slots: IntArray) -> CopyRuns:
        """Build the coalesced runs for chunks of `block_ids` (chunks, blocks_per_chunk) in `slots`.

        Negative block ids are left out. O(pages), all of it in numpy.

        Raises:
            LayoutError: an id or a slot lies outside its region.
        """
        if block_ids.shape != (len(slots), self._blocks_per_chunk):
            raise LayoutError(
                f"group {self._group_idx}: expected block ids of shape "
                f"({len(slots)}, {self._blocks_per_chunk}), got {block_ids.shape}"
            )
        if len(slots) == 0:
            return CopyRuns(slots, slots, slots)
        if int(block_ids.max()) >= self._block_count:
            raise LayoutError(
                f"group {self._group_idx}: block {int(block_ids.max())} is not below the "
                f"engine's {self._block_count} blocks"
            )
        if int(slots.min()) < 0 or int(slots.max()) > self._slot_max:
            raise LayoutError(
                f"group {self._group_idx}: slots {int(slots.min())}..{int(slots.max())} are not "
                f"within 0..{self._slot_max}"
            )
        blocks = block_ids[:, self._block_of]
        device = self._bases + blocks * self._strides
        pool = (self._pool_address + slots * PAGE_BYTES)[:, None] + self._offsets
        sizes = np.empty_like(device)
        sizes[:] = self._sizes
        if int(block_ids.min()) >= 0:
            return _coalesce(device.ravel(), pool.ravel(), sizes.ravel())
        wanted = blocks >= 0
        return _coalesce(device[wanted], pool[wanted], sizes[wanted])


def _coalesce(device: IntArray, pool: IntArray, sizes: IntArray) -> CopyRuns:
    if len(sizes) == 0:
        return CopyRuns(device, pool, sizes)
    continues = (device[1:] == device[:-1] + sizes[:-1]) & (pool[1:] == pool[:-1] + sizes[:-1])
    if not continues.any():
        return CopyRuns(device, pool, sizes)
    starts = np.concatenate(([0], np.flatnonzero(~continues) + 1))
    return CopyRuns(device[starts], pool[starts], np.add.reduceat(sizes, starts))
