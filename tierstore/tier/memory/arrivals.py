"""Slots that are reserved and cannot be read yet."""

from collections.abc import Iterable, Sequence
from itertools import repeat

from tierstore.key import OffloadKey
from tierstore.tier.memory.refusal import refusal_of_first, require_distinct

__all__ = ["Arrivals"]

_NO_SLOT = -1


class Arrivals:
    """Slots by the key that arrives in them, and detached slots, which have no key.

    Calls that break a precondition raise `ValueError` and change nothing; `what` names the call.
    """

    __slots__ = ("_detached", "arriving")

    def __init__(self) -> None:
        self.arriving: dict[OffloadKey, int] = {}
        """Slots that have a key; only to be read."""
        self._detached: set[int] = set()

    def __len__(self) -> int:
        """Return how many slots are reserved, with a key or without."""
        return len(self.arriving) + len(self._detached)

    @property
    def detached_count(self) -> int:
        """How many slots are reserved under no key."""
        return len(self._detached)

    def slots(self) -> list[int]:
        """Return all reserved slots."""
        return [*self.arriving.values(), *self._detached]

    def begin(self, keys: Sequence[OffloadKey], slots: Iterable[int]) -> None:
        """Let new keys arrive in slots."""
        self.arriving.update(zip(keys, slots, strict=True))

    def end(self, what: str, keys: Sequence[OffloadKey]) -> list[int]:
        """Let keys arrive no longer; return their slots.

        Raises:
            ValueError: a key came twice or is not arriving.
        """
        arriving = self.arriving
        slots = list(map(arriving.pop, keys, repeat(_NO_SLOT)))
        if _NO_SLOT in slots:
            # Put them back before naming the key: a repeated key popped its slot only once.
            popped = zip(keys, slots, strict=True)
            arriving.update((key, slot) for key, slot in popped if slot != _NO_SLOT)
            require_distinct(what, keys)
            raise refusal_of_first(what, "is not arriving", keys, lambda key: key not in arriving)
        return slots

    def detach(self, what: str, keys: Sequence[OffloadKey]) -> list[int]:
        """Take the keys from their slots; return these, which stay reserved.

        Raises:
            ValueError: a key came twice or is not arriving.
        """
        slots = self.end(what, keys)
        self._detached.update(slots)
        return slots

    def end_detachment(self, what: str, slots: Sequence[int]) -> None:
        """Reserve detached slots no longer.

        Raises:
            ValueError: a slot came twice or is not detached.
        """
        if len(set(slots)) != len(slots) or not self._detached.issuperset(slots):
            raise ValueError(f"{what}: {list(slots)} are not all detached; nothing was changed")
        self._detached.difference_update(slots)
