"""The chunks in memory that a tier need not be asked for again."""

from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet

from tierstore.key import OffloadKey
from tierstore.policy.small_tables import small_tables

__all__ = ["AdmittedChunks"]

_ADMITTED_COUNT = 1 << 17


class AdmittedChunks:
    """Resident chunks that a tier has, is writing, or refused and will be asked for again.

    For admissions that see a chunk more than once while it is in memory.
    """

    def __init__(self) -> None:
        self._tables: list[dict[OffloadKey, None]] = small_tables(_ADMITTED_COUNT)
        """By the last byte of the key."""

    def add(self, keys: Iterable[OffloadKey]) -> None:
        """Take chunks that were asked for, or came from the tier."""
        tables = self._tables
        for key in keys:
            tables[key[-1]][key] = None

    def missing(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of some chunks that are not admitted."""
        tables = self._tables
        return [key for key in keys if key not in tables[key[-1]]]

    def present(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of some chunks that are admitted."""
        tables = self._tables
        return [key for key in keys if key in tables[key[-1]]]

    def discard(self, keys: Collection[OffloadKey]) -> None:
        """Drop chunks that left memory or have lost their records; others are ignored."""
        tables = self._tables
        for key in keys:
            tables[key[-1]].pop(key, None)

    def keep(self, keys: AbstractSet[OffloadKey]) -> None:
        """Drop all chunks but these."""
        kept = self.present(list(keys))
        self._tables = small_tables(_ADMITTED_COUNT)
        self.add(kept)
