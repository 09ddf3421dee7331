"""Records the next victims of the primary tier before their slots are needed."""

from collections.abc import Sequence

from tierstore.key import OffloadKey
from tierstore.tier.cascade import Cascade
from tierstore.tier.locator import Locator
from tierstore.tier.memory.primary import PrimaryTier
from tierstore.tier.stale import StaleChunks

__all__ = ["NextVictims"]

_AHEAD = 2
"""How many victims are recorded ahead, as a multiple of the last reservation's size. Recording at
eviction was rejected: a reservation would wait for a write."""


class NextVictims:
    """Asks tiers whose admission takes victims (`on_evict`) to record the next ones."""

    def __init__(
        self,
        primary: PrimaryTier,
        cascades: Sequence[Cascade],
        locator: Locator,
        stale: StaleChunks,
    ) -> None:
        """Share the tiers; stale chunks are never recorded."""
        self._primary = primary
        self._cascades = cascades
        self._locator = locator
        self._stale = stale.keys
        self._is_wanted = any(cascade.records_victims for cascade in cascades)

    def demote_for(self, tier_idx: int, group_idx: int, count: int) -> int:
        """Ask a tier to record the chunks that `count` new ones would evict.

        Returns how many of them are not recorded yet; with 0, they can be evicted without loss.
        Skips chunks that other tiers or loads have pinned: those stay in memory, however long a
        tier hangs, and others are evicted instead.
        """
        cascade = self._cascades[tier_idx]
        shortage = count - self._primary.free_count(group_idx)
        if shortage <= 0 or not cascade.records_victims:
            return 0
        victims = self._primary.victims(shortage, cascade.demotes.queue.in_flight)
        return cascade.record_victims([key for key in victims if key not in self._stale])

    def demote_ahead(self, group_idx: int, count: int) -> None:
        """Ask every tier to record the next victims; `count` is the last reservation's size."""
        if count and self._is_wanted:
            shortage = _AHEAD * count - self._primary.free_count(group_idx)
            self.demote_coldest(max(0, shortage))

    def demote_coldest(self, count: int) -> int:
        """Ask every tier to record the `count` coldest chunks; return how many are not recorded."""
        if not count or not self._is_wanted:
            return 0
        coldest = self._primary.coldest(count)
        if self._stale:
            coldest = [key for key in coldest if key not in self._stale]
        return sum(cascade.record_victims(coldest) for cascade in self._cascades)

    def demote_resident(self, tier_idx: int, keys: Sequence[OffloadKey]) -> int:
        """Ask a tier to record those of some chunks that are in memory.

        Returns how many of them are not recorded yet.
        """
        return self._cascades[tier_idx].record_victims(self._locator.resident(keys))
