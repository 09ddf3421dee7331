"""Chunks from before a reset that transfers still hold."""

from collections.abc import Iterable, Sequence

from tierstore.key import OffloadKey
from tierstore.tier.cascade import Cascade
from tierstore.tier.memory.primary import PrimaryTier

__all__ = ["StaleChunks"]


class StaleChunks:
    """Chunks that are not found or used, and forgotten after their last transfer. One thread."""

    def __init__(self, primary: PrimaryTier, cascades: Sequence[Cascade]) -> None:
        """Share the tiers; cascades are told of forgotten chunks."""
        self._primary = primary
        self._cascades = cascades
        self.keys: set[OffloadKey] = set()
        """Always the same plain set, so that callers test it for emptiness without a call."""

    def add(self, keys: Iterable[OffloadKey]) -> None:
        """Make chunks that transfers hold unreachable."""
        self.keys.update(keys)

    def take_arrived(self, keys: Sequence[OffloadKey]) -> set[int]:
        """Return the indices of the stale ones among arrived chunks, and forget them.

        The caller drops them.
        """
        indices = {i for i, key in enumerate(keys) if key in self.keys}
        self.keys.difference_update(keys)
        return indices

    def forget_released(self) -> None:
        """Forget stale chunks that no transfer holds any more."""
        if self.keys:
            arriving = self._primary.arriving.keys()
            held = self._primary.discard(self.keys - arriving)
            gone = self.keys - arriving - set(held)
            self.keys -= gone
            for cascade in self._cascades:
                cascade.on_forgotten(gone)
