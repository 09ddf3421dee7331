"""In which stretch of a queue each key lies."""

from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING

from tierstore.key import OffloadKey
from tierstore.policy.small_tables import small_tables

if TYPE_CHECKING:
    from tierstore.policy.key_queue import KeyQueue

__all__ = ["KeyIndex", "Stretch"]


class Stretch(dict[OffloadKey, int]):
    """Keys that came one after the other, oldest first, each with its number."""

    __slots__ = ("queue", "room")

    def __init__(self, queue: "KeyQueue", room: int) -> None:
        self.queue = queue
        self.room = room
        """How many keys may come yet. One that came and left counts: it leaves a hole, and beyond
        so many entries Python doubles the table."""


class KeyIndex:
    """The stretches of the keys of one queue or several; a key is in one of them.

    Keys that came together lie in one stretch, so most calls look up the first key here and all
    others there. Only keys in none are looked up one by one.
    """

    __slots__ = ("tables",)

    def __init__(self, key_count: int) -> None:
        """Make room for about so many keys."""
        self.tables: list[dict[OffloadKey, Stretch]] = small_tables(key_count)
        """By the last byte of the key. Queues set and delete entries."""

    def locate(self, keys: Sequence[OffloadKey]) -> list[int | None]:
        """Return the number of each key, None for those in no stretch."""
        if not keys:
            return []
        tables = self.tables
        stretch = tables[keys[0][-1]].get(keys[0])
        if stretch is not None:
            numbers = list(map(stretch.get, keys))
            if None not in numbers:
                return numbers
        elif len(keys) == 1 or not self.holds_any(keys):
            return [None] * len(keys)
        else:
            numbers = [None] * len(keys)
        for position, number in enumerate(numbers):
            if number is None:
                key = keys[position]
                stretch = tables[key[-1]].get(key)
                if stretch is not None:
                    numbers[position] = stretch[key]
        return numbers

    def holds_any(self, keys: Sequence[OffloadKey]) -> bool:
        """Return whether any of the keys is in a stretch."""
        tables = self.tables
        for key in keys:  # noqa: SIM110 - a generator takes twice the time
            if key in tables[key[-1]]:
                return True
        return False

    def holds_all(self, keys: Sequence[OffloadKey]) -> bool:
        """Return whether all of the keys are in stretches."""
        tables = self.tables
        if keys:
            stretch = tables[keys[0][-1]].get(keys[0])
            if stretch is None:
                return False
            if all(map(stretch.__contains__, keys)):
                return True
        for key in keys:  # noqa: SIM110 - as above
            if key not in tables[key[-1]]:
                return False
        return True

    def take(self, keys: Sequence[OffloadKey]) -> list[int | None]:
        """Take keys out of their stretches, and leave their entries here to the caller.

        Return their numbers; None for a key in no stretch, and for a key's places after its first.
        """
        if not keys:
            return []
        tables = self.tables
        stretch = tables[keys[0][-1]].get(keys[0])
        numbers: list[int | None]
        if stretch is None:
            numbers = [None] * len(keys)
        else:
            before = len(stretch)
            numbers = list(map(stretch.pop, keys, repeat(None)))
            stretch.queue.size -= before - len(stretch)
        if None in numbers:
            for position, number in enumerate(numbers):
                if number is None:
                    key = keys[position]
                    stretch = tables[key[-1]].get(key)
                    if stretch is not None and key in stretch:
                        numbers[position] = stretch.pop(key)
                        stretch.queue.size -= 1
        return numbers
