"""How chunks enter the primary tier, from an engine or from a secondary tier.

reserve    slots, evicting other chunks           all tiers are told of the evicted chunks
commit     the bytes have arrived: resident       all tiers are told, and may record them
abort      the bytes did not arrive               the slots are free again
detach     the bytes may still arrive, late       the key is absent, its slot is kept
"""

from collections.abc import Sequence

from tierstore.key import OffloadKey
from tierstore.metrics import Counters, Metric
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.tier.cascade import Cascade
from tierstore.tier.memory.primary import PrimaryTier
from tierstore.tier.movement_log import MovementLog
from tierstore.tier.readable_records import ReadableRecords
from tierstore.transfer import IntArray

__all__ = ["PRIMARY_NAME", "Intake"]

PRIMARY_NAME = "primary"
"""The primary tier's label in metrics."""


class Intake:
    """Reserves, commits and aborts slots, and tells the other tiers. One thread."""

    def __init__(
        self,
        primary: PrimaryTier,
        cascades: Sequence[Cascade],
        records: Sequence[ReadableRecords],
        counters: Counters,
        movements: MovementLog | None,
    ) -> None:
        """Share the tiers; `cascades` and `records` are those of each secondary tier, in order."""
        self._primary = primary
        self._cascades = cascades
        self._records = records
        self._movements = movements
        self._evicted_chunks = counters.tally(Metric.EVICTED_CHUNKS, label=PRIMARY_NAME)

    def reserve(
        self, group_idx: int, tail_first: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE
    ) -> IntArray | None:
        """Reserve slots for chunks of one prefix; return them head first, or None: no room."""
        if not tail_first:
            return None
        reservation = self._primary.reserve(group_idx, tail_first, use=use)
        if reservation is None:
            return None
        if reservation.evicted:
            self._evicted_chunks.add(len(reservation.evicted))
            if self._movements is not None:
                self._movements.left(reservation.evicted)
            for cascade in self._cascades:
                cascade.on_evicted(reservation.evicted)
        if self._movements is not None:
            self._movements.arriving(tail_first)
        return reservation.slots[::-1]

    def commit(
        self,
        group_idx: int,
        keys: Sequence[OffloadKey],
        *,
        source_idx: int | None = None,
        use: UseContext = UNKNOWN_USE,
    ) -> None:
        """Make chunks of one prefix, given head first, resident, and offer them to the tiers.

        `source_idx` is the tier that they were promoted from, if any.
        """
        if not keys:
            return
        self._primary.commit(keys[::-1], use=use)
        if self._movements is not None:
            self._movements.came(keys)
        for tier_idx, cascade in enumerate(self._cascades):
            if tier_idx == source_idx:
                cascade.on_promoted(keys, use)
            else:
                self._records[tier_idx].give_way(keys)
                cascade.on_resident(group_idx, keys, use)

    def abort(self, keys: Sequence[OffloadKey]) -> None:
        """Free the slots of chunks that did not arrive."""
        self._primary.abort(keys)
        if self._movements is not None:
            self._movements.lost(keys)

    def detach(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Make arriving chunks absent, though their bytes may still arrive; return their slots."""
        slots = self._primary.detach(keys)
        if self._movements is not None:
            self._movements.lost(keys)
        return slots
