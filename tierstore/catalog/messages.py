"""What goes into a catalog's mailbox; what comes out of it is in `tier_events`."""

from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from tierstore.key import Namespace, OffloadKey

__all__ = [
    "BeginEpoch",
    "CommitTicket",
    "Evict",
    "ForgetNamespace",
    "Leave",
    "LosePayload",
    "Operation",
    "ReleaseDone",
    "RemoveKeys",
    "RequestPlaces",
    "SweepGarbage",
    "TouchKeys",
    "take_all",
]


Item = TypeVar("Item")


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
