"""What urgent requests use goes down."""

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet

from tierstore.key import OffloadKey
from tierstore.policy.use import UNKNOWN_USE, UseContext

__all__ = ["UrgentOnly"]


class UrgentOnly:
    """Admits chunks that a request of at most some priority stores or uses. See `Admission`.

    As in vLLM, a smaller number is more urgent, and 0 is what requests have that do not say.
    """

    needs_use = True
    admits_arrivals = False
    admits_victims = False

    def __init__(self, *, priority_max: int = 0) -> None:
        """`priority_max`: less urgent requests demote nothing."""
        if not isinstance(priority_max, int):
            raise TypeError(f"priority_max: expected a whole number, got {priority_max!r}")
        self._priority_max = priority_max
        self._admitted: set[OffloadKey] = set()

    def on_resident(
        self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE
    ) -> Sequence[OffloadKey]:
        """Demote what an urgent request has stored."""
        return keys if use.priority <= self._priority_max else ()

    def on_touched(
        self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE
    ) -> Sequence[OffloadKey]:
        """Demote what an urgent request uses, unless it is admitted."""
        if use.priority > self._priority_max:
            return ()
        return [key for key in keys if key not in self._admitted]

    def on_victims(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Demote none: urgent requests have asked for theirs."""
        del keys
        return ()

    def on_admitted(self, keys: Sequence[OffloadKey]) -> None:
        """Do not ask for them again."""
        self._admitted.update(keys)

    def on_promoted(self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE) -> None:
        """Do not ask for them again, whoever promoted them."""
        del use
        self._admitted.update(keys)

    def on_evicted(self, keys: Sequence[OffloadKey]) -> int:
        """Forget them; all that were wanted were asked for."""
        self._admitted.difference_update(keys)
        return 0

    def on_withdrawn(self, keys: Collection[OffloadKey]) -> None:
        """Ask for them again at their next urgent use."""
        self._admitted.difference_update(keys)

    def on_records_lost(self, queued: AbstractSet[OffloadKey]) -> None:
        """Ask for all others again at their next urgent use."""
        self._admitted &= queued

    def reset(self, queued: AbstractSet[OffloadKey]) -> None:
        """Forget all others."""
        self._admitted &= queued

    def admitted(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those that were asked for, or came from the tier."""
        return [key for key in keys if key in self._admitted]
