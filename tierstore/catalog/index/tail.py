"""The log of the index in memory: as few sorted runs."""

from collections.abc import Callable
from dataclasses import dataclass

from tierstore.catalog.index.head import Head
from tierstore.catalog.index.log_row import LogRow
from tierstore.catalog.index.run import Run
from tierstore.errors import CatalogDamagedError

__all__ = ["Tail", "append_run", "merged_run"]

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
    version: int = 0
    """Checksum of the last row: one that was not committed may have had its number. 0: unknown."""
    runs: tuple[Run, ...] = ()
    """The oldest first."""

    def covers(self, head: Head) -> bool:
        """Return whether it has all that a transaction with this head may ask for."""
        return (
            self.identity == head.identity
            and self.first_number <= head.first_number
            and (
                self.last_number > head.last_number
                or (self.last_number == head.last_number and self.version == head.log_version)
            )
        )

    def up_to(self, head: Head, read: Callable[[int], LogRow]) -> "Tail":
        """Return a tail for `head`, with the rows that this one lacks read from the log.

        Raises:
            CatalogDamagedError: rows contradict each other.
        """
        if (
            self.identity == head.identity
            and self.first_number <= head.first_number <= self.last_number + 1
            and self.last_number < head.last_number
        ):
            tail = _with_rows(self, head, read)
            if tail is not None:
                return tail
        empty = Tail(head.identity, head.first_number, head.first_number - 1)
        tail = _with_rows(empty, head, read)
        if tail is None:
            raise CatalogDamagedError("rows in the log of the index do not follow each other")
        return tail


def _with_rows(tail: Tail, head: Head, read: Callable[[int], LogRow]) -> Tail | None:
    """Return None if a row does not follow the one before, or is not that of the head."""
    runs, version = list(tail.runs), tail.version
    for number in range(tail.last_number + 1, head.next_number):
        row = read(number)
        if version not in {row.previous, 0}:
            return None
        append_run(runs, row.run, head.first_number)
        version = row.version
    if version not in {head.log_version, 0}:
        return None
    first = max([tail.first_number, *(run.first_number for run in runs[:1])])
    return Tail(head.identity, first, head.last_number, head.log_version, tuple(runs))


def append_run(runs: list[Run], run: Run, first_number: int = 0) -> None:
    """Append younger ops; merged runs lose the ops of rows before `first_number`."""
    runs.append(run)
    while len(runs) > 1 and len(runs[-2].hashes) < _GROWTH * len(runs[-1].hashes):
        younger = runs.pop()
        runs[-1] = runs[-1].followed_by(younger, first_number)


def merged_run(runs: list[Run]) -> Run:
    """Return all ops of at least one run as one."""
    while len(runs) > 1:
        younger = runs.pop()
        runs[-1] = runs[-1].followed_by(younger, 0)
    return runs[0]
