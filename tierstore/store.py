"""TierStore: both planes in one process, for embedded use and for tools.

put:  keys -> slots (copied from the caller's array) -> resident -> cascade
get:  resident or promoted slots -> copied to the caller's array
"""

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from tierstore.arrays import Rows, adjacent_runs, byte_rows, one_group, slot_rows
from tierstore.backend.opening import BackendOpener, open_backend
from tierstore.clock import MonotonicClock
from tierstore.config import StoreConfig, load_config
from tierstore.errors import BackendError, ClosedError
from tierstore.executor import TransferExecutor
from tierstore.key import OffloadKey, require_keys
from tierstore.manifest import Manifest
from tierstore.metrics import Counters
from tierstore.plane_loop import IdleCarrier, PendingLoad, PlaneLoop
from tierstore.tier.catalog import SecondaryStats
from tierstore.tier.reservation import ChunkState, OffloadReservation
from tierstore.tier.stack import TierStack

__all__ = ["PrefixMatch", "StoreStats", "TierStore"]

_logger = logging.getLogger(__name__)

_BATCH_BYTES = 4 << 20
"""Chunks are put and got in batches of about this size: pins stay few, and the caller's copy of
one batch overlaps the I/O of the next."""

_BATCHES_IN_FLIGHT = 8
_STALL_SECONDS = 10.0
"""A put waits this long for a write queue that does not move; then its demotes are dropped."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How much of a prefix can be loaded now."""

    chunk_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """What a store holds and what it did since it was opened."""

    primary_chunk_count: int
    primary_capacity_bytes: int
    secondary: dict[str, SecondaryStats]
    """By the tier's name."""
    counters: dict[str, float]
    """By the metric's name and label, as in `metrics.Metric`."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """A load on its way to the caller's array."""

    load: PendingLoad
    rows: list[list[int]]
    """Per chunk, the rows of the caller's array that want it."""


