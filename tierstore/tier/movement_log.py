"""Which chunks entered and left the tiers, in order: the source of KV events.

    reserved      arriving   then `describe`, by the engine, which knows what the chunk holds
    committed     came       to the primary tier, with its description
    recorded      recorded   in a secondary tier; the chunk is then still in the primary tier
    dropped       lost       it never arrived
    evicted       left       the primary tier; its description is forgotten
    erased        erased     its record was evicted or removed; it may be another engine's record

A description is kept while its chunk is arriving or resident, so there are at most as many
descriptions as slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.key import OffloadKey
from tierstore.policy.small_tables import small_tables

__all__ = ["Movement", "MovementLog"]

_DESCRIBED_COUNT = 1 << 17


@dataclass(frozen=True, slots=True)
class Movement:
    """Chunks that entered or left a tier together."""

    keys: tuple[OffloadKey, ...]
    """Of one prefix, head first, if they entered."""
    is_there: bool
    tier_name: str | None = None
    """The secondary tier; None: the primary tier."""
    descriptions: tuple[object, ...] = ()
    """The description of each chunk, or None; empty for erased records."""


class MovementLog:
    """Changes in the order in which they happened. One thread.

    Movements are kept until `take` is called: a reader has to call it at every step.
    """

    def __init__(self) -> None:
        self._changes: list[Movement] = []
        self._undescribed: dict[OffloadKey, None] = {}
        self._descriptions: list[dict[OffloadKey, object]] = small_tables(_DESCRIBED_COUNT)
        """By the last byte of the key."""
        self._is_stopped = False

    def stop(self) -> None:
        """Stop logging, and discard the log: there is no reader."""
        self._is_stopped = True
        self._changes.clear()
        self._undescribed.clear()
        self._descriptions = small_tables(_DESCRIBED_COUNT)

    def arriving(self, keys: Sequence[OffloadKey]) -> None:
        """Note chunks whose slots were just reserved."""
        if not self._is_stopped:
            self._undescribed.update(dict.fromkeys(keys))

    def take_undescribed(self) -> list[OffloadKey]:
        """Return the chunks that were reserved since the last call and are still arriving."""
        taken = list(self._undescribed)
        self._undescribed.clear()
        return taken

    def describe(self, key: OffloadKey, description: object) -> None:
        """Keep what a chunk of `take_undescribed` holds."""
        self._descriptions[key[-1]][key] = description

    def lost(self, keys: Sequence[OffloadKey]) -> None:
        """Note chunks that were arriving, but never arrived."""
        for key in keys:
            self._undescribed.pop(key, None)
            self._descriptions[key[-1]].pop(key, None)

    def came(self, keys: Sequence[OffloadKey]) -> None:
        """Note chunks that can be loaded from the primary tier from now on."""
        if keys:
            self._came(keys, None)

    def left(self, keys: Sequence[OffloadKey]) -> None:
        """Note chunks that can no longer be loaded from the primary tier."""
        if keys:
            tables = self._descriptions
            known = tuple(tables[key[-1]].pop(key, None) for key in keys)
            self._note(Movement(tuple(keys), is_there=False, descriptions=known))

    def recorded(self, tier_name: str, keys: Sequence[OffloadKey]) -> None:
        """Note resident chunks that a secondary tier also has from now on."""
        if keys:
            self._came(keys, tier_name)

    def erased(self, tier_name: str, keys: Sequence[OffloadKey]) -> None:
        """Note records that a secondary tier has lost, of any namespace."""
        if keys:
            self._note(Movement(tuple(keys), is_there=False, tier_name=tier_name))

    def take(self) -> list[Movement]:
        """Return the changes since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def _came(self, keys: Sequence[OffloadKey], tier_name: str | None) -> None:
        tables = self._descriptions
        known = tuple(tables[key[-1]].get(key) for key in keys)
        self._note(Movement(tuple(keys), is_there=True, tier_name=tier_name, descriptions=known))

    def _note(self, change: Movement) -> None:
        if not self._is_stopped:
            self._changes.append(change)
