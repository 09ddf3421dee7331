"""What a secondary tier's write-behind asks of an admission."""

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from tierstore.key import OffloadKey
from tierstore.policy.use import UNKNOWN_USE, UseContext

__all__ = ["Admission"]


class Admission(Protocol):
    """The rule by which chunks go down into one secondary tier. One thread, no lock, no I/O.

    It is told what happens to chunks in memory, and answers with those that should be demoted now.
    The write-behind queue may be full: `on_admitted` says which of them it has taken. An admission
    keeps what it has to remember by itself; what it remembers of chunks that are not in memory is
    bounded.

        absent -> on_resident -> in memory -> on_touched, on_victims -> on_evicted -> absent
               -> on_promoted ->           -> on_withdrawn (reset)  ->

    A chunk is *admitted* from `on_admitted` or `on_promoted` until it leaves memory or is
    withdrawn: the tier has it, is writing it, or refused it and will be asked again. An admission
    need not ask for it. Every call is a batch; keys of one prefix come head first, each once.
    """

    needs_use: bool
    """Whether it goes by the uses that it is told; if no part does, all are `UNKNOWN_USE`."""
    admits_arrivals: bool
    """Whether each chunk is to be demoted when it becomes resident.

    The embedded store then waits for room in the write queue before it takes chunks.
    """
    admits_victims: bool
    """Whether chunks are to be demoted when they are the next to leave memory.

    The tiers then call `on_victims` before they evict, and demotes that find no room in the write
    queue are not counted as dropped: they are asked for again until they find it.
    """

    def on_resident(
        self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE
    ) -> Sequence[OffloadKey]:
        """Return which of some chunks to demote that became resident, not from this tier."""

    def on_touched(
        self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE
    ) -> Sequence[OffloadKey]:
        """Return which of some resident chunks to demote that were used again."""

    def on_victims(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return which of some resident chunks to demote that leave next, the first one first."""

    def on_admitted(self, keys: Sequence[OffloadKey]) -> None:
        """Take note of chunks that the tier is asked to record, now or when it can."""

    def on_promoted(self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE) -> None:
        """Take note of chunks that became resident from this very tier: it has them."""

    def on_evicted(self, keys: Sequence[OffloadKey]) -> int:
        """Take note of chunks that left memory.

        Returns how many of them the rule wanted in the tier, and the tier was never asked for.
        """

    def on_withdrawn(self, keys: Collection[OffloadKey]) -> None:
        """Take note of chunks whose records are gone, or that were forgotten with their bytes."""

    def on_records_lost(self, queued: AbstractSet[OffloadKey]) -> None:
        """Take note that the tier's records are gone; `queued` chunks are still being written."""

    def reset(self, queued: AbstractSet[OffloadKey]) -> None:
        """Forget every chunk but those that are still being written."""

    def admitted(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return which of some resident chunks are admitted."""
