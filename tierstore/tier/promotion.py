"""Promotes: finding records for missing chunks, and settling what came of reading them."""

from collections.abc import Container, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from tierstore.key import OffloadKey
from tierstore.layout import GroupSpec
from tierstore.metrics import Counters, Metric
from tierstore.tier.cascade import Cascade
from tierstore.tier.primary import PrimaryTier
from tierstore.tier.reservation import LoadReservation
from tierstore.tier.residency import ResidencyLog
from tierstore.tier.secondary import SecondaryTier
from tierstore.transfer import FailureReason, JobId, Place, Promote, TransferDone

__all__ = ["Promotions"]

_WORTHLESS = (FailureReason.ABSENT, FailureReason.CORRUPT)


@dataclass(frozen=True, slots=True)
class _Late:
    """Promotes of a job that missed its deadline, and which of their chunks are still awaited."""

    promotes: tuple[Promote, ...]
    indices: frozenset[int]


class Promotions:
    """The way up: records to slots, under the pins of both tiers."""

    def __init__(
        self,
        *,
        groups: Sequence[GroupSpec],
        primary: PrimaryTier,
        secondaries: Sequence[SecondaryTier],
        cascades: Sequence[Cascade],
        doomed: AbstractSet[OffloadKey],
        counters: Counters,
        residency: ResidencyLog | None,
    ) -> None:
        """Share the tiers with the stack; `groups` is indexed by group.

        `doomed` is a live view of the chunks that must not become resident (reset).
        """
        self._groups = groups
        self._primary = primary
        self._secondaries = secondaries
        self._cascades = cascades
        self._doomed = doomed
        self._counters = counters
        self._residency = residency
        self._late: dict[JobId, _Late] = {}

    def find(
        self, group_idx: int, missing: Sequence[OffloadKey]
    ) -> tuple[list[Promote], Sequence[OffloadKey]]:
        """Find keys in the tiers, with slots yet to be given; also return those that are nowhere.

        One read transaction per tier that has to be asked.
        """
        promotes: list[Promote] = []
        for tier_idx, secondary in enumerate(self._secondaries):
            if not missing:
                break
            places = secondary.locate(missing)
            keys: list[OffloadKey] = []
            found: list[Place] = []
            for key, place in zip(missing, places, strict=True):
                if place is not None:
                    keys.append(key)
                    found.append(place)
            missing = [key for key, place in zip(missing, places, strict=True) if place is None]
            if keys:
                promotes.append(
                    Promote(
                        tier_idx=tier_idx,
                        group_idx=group_idx,
                        keys=tuple(keys),
                        places=tuple(found),
                        slots=np.empty(0, np.int64),
                    )
                )
        return promotes, missing

    def finish(self, reservation: LoadReservation, done: TransferDone) -> None:
        """Commit what arrived, drop what failed; chunks that are late stay arriving."""
        late = self._sort_out(reservation.promotes, done, frozenset())
        self._counters.add(Metric.MISSES, len(late), label=FailureReason.DEADLINE.value)
        if late:
            self._late[reservation.job_id] = _Late(reservation.promotes, late)

    def finish_late(self, done: TransferDone) -> bool:
        """Settle what missed its deadline; False: the job has nothing late."""
        late = self._late.pop(done.job_id, None)
        if late is None:
            return False
        count = sum(len(promote.keys) for promote in late.promotes)
        self._sort_out(late.promotes, done, frozenset(range(count)) - late.indices)
        return True

    def has_late(self) -> bool:
        """Say whether a hung read still holds slots."""
        return bool(self._late)

    def commit(
        self, group_idx: int, keys: Sequence[OffloadKey], source_idx: int | None = None
    ) -> None:
        """Make chunks of one prefix, given head first, resident, and let them cascade.

        `source_idx` is the tier that they came from, if any.
        """
        if not keys:
            return
        self._primary.commit(keys[::-1])
        if self._residency is not None:
            self._residency.came(keys)
        for tier_idx, cascade in enumerate(self._cascades):
            if tier_idx == source_idx:
                cascade.on_promoted(keys)
            else:
                cascade.on_resident(group_idx, keys)

    def _sort_out(
        self, promotes: Sequence[Promote], done: TransferDone, settled_before: Container[int]
    ) -> frozenset[int]:
        """Sort chunks by their outcome; return the indices of those that are late.

        Indices count the keys of all promotes in order, as `done.failed` does.
        """
        late: set[int] = set()
        first = 0
        for promote in promotes:
            arrived: list[OffloadKey] = []
            lost: list[OffloadKey] = []
            worthless: list[OffloadKey] = []
            for i, key in enumerate(promote.keys, first):
                reason = done.failed.get(i)
                if i in settled_before:
                    continue
                if reason is None and key in self._doomed:
                    lost.append(key)
                elif reason is None:
                    arrived.append(key)
                elif reason is FailureReason.DEADLINE:
                    late.add(i)
                else:
                    lost.append(key)
                    if reason in _WORTHLESS:
                        worthless.append(key)
                    self._counters.add(Metric.MISSES, label=reason.value)
            first += len(promote.keys)
            self._settle(promote, arrived, lost, worthless)
        return frozenset(late)

    def _settle(
        self,
        promote: Promote,
        arrived: Sequence[OffloadKey],
        lost: Sequence[OffloadKey],
        worthless: Sequence[OffloadKey],
    ) -> None:
        secondary = self._secondaries[promote.tier_idx]
        self._primary.abort(lost)
        if self._residency is not None:
            self._residency.lost(lost)
        secondary.unpin([*arrived, *lost])
        if worthless:
            secondary.remove(worthless)
            self._cascades[promote.tier_idx].on_erased(worthless)
        if arrived:
            self.commit(promote.group_idx, arrived, source_idx=promote.tier_idx)
            secondary.touch(arrived[::-1])
            self._cascades[promote.tier_idx].count_promoted(
                len(arrived), self._groups[promote.group_idx].chunk_bytes
            )
