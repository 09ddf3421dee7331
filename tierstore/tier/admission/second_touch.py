"""A chunk goes down when it is used for the second time."""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet

from tierstore.key import OffloadKey
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.tier.admission.admitted import AdmittedChunks

__all__ = ["ONCE_USED_MAX", "SecondTouch"]

ONCE_USED_MAX = 1 << 16
"""Chunks that left memory after one use and are remembered; beyond, the oldest are forgotten."""


class SecondTouch:
    """Admits chunks at a second use, even if they left memory and were stored again in between."""

    needs_use = False
    admits_arrivals = False
    admits_victims = False

    def __init__(self, *, once_used_max: int = ONCE_USED_MAX) -> None:
        """Remember so many chunks that left memory after one use."""
        self._once_used_max = once_used_max
        self._once_used: OrderedDict[OffloadKey, None] = OrderedDict()
        """Chunks that left memory without a second use, the oldest first."""
        self._admitted = AdmittedChunks()

    def on_resident(
        self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE
    ) -> Sequence[OffloadKey]:
        """Demote those that were in memory before: they are used again now."""
        again = [key for key in keys if key in self._once_used]
        for key in again:
            del self._once_used[key]
        return again

    def on_touched(
        self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE
    ) -> Sequence[OffloadKey]:
        """Demote those that are not admitted yet (`Admission.on_touched`)."""
        return self._admitted.missing(keys)

    def on_victims(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Demote none (`Admission.on_victims`)."""
        return ()

    def on_admitted(self, keys: Sequence[OffloadKey]) -> None:
        """Do not ask for them again (`Admission.on_admitted`)."""
        self._admitted.add(keys)

    def on_promoted(self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE) -> None:
        """Do not ask for them again (`Admission.on_promoted`)."""
        self._admitted.add(keys)

    def on_evicted(self, keys: Sequence[OffloadKey]) -> int:
        """Remember those that were used once; the rule wanted none of them in the tier."""
        self._once_used.update(dict.fromkeys(self._admitted.missing(keys)))
        while len(self._once_used) > self._once_used_max:
            self._once_used.popitem(last=False)
        self._admitted.discard(keys)
        return 0

    def on_withdrawn(self, keys: Collection[OffloadKey]) -> None:
        """Ask for them again at their next use (`Admission.on_withdrawn`)."""
        self._admitted.discard(keys)

    def on_records_lost(self, queued: AbstractSet[OffloadKey]) -> None:
        """Ask for all others again at their next use (`Admission.on_records_lost`)."""
        self._admitted.keep(queued)

    def reset(self, queued: AbstractSet[OffloadKey]) -> None:
        """Forget all others, and what was used once (`Admission.reset`)."""
        self._admitted.keep(queued)
        self._once_used.clear()

    def admitted(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those that were asked for, or came from the tier (`Admission.admitted`)."""
        return self._admitted.present(keys)
