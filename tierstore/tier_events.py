"""What a secondary tier tells its user: what became of requests, and a glance at its contents.

    request_places -> Placed -> (the data plane writes) -> commit -> Committed
                   -> Refused
    at any time       Evicted    records went to make room
                      Freed      their bytes are to be given back

They are the vocabulary of `tier.secondary` and lie below the catalog, which makes them for a tier
on this machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from tierstore.key import OffloadKey
from tierstore.transfer import FailureReason, PageRun, Place

__all__ = [
    "Committed",
    "Evicted",
    "Freed",
    "Placed",
    "Refused",
    "SecondaryEvent",
    "SecondaryStats",
]


@dataclass(frozen=True, slots=True)
class Placed:
    """Places are reserved for these keys of a request; keys already recorded are left out."""

    ticket: int
    keys: tuple[OffloadKey, ...]
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """No place for a request: it is too large for the tier, or the tier failed."""

    ticket: int
    reason: FailureReason


class _Released(Protocol):
    """Pages of segments, and whole segments, that hold no record any more."""

    @property
    def runs(self) -> npt.NDArray[np.void]: ...
    @property
    def empty_segments(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Freed:
    """Bytes to give back to the file system on every rank; confirm with `released`.

    A tier whose store gives bytes back by itself never says so.
    """

    release_id: int
    runs: tuple[PageRun, ...]
    empty_segments: tuple[int, ...]

    @classmethod
    def of(cls, release_id: int, released: _Released) -> Self:
        """Return what a row of a catalog says."""
        runs = tuple(
            PageRun(segment=segment, first_page=first_page, page_count=page_count)
            for segment, first_page, page_count in released.runs.tolist()
        )
        return cls(release_id, runs, tuple(released.empty_segments))


@dataclass(frozen=True, slots=True)
class Evicted:
    """Records that were evicted, whether or not their bytes can be given back yet."""

    keys: tuple[OffloadKey, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """A commit was carried out: its records can be located now, except the failed ones."""

    ticket: int
    reason: FailureReason | None = field(default=None, compare=False)
    """Why none of its records can be located: the tier failed. None: they can be."""


SecondaryEvent: TypeAlias = Placed | Refused | Evicted | Freed | Committed


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondaryStats:
    """A glance at one tier."""

    record_count: int
    payload_bytes: int
    """Of the records, on one rank."""
    charged_bytes: int
    """Everything on disk that counts against the capacity, the catalog included."""
    capacity_bytes: int
    evicted_count: int
    is_open: bool = True
    """False: the tier's device fails, so its contents are unknown; the counts are zero."""

    @classmethod
    def unknown(cls, capacity_bytes: int) -> Self:
        """Return what can be said of a tier that is not open."""
        return cls(
            record_count=0,
            payload_bytes=0,
            charged_bytes=0,
            capacity_bytes=capacity_bytes,
            evicted_count=0,
            is_open=False,
        )
