"""The way down into one secondary tier: its admission, and the demotes that the admission asks for.

resident, touched, next victims   -> Admission: which of these chunks should be demoted?
                                  -> Demotes: pinned, placed, written, recorded
"""

from collections.abc import Collection, Sequence

from tierstore.key import OffloadKey
from tierstore.metrics import Counters, Metric
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.tier.admission.protocol import Admission
from tierstore.tier.health.tier_health import TierHealth
from tierstore.tier.memory.primary import PrimaryTier
from tierstore.tier.movement_log import MovementLog
from tierstore.tier.secondary import SecondaryTier
from tierstore.tier.write_behind.demotes import Demotes

__all__ = ["Cascade"]

_UNBOUNDED_BYTES = 1 << 62


class Cascade:
    """The admission of one secondary tier, and its demotes. One thread."""

    def __init__(
        self,
        *,
        name: str,
        admission: Admission,
        demotes: Demotes,
        primary: PrimaryTier,
        secondary: SecondaryTier,
        health: TierHealth,
        counters: Counters,
        movements: MovementLog | None = None,
    ) -> None:
        """Share the tiers with the stack; `demotes` reports to the same admission."""
        self.name = name
        """The tier's name."""
        self._admission = admission
        self.demotes = demotes
        """The chunks being demoted, and those that failed."""
        self._primary = primary
        self._secondary = secondary
        self.health = health
        """The health of the tier's device."""
        self._counters = counters
        self._movements = movements
        self.loss_count = 0
        """How often payload was found missing."""

    @property
    def needs_use(self) -> bool:
        """Whether the admission wants the context of each use."""
        return self._admission.needs_use

    @property
    def records_victims(self) -> bool:
        """Whether chunks are demoted when they are about to be evicted from the primary tier."""
        return self._admission.admits_victims

    @property
    def is_awaited(self) -> bool:
        """Whether callers should wait for the tier's writes: not while it is out of use."""
        return self.health.is_writable

    def room_bytes(self) -> int:
        """Return how many more bytes may become resident before demotes are dropped."""
        if not self._admission.admits_arrivals or not self.is_awaited:
            return _UNBOUNDED_BYTES
        return self.demotes.queue.room_bytes

    def on_resident(
        self, group_idx: int, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE
    ) -> None:
        """Take note of chunks of one prefix, head first, that became resident."""
        admitted = self._admission.on_resident(keys, use)
        if admitted:
            self.demotes.request(group_idx, admitted, use)

    def on_promoted(self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE) -> None:
        """Take note of chunks that were promoted from this tier."""
        self._admission.on_promoted(keys, use)

    def on_touched(self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE) -> None:
        """Take note of a further use of resident chunks, head first."""
        admitted = self._admission.on_touched(keys, use)
        if admitted:
            self.demotes.request_groups(admitted, use)

    def on_evicted(self, keys: Sequence[OffloadKey]) -> None:
        """Take note of chunks that were evicted from the primary tier."""
        self.demotes.forget(keys)
        lost_count = self._admission.on_evicted(keys)
        self._counters.add(Metric.DROPPED_DEMOTES, lost_count, label="evicted_before_written")

    def on_forgotten(self, keys: Collection[OffloadKey]) -> None:
        """Take note of chunks that a reset has removed and that no transfer holds any more."""
        self.demotes.forget(keys)
        self._admission.on_withdrawn(keys)

    def on_erased(self, keys: Sequence[OffloadKey]) -> None:
        """Take note of records that were removed because they cannot be read."""
        if self._movements is not None:
            self._movements.erased(self.name, keys)

    def record_victims(self, coldest: Sequence[OffloadKey]) -> int:
        """Demote the next victims that are not recorded; return how many would be lost now.

        Returns 0 if the tier is out of use: losing chunks is better than waiting for it.
        """
        if not self.records_victims:
            return 0
        unqueued_count = self.demotes.request_groups(self._admission.on_victims(coldest))
        if not self.is_awaited:
            return 0
        return unqueued_count + sum(map(self.demotes.queue.in_flight.__contains__, coldest))

    def count_promoted(self, chunk_count: int, chunk_bytes: int) -> None:
        """Count chunks that were read from this tier."""
        self._counters.add(Metric.PROMOTED_CHUNKS, chunk_count, label=self.name)
        self._counters.add(Metric.PROMOTED_BYTES, chunk_count * chunk_bytes, label=self.name)
        self._counters.add(Metric.HIT_CHUNKS, chunk_count, label=self.name)

    def cancel(self) -> None:
        """Cancel all demotes and forget all chunks (reset): none of them may be found."""
        self.demotes.cancel()
        self.forget_resident()

    def forget_resident(self) -> None:
        """Forget what is known of chunks in memory (reset); demotes in flight continue."""
        self._admission.reset(self.demotes.queue.in_flight)
        self.demotes.forget_failures()

    def on_catalog_lost(self) -> None:
        """Take note that the tier's records are gone: chunks in memory are recorded again."""
        if not self.records_victims:  # with such a tier, the next flush records all of them
            self.demotes.request_lost_records(self._admitted_keys())
        self._admission.on_records_lost(self.demotes.queue.in_flight)

    def hear_losses(self) -> bool:
        """Return whether payload was lost since the last call; then write resident chunks again."""
        is_lost = self._secondary.take_lost()
        if is_lost:
            self.loss_count += 1
            self.demotes.request_lost_payload(self._admitted_keys())
            self._admission.on_records_lost(self.demotes.queue.in_flight)
        return is_lost

    def _admitted_keys(self) -> list[OffloadKey]:
        """Return the chunks in memory that the admission has let through, hottest first."""
        return self._admission.admitted(self._primary.coldest(len(self._primary))[::-1])
