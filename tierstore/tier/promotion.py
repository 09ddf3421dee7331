"""Promotes: finds records for missing chunks, and settles the results of reading them."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from tierstore.clock import Clock
from tierstore.key import OffloadKey
from tierstore.layout import GroupSpec
from tierstore.metrics import Counters, Metric
from tierstore.policy.use import UseContext
from tierstore.tier.cascade import Cascade
from tierstore.tier.intake import Intake
from tierstore.tier.memory.primary import PrimaryTier
from tierstore.tier.readable_records import ReadableRecords
from tierstore.tier.reservation import NONE_TRIED, LoadReservation, untried
from tierstore.tier.secondary import SecondaryTier
from tierstore.transfer import FailureReason, IntArray, JobId, Promote, TransferDone, place_array

__all__ = ["Promotions"]

_NO_SLOTS: IntArray = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class _LatePart:
    """Chunks of one promote whose reads hang."""

    promote: Promote
    indices: tuple[int, ...]
    """The indices of the chunks in `TransferDone.failed`."""
    keys: tuple[OffloadKey, ...]
    slots: tuple[int, ...]
    """Detached: a hung read may still write to them."""
    unwanted: set[OffloadKey]
    """Keys whose bytes are discarded even if they arrive (reset)."""
    use: UseContext


class Promotions:
    """The way up: records to slots, under the pins of both tiers."""

    def __init__(
        self,
        *,
        groups: Sequence[GroupSpec],
        primary: PrimaryTier,
        secondaries: Sequence[SecondaryTier],
        records: Sequence[ReadableRecords],
        cascades: Sequence[Cascade],
        intake: Intake,
        stale: AbstractSet[OffloadKey],
        counters: Counters,
        clock: Clock,
    ) -> None:
        """Share the tiers with the stack; `groups` is indexed by group, `records` by tier.

        `stale` is a live view of the chunks that must not become resident (reset).
        """
        self._groups = groups
        self._primary = primary
        self._secondaries = secondaries
        self._records = records
        self._cascades = cascades
        self._intake = intake
        self._stale = stale
        self._counters = counters
        self._clock = clock
        self._begun: dict[JobId, float] = {}
        """Start times of loads that are not answered yet."""
        self._late: dict[JobId, list[_LatePart]] = {}

    @property
    def last_tier_idx(self) -> int:
        """The tier that is asked last."""
        return len(self._secondaries) - 1

    def find(
        self,
        group_idx: int,
        missing: Sequence[OffloadKey],
        tried: Mapping[OffloadKey, int] = NONE_TRIED,
    ) -> tuple[list[Promote], Sequence[OffloadKey]]:
        """Find keys in the tiers. Return promotes without slots, and the keys that no tier has.

        One read transaction per tier that has to be asked. `tried` names the tier that failed to
        load a chunk: it and the tiers before it are not asked again, even if they have recovered.
        """
        promotes: list[Promote] = []
        for tier_idx, records in enumerate(self._records):
            asked = untried(missing, tried, tier_idx)
            if not asked:
                continue
            places = records.locate(asked)
            keys = tuple(asked)
            found = [place for place in places if place is not None]
            if len(found) < len(keys):
                pairs = zip(asked, places, strict=True)
                keys = tuple(key for key, place in pairs if place is not None)
            if keys:
                missing = _without(missing, keys)
                promotes.append(
                    Promote(
                        tier_idx=tier_idx,
                        group_idx=group_idx,
                        keys=keys,
                        places=place_array(found),
                        slots=_NO_SLOTS,
                    )
                )
        return promotes, missing

    def begin(self, job_id: JobId, promotes: Sequence[Promote]) -> None:
        """Take note of promotes that have their slots: they are read from now on."""
        self._begun[job_id] = self._clock.seconds()
        for promote in promotes:
            self._secondaries[promote.tier_idx].pin(promote.keys)
            self._records[promote.tier_idx].health.begin_read()

    def finish(self, reservation: LoadReservation, done: TransferDone) -> None:
        """Commit the chunks that arrived, drop the failed ones, detach late ones from their slots.

        A late chunk is absent from memory: another tier may load it, or the engine computes it.
        """
        late: list[_LatePart] = []
        begun_at, use = self._begun.pop(reservation.job_id), reservation.use
        first = 0
        for promote in reservation.promotes:
            self._judge(promote, first, done.failed, begun_at)
            if done.failed or self._stale:
                part = self._finish_unevenly(promote, first, done.failed, use)
                if part.keys:
                    late.append(part)
            else:
                self._settle(promote, promote.keys, (), use)
            first += len(promote.keys)
        if late:
            self._late[reservation.job_id] = late

    def finish_late(self, done: TransferDone) -> bool:
        """Settle chunks that missed their deadline; False: the job has no late chunks."""
        parts = self._late.pop(done.job_id, None)
        if parts is None:
            return False
        for part in parts:
            self._finish_late_part(part, done.failed)
        return True

    def has_late(self) -> bool:
        """Return whether a hung read still holds slots."""
        return bool(self._late)

    def reset(self) -> None:
        """Keep late chunks from becoming resident."""
        for parts in self._late.values():
            for part in parts:
                part.unwanted.update(part.keys)
        for records in self._records:
            records.reset()

    def check(self) -> list[str]:
        """Verify that each detached slot is awaited; return the violations in words."""
        late_count = sum(len(part.slots) for parts in self._late.values() for part in parts)
        if late_count == self._primary.detached_count:
            return []
        return [f"{self._primary.detached_count} slots are detached, {late_count} are awaited"]

    def _judge(
        self, promote: Promote, first: int, failed: Mapping[int, FailureReason], begun_at: float
    ) -> None:
        """Report the outcome of a promote to the health of its tier."""
        indices = range(first, first + len(promote.keys))
        reasons = [failed[i] for i in indices if i in failed] if failed else []
        arrived_count = len(indices) - len(reasons)
        self._records[promote.tier_idx].health.end_read(arrived_count, reasons, begun_at)

    def _finish_unevenly(
        self,
        promote: Promote,
        first: int,
        failed: Mapping[int, FailureReason],
        use: UseContext,
    ) -> _LatePart:
        """Settle the chunks of a promote that arrived or failed; return the late ones.

        The indices of its chunks in `failed` start at `first`.
        """
        records = self._records[promote.tier_idx]
        arrived: list[OffloadKey] = []
        lost: dict[OffloadKey, FailureReason | None] = {}
        late: dict[int, OffloadKey] = {}
        for i, key in enumerate(promote.keys, first):
            reason = failed.get(i)
            if reason is None and key not in self._stale:
                arrived.append(key)
            elif reason is FailureReason.DEADLINE:
                late[i] = key
            else:
                lost[key] = reason
        self._blame(records, lost)
        self._settle(promote, arrived, tuple(lost), use)
        keys = tuple(late.values())
        slots = tuple(self._intake.detach(keys))
        if late:
            self._counters.add(Metric.MISSES, len(late), label=FailureReason.DEADLINE.value)
            records.hang(keys, self._slot_bytes(promote, len(late)))
        unwanted = {key for key in keys if key in self._stale}
        return _LatePart(promote, tuple(late), keys, slots, unwanted, use)

    def _finish_late_part(self, part: _LatePart, failed: Mapping[int, FailureReason]) -> None:
        """Make the late chunks that arrived resident; free the slots of the others."""
        promote = part.promote
        records = self._records[promote.tier_idx]
        reasons = [failed[i] for i in part.indices if i in failed]
        records.end_hang(part.keys, self._slot_bytes(promote, len(part.keys)), reasons)
        resident = self._primary.locate(part.keys)
        slots = dict(zip(part.keys, part.slots, strict=True))
        arrived: list[OffloadKey] = []
        lost: dict[OffloadKey, FailureReason | None] = {}
        for i, key, slot in zip(part.indices, part.keys, resident, strict=True):
            reason = failed.get(i)
            is_held = slot is not None or key in self._primary.arriving or key in self._stale
            if reason is None and not is_held and key not in part.unwanted:
                arrived.append(key)
            else:
                lost[key] = reason
        self._primary.give_back([slots[key] for key in lost])
        self._primary.reattach(arrived[::-1], [slots[key] for key in arrived[::-1]], use=part.use)
        self._secondaries[promote.tier_idx].unpin(tuple(lost))
        self._blame(records, {k: why for k, why in lost.items() if k not in part.unwanted})
        self._settle(promote, arrived, (), part.use)

    def _blame(
        self, records: ReadableRecords, lost: Mapping[OffloadKey, FailureReason | None]
    ) -> None:
        """Count chunks that could not be read; None: it was read, but is no longer wanted."""
        reasons = {key: reason for key, reason in lost.items() if reason is not None}
        for reason in reasons.values():
            self._counters.add(Metric.MISSES, label=reason.value)
        if self._stale:  # after a reset the record is another one, or does not exist
            reasons = {key: why for key, why in reasons.items() if key not in self._stale}
        records.fail(reasons)

    def _settle(
        self,
        promote: Promote,
        arrived: Sequence[OffloadKey],
        lost: Sequence[OffloadKey],
        use: UseContext,
    ) -> None:
        """Commit the chunks that arrived, free the slots of the others."""
        secondary = self._secondaries[promote.tier_idx]
        if lost:
            self._intake.abort(lost)
            secondary.unpin(lost)
        if not arrived:
            return
        secondary.unpin(arrived)
        self._records[promote.tier_idx].succeed(arrived)
        self._intake.commit(promote.group_idx, arrived, source_idx=promote.tier_idx, use=use)
        secondary.touch(arrived[::-1], use=use)
        self._cascades[promote.tier_idx].count_promoted(
            len(arrived), self._groups[promote.group_idx].chunk_bytes
        )

    def _slot_bytes(self, promote: Promote, count: int) -> int:
        return count * self._groups[promote.group_idx].slot_bytes


def _without(keys: Sequence[OffloadKey], found: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
    """Return those of some keys that are not among `found`, which are of them."""
    if len(found) == len(keys):
        return ()
    here = set(found)
    return [key for key in keys if key not in here]
