"""The chunks in memory that a tier need not be asked for again."""

from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet

from tierstore.key import OffloadKey

__all__ = ["AdmittedChunks"]


class AdmittedChunks:
    """Resident chunks that a tier has, is writing, or refused and will be asked for again.

    For admissions that see a chunk more than once while it is in memory.
    """

    def __init__(self) -> None:
        self._keys: set[OffloadKey] = set()

    def add(self, keys: Iterable[OffloadKey]) -> None:
        """Take chunks that were asked for, or came from the tier."""
        self._keys.update(keys)

    def missing(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of some chunks that are not admitted."""
        admitted = self._keys
        return [key for key in keys if key not in admitted]

    def present(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of some chunks that are admitted."""
        admitted = self._keys
        return [key for key in keys if key in admitted]

    def discard(self, keys: Collection[OffloadKey]) -> None:
        """Drop chunks that left memory or have lost their records; others are ignored."""
        self._keys.difference_update(keys)

    def keep(self, keys: AbstractSet[OffloadKey]) -> None:
        """Drop all chunks but these."""
        self._keys &= keys
