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
