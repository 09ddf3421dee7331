"""Every chunk goes down when it becomes resident."""

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet

from tierstore.key import OffloadKey
from tierstore.policy.use import UNKNOWN_USE, UseContext

__all__ = ["WriteThrough"]


class WriteThrough:
    """Remembers nothing: a chunk in memory was asked for when it came, so all are admitted."""

    needs_use = False
    admits_arrivals = True
    admits_victims = False

    def on_resident(
        self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE
    ) -> Sequence[OffloadKey]:
        """Demote all of them (`Admission.on_resident`)."""
        return keys

    def on_touched(
        self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE
    ) -> Sequence[OffloadKey]:
        """Demote none (`Admission.on_touched`)."""
        return ()

    def on_victims(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Demote none (`Admission.on_victims`)."""
        return ()

    def on_admitted(self, keys: Sequence[OffloadKey]) -> None:
        """Remember nothing (`Admission.on_admitted`)."""

    def on_promoted(self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE) -> None:
        """Remember nothing (`Admission.on_promoted`)."""

    def on_evicted(self, keys: Sequence[OffloadKey]) -> int:
        """Return 0: all of them were asked for (`Admission.on_evicted`)."""
        return 0

    def on_withdrawn(self, keys: Collection[OffloadKey]) -> None:
        """Forget nothing (`Admission.on_withdrawn`)."""

    def on_records_lost(self, queued: AbstractSet[OffloadKey]) -> None:
        """Forget nothing (`Admission.on_records_lost`)."""

    def reset(self, queued: AbstractSet[OffloadKey]) -> None:
        """Forget nothing (`Admission.reset`)."""

    def admitted(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return all of them (`Admission.admitted`)."""
        return list(keys)
