"""Ops of successive log rows, sorted by hash so that they can be searched."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from tierstore.catalog.index.entries import Flags
from tierstore.catalog.index.hashes import Numbers

__all__ = ["Run"]

_ONE = np.uint64(1)


@dataclass(frozen=True, slots=True)
class Run:
    """Additions and removals by hash; those of equal hashes in the order of time. Immutable."""

    hashes: Numbers
    clusters: Numbers
    stamps: Numbers
    """Twice the number of the log row; and one for what was added."""
    first_number: int
    """Ops of older rows are left out, or were before."""

    @classmethod
    def of(cls, hashes: Numbers, clusters: Numbers, stamps: Numbers, first_number: int) -> Self:
        """Return ops that are given in the order of time."""
        order = hashes.argsort(kind="stable")
        return cls(hashes[order], clusters[order], stamps[order], first_number)

    def followed_by(self, younger: "Run", first_number: int) -> "Run":
        """Return the ops of both, without those of rows before `first_number`."""
        hashes = np.concatenate((self.hashes, younger.hashes))
        clusters = np.concatenate((self.clusters, younger.clusters))
        stamps = np.concatenate((self.stamps, younger.stamps))
        if self.first_number >= first_number:
            return Run.of(hashes, clusters, stamps, self.first_number)
        is_needed = stamps >= np.uint64(first_number << 1)
        return Run.of(hashes[is_needed], clusters[is_needed], stamps[is_needed], first_number)

    def between(self, low: int, end: int, after: int) -> "Run":
        """Return the ops of hashes in `low <= hash < end`, of rows with `number > after`."""
        start = self.hashes.searchsorted(np.uint64(low))
        stop = len(self.hashes)
        if end < 1 << 64:
            stop = int(self.hashes.searchsorted(np.uint64(end)))
        stamps = self.stamps[start:stop]
        is_wanted = stamps > np.uint64(after << 1 | 1)
        return Run(
            self.hashes[start:stop][is_wanted],
            self.clusters[start:stop][is_wanted],
            stamps[is_wanted],
            after + 1,
        )

    def is_added(self) -> Flags:
        """Return which ops are additions."""
        return (self.stamps & _ONE).astype(np.bool_)
