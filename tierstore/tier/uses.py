"""Tells every tier that chunks in memory were used again."""

from collections.abc import Sequence

from tierstore.key import OffloadKey
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.tier.cascade import Cascade
from tierstore.tier.memory.primary import PrimaryTier
from tierstore.tier.secondary import SecondaryTier

__all__ = ["Uses"]


class Uses:
    """Passes uses to the memory tier, to each tier's admission, and to the records on disk."""

    def __init__(
        self,
        primary: PrimaryTier,
        cascades: Sequence[Cascade],
        secondaries: Sequence[SecondaryTier],
    ) -> None:
        """Share the tiers; secondary tiers in their order."""
        self._primary = primary
        self._cascades = cascades
        self._secondaries = secondaries

    def touch(self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE) -> None:
        """Record a use of resident chunks of one prefix, head first."""
        tail_first = keys[::-1]
        self._primary.touch(tail_first, use=use)
        self._tell(keys, tail_first, use)

    def release(self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE) -> None:
        """Unpin chunks of one prefix, head first, and record a use of them."""
        tail_first = keys[::-1]
        self._primary.release(tail_first, use=use)
        self._tell(keys, tail_first, use)

    def _tell(
        self, keys: Sequence[OffloadKey], tail_first: Sequence[OffloadKey], use: UseContext
    ) -> None:
        for cascade in self._cascades:
            cascade.on_touched(keys, use)
        # Touch the record at once, although it is not read. Touching it when its chunk leaves
        # memory would be cheaper, but after a restart the hot prefixes would be unknown.
        for secondary in self._secondaries:
            secondary.touch(tail_first, use=use)
