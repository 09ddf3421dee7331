"""What became resident in the primary tier, and what left it: for those who route requests."""

from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.key import OffloadKey

__all__ = ["ResidencyChange", "ResidencyLog"]


@dataclass(frozen=True, slots=True)
class ResidencyChange:
    """Chunks that came or went together."""

    keys: tuple[OffloadKey, ...]
    is_resident: bool


class ResidencyLog:
    """Changes in the order in which they happened. One thread.

    Kept until `take` is called, so only who takes them at every step should ask for a log.
    """

    def __init__(self) -> None:
        self._changes: list[ResidencyChange] = []

    def came(self, keys: Sequence[OffloadKey]) -> None:
        """Note chunks that can be loaded from the primary tier from now on."""
        self._note(keys, is_resident=True)

    def left(self, keys: Sequence[OffloadKey]) -> None:
        """Note chunks that cannot any more."""
        self._note(keys, is_resident=False)

    def take(self) -> list[ResidencyChange]:
        """Return the changes since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def _note(self, keys: Sequence[OffloadKey], *, is_resident: bool) -> None:
        if keys:
            self._changes.append(ResidencyChange(tuple(keys), is_resident))
