"""Loads: chunks that are pinned in memory, or promoted to it, so that their bytes can be read."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from tierstore.key import OffloadKey, get_offload_group_idx
from tierstore.metrics import Counters, Metric
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.tier.intake import PRIMARY_NAME, Intake
from tierstore.tier.locator import Locator
from tierstore.tier.memory.primary import PrimaryTier
from tierstore.tier.next_victims import NextVictims
from tierstore.tier.promotion import Promotions
from tierstore.tier.reservation import NONE_TRIED, LoadReservation
from tierstore.tier.stale import StaleChunks
from tierstore.tier.uses import Uses
from tierstore.transfer import JobId, Promote, TransferDone

__all__ = ["Loads"]


class Loads:
    """Reserves loads and takes their answers. One thread."""

    def __init__(
        self,
        *,
        primary: PrimaryTier,
        locator: Locator,
        promotions: Promotions,
        intake: Intake,
        victims: NextVictims,
        uses: Uses,
        stale: StaleChunks,
        counters: Counters,
        new_job_id: Callable[[], JobId],
    ) -> None:
        """Share the tiers with the stack."""
        self._primary = primary
        self._locator = locator
        self._promotions = promotions
        self._intake = intake
        self._victims = victims
        self._uses = uses
        self._stale = stale
        self._hit_chunks = counters.tally(Metric.HIT_CHUNKS, label=PRIMARY_NAME)
        self._new_job_id = new_job_id

    def reserve(
        self,
        groups: Sequence[tuple[int, Sequence[OffloadKey]]],
        *,
        partial: bool = False,
        tried: Mapping[OffloadKey, int] = NONE_TRIED,
        use: UseContext = UNKNOWN_USE,
    ) -> LoadReservation | None:
        """Pin resident chunks and reserve slots for recorded ones (`TierStack.reserve_load`)."""
        wanted: list[tuple[Sequence[OffloadKey], list[int | None]]] = []
        found: list[Promote] = []
        pinned: list[OffloadKey] = []
        for group_idx, keys in groups:
            slots = self._pin_found(keys) if self._stale.keys else self._primary.pin_resident(keys)
            if None not in slots:
                wanted.append((keys, slots))
                pinned.extend(keys)
                continue
            missing = keys
            if slots.count(None) < len(keys):
                missing = [key for key, slot in zip(keys, slots, strict=True) if slot is None]
                pinned += [key for key, slot in zip(keys, slots, strict=True) if slot is not None]
            known = missing
            if self._locator.is_any_busy(missing):
                known = [key for key in missing if not self._locator.is_busy(key)]
            promotes, nowhere = self._promotions.find(group_idx, known, tried)
            found.extend(promotes)
            if nowhere or len(known) < len(missing):
                if not partial:
                    self._primary.unpin(pinned)
                    return None
                lost = set(missing).difference(known).union(nowhere)
                held = [i for i, key in enumerate(keys) if key not in lost]
                wanted.append(([keys[i] for i in held], [slots[i] for i in held]))
            else:
                wanted.append((keys, slots))
        reserved = self._reserve_promotes(found, use) if found else found
        if reserved is None:
            self._primary.unpin(pinned)
            return None
        job_id = self._new_job_id()
        if reserved:
            self._promotions.begin(job_id, reserved)
        return LoadReservation.of(job_id, wanted, reserved, tuple(pinned), use)

    def finish(self, reservation: LoadReservation, done: TransferDone) -> None:
        """Take the answer to a load (`TierStack.finish_load`)."""
        if reservation.promotes:
            self._promotions.finish(reservation, done)
        pinned = reservation.pinned
        self._hit_chunks.add(len(pinned))
        if self._stale.keys:
            self._primary.unpin(pinned)
            self._stale.forget_released()
            resident = self._locator.resident(pinned)
            if resident:
                self._uses.touch(resident, reservation.use)
        elif pinned:
            self._uses.release(pinned, reservation.use)

    def retry(self, reservation: LoadReservation, done: TransferDone) -> LoadReservation | None:
        """Reserve the failed chunks of a load from later tiers (`TierStack.retry_load`)."""
        tried = reservation.failed_tiers(done.failed)
        if all(tier_idx == self._promotions.last_tier_idx for tier_idx in tried.values()):
            return None
        groups = [
            (get_offload_group_idx(chosen[0]), chosen)
            for keys in reservation.keys
            if (chosen := [key for key in keys if key in tried])
        ]
        again = self.reserve(groups, partial=True, tried=tried, use=reservation.use)
        return again if again is not None and any(again.keys) else None

    def has_room(self, groups: Sequence[tuple[int, Sequence[OffloadKey]]]) -> bool:
        """Return whether `reserve` would find room for these chunks (`TierStack.has_room`)."""
        counts: Counter[int] = Counter()
        for group_idx, keys in groups:
            counts[group_idx] += len(keys)
        # The quicker check first: count resident chunks as if they needed slots, too.
        if self._primary.has_room(counts):
            return True
        resident: list[OffloadKey] = []
        for group_idx, keys in groups:
            slots = self._primary.locate(keys)
            here = [key for key, slot in zip(keys, slots, strict=True) if slot is not None]
            counts[group_idx] -= len(here)
            resident += here
        return self._primary.has_room(counts, resident)

    def _pin_found(self, keys: Sequence[OffloadKey]) -> list[int | None]:
        """Do as `PrimaryTier.pin_resident`, but treat stale chunks as absent."""
        slots = self._locator.slots(keys)
        self._primary.pin([key for key, slot in zip(keys, slots, strict=True) if slot is not None])
        return slots

    def _reserve_promotes(self, found: Sequence[Promote], use: UseContext) -> list[Promote] | None:
        """Give every promote its slots; None: there is no room, and nothing is reserved."""
        reserved: list[Promote] = []
        for promote in found:
            slots = self._intake.reserve(promote.group_idx, promote.keys[::-1], use)
            if slots is None:
                for undone in reserved:
                    self._intake.abort(undone.keys)
                return None
            reserved.append(promote.into(slots))
        for promote in reserved:
            # After all promotes have their slots: this pins victims, which the promotes may evict.
            self._victims.demote_ahead(promote.group_idx, len(promote.keys))
        return reserved
