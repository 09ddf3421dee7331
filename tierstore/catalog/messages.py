"""What goes into a catalog's mailbox, and what comes out of it."""

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self, TypeVar

from tierstore.catalog.rows import PendingRow
from tierstore.key import Namespace, OffloadKey
from tierstore.transfer import FailureReason, PageRun, Place

__all__ = [
    "BeginEpoch",
    "CommitTicket",
    "Committed",
    "Evict",
    "Evicted",
    "ForgetNamespace",
    "Freed",
    "Leave",
    "LosePayload",
    "Operation",
    "Placed",
    "Refused",
    "ReleaseDone",
    "RemoveKeys",
    "RequestPlaces",
    "SecondaryEvent",
    "SweepGarbage",
    "TouchKeys",
    "take_all",
]


Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Placed:
    """Places are reserved for these keys of a request; keys already recorded are left out."""

    ticket: int
    keys: tuple[OffloadKey, ...]
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """No place for a request: it is too large for the tier, or the catalog failed."""

    ticket: int
    reason: FailureReason


@dataclass(frozen=True, slots=True)
class Freed:
    """Bytes to give back to the file system on every rank; confirm with `released`."""

    release_id: int
    runs: tuple[PageRun, ...]
    empty_segments: tuple[int, ...]

    @classmethod
    def of(cls, release_id: int, row: PendingRow) -> Self:
        """Return what a row of the catalog says."""
        runs = tuple(
            PageRun(segment=segment, first_page=first_page, page_count=page_count)
            for segment, first_page, page_count in row.runs.tolist()
        )
        return cls(release_id, runs, tuple(row.empty_segments))


@dataclass(frozen=True, slots=True)
class Evicted:
    """Records that were evicted, whether or not their bytes can be given back yet."""

    keys: tuple[OffloadKey, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """A commit was carried out: its records can be located now, except the failed ones."""

    ticket: int
    reason: FailureReason | None = field(default=None, compare=False)
    """Why none of its records can be located: the catalog failed. None: they can be."""


SecondaryEvent = Placed | Refused | Evicted | Freed | Committed


@dataclass(frozen=True, slots=True)
class RequestPlaces:
    """Reserve one place per key."""

    ticket: int
    keys: tuple[OffloadKey, ...]
    payload_bytes: int
    is_noted: bool = False
    """Whether those of the keys that are recorded were touched, or removed, already."""


@dataclass(frozen=True, slots=True)
class CommitTicket:
    """The records of a ticket were written, except the failed ones (None: all of them failed)."""

    ticket: int
    failed: frozenset[int] | None


@dataclass(frozen=True, slots=True)
class TouchKeys:
    """Records were used; their keys, tail first."""

    keys: tuple[OffloadKey, ...]


@dataclass(frozen=True, slots=True)
class RemoveKeys:
    """Records are worthless, and go."""

    keys: tuple[OffloadKey, ...]


@dataclass(frozen=True, slots=True)
class ReleaseDone:
    """The bytes of a `Freed` were given back on every rank."""

    release_id: int


@dataclass(frozen=True, slots=True)
class ForgetNamespace:
    """No record of a namespace is wanted any more."""

    namespace: Namespace


@dataclass(frozen=True, slots=True)
class BeginEpoch:
    """Records of this namespace will come, which only this process finds."""

    namespace: Namespace
    manifest_json: bytes


@dataclass(frozen=True, slots=True)
class LosePayload:
    """The files of these segments are gone: records made there until now are replaced on demand."""

    segments: frozenset[int]


@dataclass(frozen=True, slots=True)
class Evict:
    """Make room for the requests that wait and for those that come next."""

    page_count: int = 0
    """Pages of one rank that are evicted in any case."""


@dataclass(frozen=True, slots=True)
class SweepGarbage:
    """The writer is idle: remove some rows of forgotten namespaces."""


@dataclass(frozen=True, slots=True)
class Leave:
    """This process ends: it asks for nothing more."""


Operation = (
    RequestPlaces
    | CommitTicket
    | TouchKeys
    | RemoveKeys
    | ReleaseDone
    | ForgetNamespace
    | BeginEpoch
    | LosePayload
    | Evict
    | SweepGarbage
    | Leave
)


def take_all(events: deque[Item]) -> list[Item]:
    """Take all that is there now; another thread may take from it at the same time."""
    taken: list[Item] = []
    with suppress(IndexError):
        while True:
            taken.append(events.popleft())
    return taken
