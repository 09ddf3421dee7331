"""Chunks from before a reset that transfers still hold."""

from collections.abc import Iterable, Sequence

from tierstore.key import OffloadKey
from tierstore.tier.cascade import Cascade
from tierstore.tier.memory.primary import PrimaryTier

__all__ = ["StaleChunks"]


class StaleChunks:
    """They are neither found nor used, and forgotten when their last transfer ends. One thread."""

    def __init__(self, primary: PrimaryTier, cascades: Sequence[Cascade]) -> None:
        """Share the tiers, which are told of what is forgotten."""
        self._primary = primary
        self._cascades = cascades
        self.keys: set[OffloadKey] = set()
        """A plain set, the same one always: to ask whether it is empty costs no call."""

    def add(self, keys: Iterable[OffloadKey]) -> None:
        """Make chunks that transfers hold unreachable."""
        self.keys.update(keys)

    def take_arrived(self, keys: Sequence[OffloadKey]) -> set[int]:
        """Return the indices of stale chunks among some that have arrived; they are stale no more.

        The caller drops them.
        """
        indices = {i for i, key in enumerate(keys) if key in self.keys}
        self.keys.difference_update(keys)
        return indices

    def forget_released(self) -> None:
        """Forget those that no transfer holds any more."""
        if self.keys:
            arriving = self._primary.arriving.keys()
            held = self._primary.discard(self.keys - arriving)
            gone = self.keys - arriving - set(held)
            self.keys -= gone
            for cascade in self._cascades:
                cascade.on_forgotten(gone)
