"""When chunks in memory whose demote failed are asked for again."""

from collections.abc import Sequence

from tierstore.key import OffloadKey
from tierstore.tier.health.tier_health import TRIAL_CHUNKS, TierHealth
from tierstore.tier.secondary import SecondaryTier
from tierstore.tier.write_behind.crowding import Crowding
from tierstore.tier.write_behind.failed_demotes import FailedDemotes

__all__ = ["Retries"]


class Retries:
    """What failed in one tier, and the times to try it again. One thread.

    All of it is tried when the tier is in use again and at a flush; a few chunks as a trial of a
    tier that is out of use; more of them when writes succeed (`FailedDemotes`).
    """

    def __init__(self, secondary: SecondaryTier, health: TierHealth) -> None:
        """Share the tier; `health` says whether it is in use."""
        self._secondary = secondary
        self._health = health
        self.failed = FailedDemotes()
        """The chunks in memory that the tier should have and has not."""
        self.crowding = Crowding(secondary)
        """How far the tier has evicted for chunks that found no room in one piece."""
        self._returned = (0, secondary.owner)
        """How often it was in use again, as which owner, when what failed was last asked for."""

    @property
    def is_under_way(self) -> bool:
        """Whether what failed is asked for again, or will be by itself soon."""
        if not self.failed or not self._health.may_write_soon:
            return False
        return self.failed.is_retrying or self._is_back() or not self._health.is_writable

    @property
    def is_due(self) -> bool:
        """Whether a trial comes, is under way, or has just succeeded."""
        return bool(self.failed) and (self._is_back() or not self._health.is_writable)

    def begin(self) -> None:
        """Ask for all of it again, as room comes; a tier that is out of use is tried at once."""
        self._health.retry_now()
        self._begin_all()

    def begin_if_back(self) -> None:
        """Ask for all of it again if the tier is in use again since it was last asked for."""
        if self._is_back():
            self._returned = (self._health.write_return_count, self._secondary.owner)
            self._begin_all()

    def begin_if_due(self, *, is_queue_empty: bool) -> None:
        """Begin a trial of a tier that is out of use, or ask for what its queue had no room for."""
        health = self._health
        if health.allows_write_trial or (health.is_write_failing and is_queue_empty):
            self.failed.begin_trial(TRIAL_CHUNKS)
        elif health.has_stalled and is_queue_empty and health.is_writable:
            health.forget_stall()
            self.failed.retry_unasked()

    def take(self, chunk_count_max: int, *, is_releasing: bool) -> Sequence[OffloadKey] | None:
        """Return the chunks to ask for again now.

        None: there are none, or the tier is making way for them and they have to wait.
        """
        if not self.failed.is_retrying or self.crowding.is_making_way(is_releasing=is_releasing):
            return None
        return self.failed.take(chunk_count_max)

    def _begin_all(self) -> None:
        self.failed.begin_retry()
        self.crowding.end()

    def _is_back(self) -> bool:
        """Return whether the tier is in use again and what failed was not asked for since."""
        returned = (self._health.write_return_count, self._secondary.owner)
        return returned != self._returned and self._health.is_writable
