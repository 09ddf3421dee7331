"""One `put`: batches of chunks on their way from the caller's array to slots."""

from collections.abc import Sequence

import numpy as np

from tierstore.arrays import Rows, adjacent_runs, slot_rows
from tierstore.embedded.async_calls import end_step, steps_done, touching
from tierstore.embedded.batches import BatchedCall
from tierstore.key import OffloadKey
from tierstore.tier.reservation import ChunkState, OffloadReservation

__all__ = ["BatchedPut"]


class BatchedPut(BatchedCall):
    """Stores chunks of a caller's array; runs inside the gate, and steps out where it waits."""

    __slots__ = ()

    def run(
        self, group_idx: int, keys: Sequence[OffloadKey], rows: Rows, per_batch: int
    ) -> list[bool]:
        """Store the chunks of one group; return for each key whether the store has it now."""
        self._planes.is_changing = True
        starts = range(0, len(keys), per_batch)
        # Tail first, so that what has to go again goes from the tail of the prefix. Each batch is
        # put once: to put it again would count as a further use.
        for i in starts[::-1][steps_done() :]:
            self._put_batch(group_idx, keys[i : i + per_batch], rows[i : i + per_batch])
            end_step()
        # Only now, for the last batches may have evicted the first ones.
        return [has for i in starts for has in self._has(keys[i : i + per_batch])]

    def _has(self, keys: Sequence[OffloadKey]) -> list[bool]:
        self._loop.look_ahead(keys)
        return [state >= ChunkState.RECORDED for state in self._stack.states(keys)]

    def _put_batch(self, group_idx: int, keys: Sequence[OffloadKey], rows: Rows) -> None:
        stack = self._stack
        new_count = stack.primary.locate(keys).count(None)
        if new_count:  # who only uses what is there waits for no tier
            self._make_room(group_idx, keys, new_count)
        reservation = stack.reserve_offload(group_idx, keys)
        is_filled = False
        self._planes.is_changing = False
        try:
            # After this the bytes may change: a withdrawn call must not store them.
            with touching():
                self._fill_slots(reservation, rows)
            is_filled = True
        finally:
            self._planes.is_changing = True
            stack.finish_offload(reservation, () if is_filled else range(len(reservation.keys)))
            self._planes.is_changing = is_filled
        self._loop.pump()

    def _make_room(self, group_idx: int, keys: Sequence[OffloadKey], new_count: int) -> None:
        stack, loop = self._stack, self._loop

        def is_clear() -> bool:
            # Other threads' loads bring some of these chunks, or hold the room that they need.
            if not loop.load_count:
                return True
            return not stack.busy(keys) and stack.primary.has_room({group_idx: new_count})

        need_bytes = new_count * self._specs[group_idx].chunk_bytes
        loop.make_room(group_idx, new_count, need_bytes, self._stall_seconds, is_clear)

    def _fill_slots(self, reservation: OffloadReservation, rows: Rows) -> None:
        spec, slots = self._specs[reservation.group_idx], reservation.slots
        indices = reservation.indices
        for start, stop in adjacent_runs(slots, spec.slot_bytes, indices):
            target = slot_rows(self._pool, spec, int(slots[start]), stop - start)
            source = rows[indices[start] : indices[start] + stop - start]
            if isinstance(source, np.ndarray):
                target[:] = source
            else:
                for slot, row in zip(target, source, strict=True):
                    slot[:] = row
