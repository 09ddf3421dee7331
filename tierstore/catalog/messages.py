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
    """Records that went to make room, whether or not bytes can be given back for them yet."""

    keys: tuple[OffloadKey, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """A commit was carried out: its records can be located now, the failed ones never will."""

    ticket: int
    reason: FailureReason | None = field(default=None, compare=False)
    """Not None: the catalog failed, and none of its records can be located."""


SecondaryEvent = Placed | Refused | Evicted | Freed | Committed


@dataclass(frozen=True, slots=True)
class RequestPlaces:
    """Wanted: one place per key."""

    ticket: int
    keys: tuple[OffloadKey, ...]
    payload_bytes: int
    is_noted: bool = False
    """Whether those of the keys that are recorded were touched, or removed, already."""


@dataclass(frozen=True, slots=True)
class CommitTicket:
    """Written: the records of a ticket but the failed ones (all of them: None)."""

    ticket: int
    failed: frozenset[int] | None


@dataclass(frozen=True, slots=True)
class TouchKeys:
    """Used: records, tail first."""

    keys: tuple[OffloadKey, ...]


@dataclass(frozen=True, slots=True)
class RemoveKeys:
    """Worthless: records."""

    keys: tuple[OffloadKey, ...]


@dataclass(frozen=True, slots=True)
class ReleaseDone:
    """Given back: the bytes of a `Freed`."""

    release_id: int


@dataclass(frozen=True, slots=True)
class ForgetNamespace:
    """Unwanted: all records of a namespace."""

    namespace: Namespace


@dataclass(frozen=True, slots=True)
class BeginEpoch:
    """Records of this namespace will come, which only this process finds."""

    namespace: Namespace
    manifest_json: bytes


@dataclass(frozen=True, slots=True)
class LosePayload:
    """What was recorded in these segments until now leads to nothing; it is recorded anew."""

    segments: frozenset[int]


@dataclass(frozen=True, slots=True)
class Evict:
    """Look again whether there is room for what waits and for what comes next."""

    page_count: int = 0
    """Of one rank: so much is evicted in any case."""


@dataclass(frozen=True, slots=True)
class SweepGarbage:
    """Idle: remove some rows of forgotten namespaces."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Over: this process asks for nothing more."""


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
    """Take what is there; another thread may take it, too."""
    taken: list[Item] = []
    with suppress(IndexError):
        while True:
            taken.append(events.popleft())
    return taken
