"""Whether the primary tier has room for a hit, by the hit's length."""

from collections.abc import Callable, Sequence

import numpy as np

from tierstore.planner.groups import GroupOffloadConfig
from tierstore.tier.stack import TierStack
from tierstore.transfer import IntArray

__all__ = ["HitRoom", "longest"]


class HitRoom:
    """Counts the slots that a hit beyond `local_tokens` takes: those of all groups together.

    Chunks that are resident already take part: they are pinned while the others come.
    """

    def __init__(
        self,
        stack: TierStack,
        configs: Sequence[GroupOffloadConfig],
        block_hashes: Sequence[bytes],
        local_tokens: int,
    ) -> None:
        self._stack = stack
        self._configs = configs
        self._block_hashes = block_hashes
        self._local_tokens = local_tokens

    def has_now(self, hit_tokens: int) -> bool:
        """Return whether a load of the hit would find room if it were reserved now."""
        return self._stack.has_room(
            [
                (
                    config.spec.group_idx,
                    config.keys(self._block_hashes, *self._chunks(config, hit_tokens)),
                )
                for config in self._configs
            ]
        )

    def has_ever(self, hit_tokens: int) -> bool:
        """Return whether the hit has room once no other transfer holds any."""
        counts: dict[int, int] = {}
        for config in self._configs:
            first, end = self._chunks(config, hit_tokens)
            counts[config.spec.group_idx] = end - first
        return self._stack.could_hold(counts)

    def _chunks(self, config: GroupOffloadConfig, hit_tokens: int) -> tuple[int, int]:
        """Return the first and the end of the chunks that the hit restores of a group."""
        restored_from = int(config.restored_from(np.array([hit_tokens]))[0])
        per_chunk = config.tokens_per_chunk
        return max(restored_from, self._local_tokens) // per_chunk, hit_tokens // per_chunk


def longest(lengths: IntArray, is_possible: Callable[[int], bool]) -> int:
    """Return a length, of ascending ones, that is possible and the next one is not; 0: none.

    The longest one, if what is possible of a length is possible of all shorter ones.
    """
    low, high = 0, len(lengths)
    while low < high:
        middle = (low + high) // 2
        if is_possible(int(lengths[middle])):
            low = middle + 1
        else:
            high = middle
    return int(lengths[low - 1]) if low else 0
