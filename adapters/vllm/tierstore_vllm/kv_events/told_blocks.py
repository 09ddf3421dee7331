"""The blocks of chunks that listeners were told of, where chunks consist of several blocks."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from tierstore.key import OffloadKey, get_offload_group_idx

__all__ = ["ToldBlocks"]

_RECORDED_MAX = 1 << 16
"""Recorded chunks of several blocks whose hashes are kept until they are evicted, of all tiers.

Of older ones only the last block's is known, which is in their key: the event names that one.
"""


class _Place(NamedTuple):
    """A block somewhere; `tier_name` as in `Movement`."""

    tier_name: str | None
    group_idx: int
    block_hash: bytes


class ToldBlocks:
    """Counts the chunks that hold a block: a block is gone when the last of them is.

    The last block of each chunk is not counted, since no other chunk has it.
    """

    def __init__(self) -> None:
        self._recorded: OrderedDict[tuple[str, OffloadKey], tuple[bytes, ...]] = OrderedDict()
        """The hashes of recorded chunks, by the name of each tier that has one. Those in memory
        are remembered by the tiers' log."""
        self._holder_counts: Counter[_Place] = Counter()

    def hold(self, tier_name: str | None, key: OffloadKey, hashes: tuple[bytes, ...]) -> None:
        """Take note of the blocks of a chunk that came."""
        if tier_name is not None:
            if (tier_name, key) in self._recorded:
                return
            self._recorded[tier_name, key] = hashes
            if len(self._recorded) > _RECORDED_MAX:
                oldest, of_oldest = self._recorded.popitem(last=False)
                self.release(*oldest, of_oldest)
        group_idx = get_offload_group_idx(key)
        self._holder_counts.update(_Place(tier_name, group_idx, shared) for shared in hashes[:-1])

    def release(
        self, tier_name: str | None, key: OffloadKey, hashes: Sequence[bytes]
    ) -> Sequence[bytes]:
        """Return the blocks that are gone now that a chunk of them is."""
        group_idx = get_offload_group_idx(key)
        gone = []
        for shared in hashes[:-1]:
            place = _Place(tier_name, group_idx, shared)
            self._holder_counts[place] -= 1
            if self._holder_counts[place] <= 0:
                del self._holder_counts[place]
                gone.append(shared)
        return [*gone, hashes[-1]]

    def take_recorded(self, tier_name: str, key: OffloadKey) -> Sequence[bytes] | None:
        """Return the blocks that are gone now that a recorded chunk is; None: it is unknown."""
        hashes = self._recorded.pop((tier_name, key), None)
        return None if hashes is None else self.release(tier_name, key, hashes)

    def forget_recorded(self) -> None:
        """Forget all recorded chunks, as if listeners had never been told of them."""
        self._recorded.clear()
        for place in [place for place in self._holder_counts if place.tier_name is not None]:
            del self._holder_counts[place]
