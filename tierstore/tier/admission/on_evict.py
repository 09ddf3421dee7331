"""A chunk goes down when it is the next to leave memory."""

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet

from tierstore.key import OffloadKey
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.tier.admission.admitted import AdmittedChunks

__all__ = ["OnEvict"]


class OnEvict:
    """Admits victims that the tier has not been asked for yet."""

    needs_use = False
    admits_arrivals = False
    admits_victims = True

    def __init__(self) -> None:
        self._admitted = AdmittedChunks()

    def on_resident(
        self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE
    ) -> Sequence[OffloadKey]:
        """Demote none (`Admission.on_resident`)."""
        return ()

    def on_touched(
        self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE
    ) -> Sequence[OffloadKey]:
        """Demote none (`Admission.on_touched`)."""
        return ()

    def on_victims(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Demote those that are not admitted yet (`Admission.on_victims`)."""
        return self._admitted.missing(keys)

    def on_admitted(self, keys: Sequence[OffloadKey]) -> None:
        """Do not ask for them again (`Admission.on_admitted`)."""
        self._admitted.add(keys)

    def on_promoted(self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE) -> None:
        """Do not ask for them again (`Admission.on_promoted`)."""
        self._admitted.add(keys)

    def on_evicted(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many left before they were asked for (`Admission.on_evicted`)."""
        lost_count = len(self._admitted.missing(keys))
        self._admitted.discard(keys)
        return lost_count

    def on_withdrawn(self, keys: Collection[OffloadKey]) -> None:
        """Ask for them again, if they are among the victims (`Admission.on_withdrawn`)."""
        self._admitted.discard(keys)

    def on_records_lost(self, queued: AbstractSet[OffloadKey]) -> None:
        """Ask for all others again, as victims (`Admission.on_records_lost`)."""
        self._admitted.keep(queued)

    def reset(self, queued: AbstractSet[OffloadKey]) -> None:
        """Forget all others (`Admission.reset`)."""
        self._admitted.keep(queued)

    def admitted(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those that were asked for, or came from the tier (`Admission.admitted`)."""
        return self._admitted.present(keys)
