"""The log of the index in memory: as few sorted runs."""

from collections.abc import Callable
from dataclasses import dataclass

from tierstore.catalog.index.head import Head
from tierstore.catalog.index.run import Run

__all__ = ["Tail"]

_GROWTH = 2
"""A run is at least so many times larger than the next younger one, so that they are few."""


@dataclass(frozen=True, slots=True)
class Tail:
    """All ops of the log rows `first_number <= number <= last_number`, and maybe older ones.

    Immutable: transactions of several threads and ages may hold several of them.
    """

    identity: int
    first_number: int
    last_number: int
    runs: tuple[Run, ...] = ()
    """The oldest first."""

    def covers(self, head: Head) -> bool:
        """Return whether it has all that a transaction with this head may ask for."""
        return (
            self.identity == head.identity
            and self.first_number <= head.first_number
            and self.last_number >= head.last_number
        )

    def up_to(self, head: Head, read: Callable[[int], Run]) -> "Tail":
        """Return a tail for `head`, with the rows that this one lacks read from the log."""
        first = self.first_number
        runs = list(self.runs)
        following = self.last_number + 1
        if (
            self.identity != head.identity
            or not first <= head.first_number <= following <= head.next_number
        ):
            first = following = head.first_number
            runs.clear()
        for number in range(following, head.next_number):
            runs.append(read(number))
            _shorten(runs, head.first_number)
        first = max([first, *(run.first_number for run in runs[:1])])
        return Tail(head.identity, first, head.last_number, tuple(runs))


def _shorten(runs: list[Run], first_number: int) -> None:
    while len(runs) > 1 and len(runs[-2].hashes) < _GROWTH * len(runs[-1].hashes):
        younger = runs.pop()
        runs[-1] = runs[-1].followed_by(younger, first_number)