class TierStore:
    """A store of KV-cache chunks in host memory and on disk.

    Thread-safe: one call runs at a time. Chunks of one prefix are given head first. What waits to
    be written when a call returns is written without a further call.
    """

    def __init__(
        self,
        config: StoreConfig,
        manifest: Manifest,
        stack: TierStack,
        executor: TransferExecutor,
        counters: Counters,
    ) -> None:
        """Take over the two planes; use `open`."""
        self._config = config
        self._manifest = manifest
        self._stack = stack
        self._executor = executor
        self._counters = counters
        self._specs = manifest.group_specs()
        self._loop = PlaneLoop(stack, executor, MonotonicClock())
        self._lock = threading.RLock()
        self._idle = IdleCarrier(self._loop, self._lock)
        self._process_id = os.getpid()
        self._is_stalled = False
        self._is_torn = False
        self._closed = False

    @classmethod
    def open(
        cls,
        config: StoreConfig | Mapping[str, Any] | str | Path,
        manifest: Manifest,
        *,
        open_backend: BackendOpener = open_backend,
    ) -> Self:
        """Open the tiers, creating what does not exist.

        `config` is a parsed configuration, a mapping with the same keys, or a YAML file's path.
        `open_backend` is replaced by tests that let backends fail.

        Raises:
            TypeError: `manifest` is none.
            ConfigError: the configuration is wrong.
            MemoryError: the system has not `primary.capacity` bytes of memory to promise.
            CatalogError, ManifestError, BackendError: a secondary tier cannot be opened.
        """
        if not isinstance(manifest, Manifest):
            raise TypeError(f"manifest: expected a Manifest, got {type(manifest).__name__}")
        if not isinstance(config, StoreConfig):
            config = load_config(config)
        counters = Counters()
        stack = TierStack.open(config, manifest, rank_count=1, counters=counters)
        try:
            executor = TransferExecutor.open(
                config,
                manifest,
                rank=0,
                rank_count=1,
                caches=None,
                counters=counters,
                open_backend=open_backend,
            )
        except BaseException:
            stack.close()
            raise
        store = cls(config, manifest, stack, executor, counters)
        store._idle.open()
        return store

    def put(self, keys: Sequence[OffloadKey], array: object) -> int:
        """Store chunks; returns how many of them the store has now.

        `array` has one row of the group's chunk bytes per key: a C-contiguous numpy array or
        CPU torch tensor of shape (n, chunk_bytes), any dtype of 1 byte, or a sequence of n buffers.
        All keys are of one group. Chunks that are there already are touched, not written again.
        The bytes are copied before the call returns.

        Waits while the write-behind queue is full. Not accepted: chunks that pins leave no room
        for, and chunks of a store whose write queue has not moved for some seconds keep their
        place in memory but lose their record (counted as dropped demotes).

        Raises:
            TypeError, ValueError: wrong keys or a wrong array; nothing was stored.
            ClosedError: after `close`.
        """
        with self._call():
            keys = require_keys(keys, self._manifest.namespace)
            group_idx = one_group(keys, self._specs)
            rows = byte_rows(array, len(keys), self._specs[group_idx].chunk_bytes)
            per_batch = self._batch_chunks(group_idx)
            # Tail first, so that what has to go again goes from the tail of the prefix.
            return sum(
                self._put_batch(group_idx, keys[i : i + per_batch], rows[i : i + per_batch])
                for i in range(0, len(keys), per_batch)[::-1]
            )

    def get(self, keys: Sequence[OffloadKey], out: object) -> list[bool]:
        """Load chunks into the rows of `out`; says for each key whether its row was filled.

        `out` is shaped as the array of `put` and writable. Chunks may come from memory and disk;
        those from disk become resident. A row whose answer is False is left untouched.

        Raises:
            TypeError, ValueError: wrong keys or a wrong `out`; nothing was loaded.
            ClosedError: after `close`.
        """
        with self._call():
            keys = require_keys(keys, self._manifest.namespace)
            group_idx = one_group(keys, self._specs)
            rows = byte_rows(out, len(keys), self._specs[group_idx].chunk_bytes, writable=True)
            found = [False] * len(keys)
            per_batch = self._batch_chunks(group_idx)
            in_flight: list[_Batch] = []
            for i in range(0, len(keys), per_batch)[::-1]:
                indices = range(i, min(i + per_batch, len(keys)))
                batch = self._start_get(group_idx, keys, indices)
                if batch is None and in_flight:  # perhaps they hold the room that it needs
                    self._finish_first(in_flight, group_idx, rows, found)
                    batch = self._start_get(group_idx, keys, indices)
                if batch is not None:
                    in_flight.append(batch)
                while len(in_flight) == _BATCHES_IN_FLIGHT:
                    self._finish_first(in_flight, group_idx, rows, found)
            while in_flight:
                self._finish_first(in_flight, group_idx, rows, found)
            return found

    def match_prefix(self, keys: Sequence[OffloadKey]) -> PrefixMatch:
        """Count the leading chunks that can be loaded now; loads and touches nothing.

        Raises:
            TypeError, ValueError: no keys, or keys of another namespace.
            ClosedError: after `close`.
        """
        with self._call():
            keys = require_keys(keys, self._manifest.namespace)
            self._loop.pump()
            return PrefixMatch(self._stack.match_prefix(keys))

    def flush(self) -> None:
        """Bring every accepted chunk to the tiers whose rule admits it, and these to the device.

        `on_evict` tiers receive all chunks in memory that they do not have yet.

        Raises:
            BackendError: a device refused, or has not moved for a minute.
            ClosedError: after `close`.
        """
        with self._call():
            self._loop.flush()

    def reset(self) -> None:
        """Forget all chunks of this manifest in all tiers.

        Raises:
            ClosedError: after `close`.
        """
        with self._call():
            self._stack.reset(self._manifest)
            self._loop.pump()

    def stats(self) -> StoreStats:
        """Count what the store holds and what it did.

        Raises:
            BackendError, CatalogError: a catalog cannot be read.
            ClosedError: after `close`.
        """
        with self._call():
            self._loop.pump()
            names = [tier.name for tier in self._config.secondary]
            return StoreStats(
                primary_chunk_count=len(self._stack.primary),
                primary_capacity_bytes=self._config.primary.capacity_bytes,
                secondary={
                    name: secondary.stats()
                    for name, secondary in zip(names, self._stack.secondaries, strict=True)
                },
                counters=self._counters.snapshot(),
            )

    def check(self) -> list[str]:
        """Verify the invariants of all tiers; returns the problems in words, empty when sound.

        Raises:
            ClosedError: after `close`.
        """
        with self._call():
            self._loop.settle(lambda: not self._stack.has_work(), _STALL_SECONDS)
            return self._stack.check()

    def close(self) -> None:
        """Flush, stop the threads, release the memory; idempotent.

        Other threads' calls then raise `ClosedError`. A forked process has nothing to close.
        """
        if os.getpid() != self._process_id:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                if not self._is_torn:
                    self._loop.flush()
            except BackendError as error:
                _logger.error("close without a complete flush: cause=%s", error)
            finally:
                self._idle.close()
                self._executor.close()
                self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Run one call: alone, on an open store, in its own process."""
        if os.getpid() != self._process_id:  # before the lock: a fork copies a lock that is held
            raise ClosedError(
                f"the store belongs to process {self._process_id}, not to one forked from it"
            )
        with self._lock:
            if self._closed or self._is_torn:
                raise ClosedError("the store is closed, or a call was interrupted; open another")
            try:
                try:
                    yield
                finally:
                    self._idle.wake()
            except BaseException as error:
                if not isinstance(error, Exception):
                    # It came between any two steps: two chunks might own one slot.
                    self._is_torn = True
                    self._idle.stop()
                raise

    def _put_batch(self, group_idx: int, keys: Sequence[OffloadKey], rows: Rows) -> int:
        need = len(keys) * self._specs[group_idx].chunk_bytes
        stack = self._stack
        # A queue that has stalled once is not waited for again until it moves.
        patience = 0.0 if self._is_stalled else _STALL_SECONDS
        self._is_stalled = not (
            self._loop.settle(
                lambda: stack.write_queue_room_bytes() >= need or not stack.has_work(), patience
            )
            and self._record_victims(group_idx, len(keys), patience)
        )
        reservation = stack.reserve_offload(group_idx, keys)
        self._fill_slots(reservation, rows)
        stack.finish_offload(reservation)
        self._loop.pump()
        return sum(state >= ChunkState.RECORDED for state in stack.locate(keys))

    def _fill_slots(self, reservation: OffloadReservation, rows: Rows) -> None:
        spec, slots = self._specs[reservation.group_idx], reservation.slots
        is_whole = len(reservation.indices) == len(rows)
        for start, stop in adjacent_runs(slots, spec.slot_bytes):
            target = slot_rows(self._executor.pool.array, spec, int(slots[start]), stop - start)
            if is_whole and isinstance(rows, np.ndarray):
                target[:] = rows[start:stop]
            else:
                for slot, i in zip(target, reservation.indices[start:stop], strict=True):
                    slot[:] = rows[i]

    def _record_victims(self, group_idx: int, count: int, patience: float) -> bool:
        """Let what `count` new chunks will evict be recorded first; False: time is up."""
        return self._loop.settle(
            lambda: self._stack.demote_victims(group_idx, count) == 0, patience
        )

    def _start_get(
        self, group_idx: int, keys: Sequence[OffloadKey], indices: range
    ) -> _Batch | None:
        rows: dict[OffloadKey, list[int]] = {}
        for i in indices:
            rows.setdefault(keys[i], []).append(i)
        wanted = list(rows)
        if None in self._stack.primary.locate(wanted):
            # The coldest chunks may be pinned by these very batches, so that others have to go.
            count = _BATCHES_IN_FLIGHT * self._batch_chunks(group_idx)
            self._record_victims(group_idx, count, 0.0 if self._is_stalled else _STALL_SECONDS)
        reservation = self._stack.reserve_load([(group_idx, wanted)], partial=True)
        if reservation is None or not reservation.keys[0]:
            return None
        found = [rows[key] for key in reservation.keys[0]]
        return _Batch(self._loop.start_load(reservation), found)

    def _finish_first(
        self, in_flight: list[_Batch], group_idx: int, out: Rows, found: list[bool]
    ) -> None:
        batch = in_flight[0]
        failed = self._loop.wait_for(batch.load)
        # The slots are pinned or still arriving, so their bytes stay in place until finish_load.
        spec, slots = self._specs[group_idx], batch.load.reservation.slots[0]
        for start, stop in adjacent_runs(slots, spec.slot_bytes):
            source = slot_rows(self._executor.pool.array, spec, int(slots[start]), stop - start)
            for chunk, slot, rows in zip(
                source, slots[start:stop].tolist(), batch.rows[start:stop], strict=True
            ):
                if slot not in failed:
                    for row in rows:
                        out[row][:] = chunk
                        found[row] = True
        self._loop.finish_load(batch.load)
        in_flight[:1] = self._retry(batch)

    def _retry(self, batch: _Batch) -> list[_Batch]:
        """Load what a batch did not bring from another tier that has it, if any does."""
        assert batch.load.done is not None, "the load is not answered yet"
        again = self._stack.retry_load(batch.load.reservation, batch.load.done)
        if again is None:
            return []
        rows = dict(zip(batch.load.reservation.keys[0], batch.rows, strict=True))
        return [_Batch(self._loop.start_load(again), [rows[key] for key in again.keys[0]])]

    def _batch_chunks(self, group_idx: int) -> int:
        spec = self._specs[group_idx]
        # The batches of a get, or one of a put and the write-behind queue, fill half of the tier.
        share = self._config.primary.capacity_bytes // (
            2 * _BATCHES_IN_FLIGHT * max(1, len(self._config.secondary))
        )
        # What a write queue cannot hold of a batch would be dropped.
        queues = (tier.io.write_queue_bytes for tier in self._config.secondary)
        return max(1, min(_BATCH_BYTES, share, *queues) // spec.slot_bytes)
