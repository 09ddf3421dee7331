"""One `get`: batches of loads on their way to the caller's array.

A chunk is in memory, in a tier, on its way to memory for another thread, or nowhere. Those on their
way are waited for when nothing of our own is: two that waited for each other would wait for ever.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tierstore.arrays import ByteArray, Rows, adjacent_runs, slot_rows
from tierstore.embedded.async_calls import begin_wait, may_wait, touching
from tierstore.embedded.batches import BATCHES_IN_FLIGHT, BatchedCall
from tierstore.embedded.loop import PendingLoad
from tierstore.key import OffloadKey

__all__ = ["Retrieval"]

_ROUNDS_MAX = 4
"""So often is a chunk asked for that another thread was to bring, and that left memory again."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """A load on its way to the caller's array."""

    load: PendingLoad
    rows: list[int]
    """Per chunk, the first row of the caller's array that wants it."""


class Retrieval(BatchedCall):
    """Loads chunks to a caller's array; runs inside the gate, and steps out where it waits."""

    __slots__ = (
        "_batch_chunks",
        "_found",
        "_group_idx",
        "_in_flight",
        "_more_rows",
        "_out",
        "_rows_of",
    )

    def run(
        self, group_idx: int, keys: Sequence[OffloadKey], out: Rows, batch_chunks: int
    ) -> list[bool]:
        """Fill the rows of `out` whose chunks can be had; return for each whether it was."""
        self._in_flight: list[_Batch] = []
        self._group_idx = group_idx
        self._batch_chunks = batch_chunks
        self._out = out
        self._found = [False] * len(keys)
        # Each chunk is in one batch, or a second one would find it on its way to memory.
        rows_of = dict(zip(keys[::-1], range(len(keys))[::-1], strict=True))
        wanted: Sequence[OffloadKey] = keys
        self._more_rows: dict[int, list[int]] = {}
        if len(rows_of) < len(keys):
            wanted = list(dict.fromkeys(keys))
            for i, key in enumerate(keys):
                if rows_of[key] != i:
                    self._more_rows.setdefault(rows_of[key], []).append(i)
        self._rows_of: Mapping[OffloadKey, int] = rows_of
        if not may_wait() and not self._stack.primary.holds_all(wanted):
            begin_wait()  # before a part of it is loaded, and counted, twice
        self._planes.is_changing = True
        try:
            for _ in range(_ROUNDS_MAX):
                wanted = self._load(wanted)
                if not wanted:
                    break
                self._wait_for_others(wanted)
        finally:
            self._leave()  # what an exception has left there
        return self._found

    def _load(self, wanted: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Load chunks, tail first; return those that others hold, or hold the room for."""
        held: list[OffloadKey] = []
        for i in range(0, len(wanted), self._batch_chunks)[::-1]:
            held[:0] = self._start(wanted[i : i + self._batch_chunks])
            while self._in_flight and self._loop.load_count >= BATCHES_IN_FLIGHT:
                self._finish_one()
        while self._in_flight:
            self._finish_one()
        return held

    def _start(self, part: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Start to load a batch; return those of its chunks that others hold, or all: no room."""
        if None in self._stack.primary.locate(part):
            # The coldest chunks may be pinned by these very batches, so that others have to go.
            count = BATCHES_IN_FLIGHT * self._batch_chunks
            self._loop.record_victims(self._group_idx, count, self._stall_seconds)
        self._loop.look_ahead(part)
        held = self._stack.busy(part)
        while True:
            reservation = self._stack.reserve_load([(self._group_idx, part)], partial=True)
            if reservation is not None or not self._in_flight:
                break
            self._finish_one()  # perhaps it holds the room that this one needs
            self._loop.look_ahead(part)
            held = self._stack.busy(part)
        if reservation is None:
            return part
        if reservation.keys[0]:
            rows = list(map(self._rows_of.__getitem__, reservation.keys[0]))
            self._in_flight.append(_Batch(self._loop.start_load(reservation), rows))
        return held

    def _wait_for_others(self, wanted: Sequence[OffloadKey]) -> None:
        """Wait until loads of others have ended, as far as they hold what is wanted.

        The deadlines of their reads bound it: a chunk whose read hangs is not on its way any more.
        """
        room = {self._group_idx: min(len(wanted), self._batch_chunks)}
        stack = self._stack
        self._loop.wait_for_loads(lambda: not stack.busy(wanted) and stack.primary.has_room(room))

    def _finish_one(self) -> None:
        """Wait for the batch that comes first, and take it to the caller's array."""
        loads = [batch.load for batch in self._in_flight]
        load = self._loop.wait_for_any(loads)
        i = [other is load for other in loads].index(True)
        batch = self._in_flight[i]
        self._planes.is_changing = False
        with touching():
            self._copy_out(batch)
        self._planes.is_changing = True
        self._loop.finish_load(load)
        self._in_flight[i : i + 1] = self._retry(batch)

    def _copy_out(self, batch: _Batch) -> None:
        # The slots are pinned or still arriving, so their bytes stay in place until finish_load.
        failed = batch.load.failed_slots()
        spec, slots = self._specs[self._group_idx], batch.load.reservation.slots[0]
        rows = batch.rows
        if failed:
            came = [i for i, slot in enumerate(slots.tolist()) if slot not in failed]
            slots, rows = slots[came], [rows[i] for i in came]
        for start, stop in adjacent_runs(slots, spec.slot_bytes, rows):
            source = slot_rows(self._pool, spec, int(slots[start]), stop - start)
            self._fill_rows(rows[start], source)

    def _fill_rows(self, first: int, source: ByteArray) -> None:
        """Copy chunks to adjacent rows of the caller's array, and to others that want them."""
        out, end = self._out, first + len(source)
        if isinstance(out, np.ndarray):
            out[first:end] = source
        else:
            for row, chunk in zip(out[first:end], source, strict=True):
                row[:] = chunk
        self._found[first:end] = [True] * len(source)
        if self._more_rows:
            for i, chunk in enumerate(source, first):
                for again in self._more_rows.get(i, ()):
                    out[again][:] = chunk
                    self._found[again] = True

    def _retry(self, batch: _Batch) -> list[_Batch]:
        """Load what a batch did not bring from another tier that has it, if any does."""
        assert batch.load.done is not None, "the load is not answered yet"
        tried = batch.load.reservation.failed_tiers(batch.load.done.failed)
        if tried:
            self._loop.look_ahead(list(tried), tried)
        again = self._stack.retry_load(batch.load.reservation, batch.load.done)
        if again is None:
            return []
        rows = dict(zip(batch.load.reservation.keys[0], batch.rows, strict=True))
        return [_Batch(self._loop.start_load(again), [rows[key] for key in again.keys[0]])]

    def _leave(self) -> None:
        if not self._in_flight or self._planes.is_over:
            return
        was_changing, self._planes.is_changing = self._planes.is_changing, True
        for batch in self._in_flight:
            self._loop.leave(batch.load)
        self._planes.is_changing = was_changing
