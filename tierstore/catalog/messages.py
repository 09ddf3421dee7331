"""What goes into a catalog's mailbox, and how it is cut into transactions.

What comes out of it is in `tier_events`.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar, cast

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
    "batches",
    "joined_touches",
    "take_all",
]

_BATCH_KEYS_MAX = 512


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


def batches(
    operations: Iterable[Operation], key_count_of: Callable[[Operation], int]
) -> Iterable[list[Operation]]:
    """Cut operations into transactions of bounded size; what is one by itself stands alone.

    `key_count_of` says how many records an operation changes. Garbage is swept by an idle writer
    alone.
    """
    batch: list[Operation] = []
    key_count = 0
    operations = list(operations)
    for operation in operations:
        if isinstance(operation, SweepGarbage) and len(operations) > 1:
            continue
        if isinstance(operation, ForgetNamespace | SweepGarbage):
            if batch:
                yield batch
            yield [operation]
            batch, key_count = [], 0
            continue
        batch.append(operation)
        key_count += key_count_of(operation)
        if key_count >= _BATCH_KEYS_MAX:
            yield batch
            batch, key_count = [], 0
    if batch:
        yield batch


def joined_touches(batch: Sequence[Operation]) -> Iterable[Operation]:
    """Join touches that follow each other, with the same outcome.

    Each touch of all records there are would cost a page of the map until the transaction ends, and
    what gathers behind a slow transaction is hundreds of them.
    """
    for kind, operations in itertools.groupby(batch, type):
        if kind is TouchKeys:
            touches = (cast("TouchKeys", operation).keys for operation in operations)
            yield TouchKeys(tuple(itertools.chain.from_iterable(touches)))
        else:
            yield from operations
