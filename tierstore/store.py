"""TierStore: both planes in one process, for embedded use and for tools.

put:  keys -> slots (copied from the caller's array) -> resident -> cascade
get:  resident or promoted slots -> copied to the caller's array
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import numpy as np

from tierstore.arrays import Rows, adjacent_runs, byte_rows, one_group, slot_rows
from tierstore.backend.opening import BackendOpener, backend_opener
from tierstore.config import StoreConfig, load_config
from tierstore.executor import TransferExecutor
from tierstore.faults import SystemOpener, open_system
from tierstore.key import OffloadKey, require_keys
from tierstore.manifest import Manifest
from tierstore.metrics import Counters
from tierstore.plane_loop import PendingLoad
from tierstore.planes import Patience, Planes
from tierstore.tier.catalog import SecondaryStats
from tierstore.tier.opening import open_stack
from tierstore.tier.reservation import ChunkState, OffloadReservation
from tierstore.tier.stack import TierStack

__all__ = ["PrefixMatch", "StoreStats", "TierStore"]

_BATCH_BYTES = 4 << 20
"""Chunks are put and got in batches of about this size: pins stay few, and the caller's copy of
one batch overlaps the I/O of the next."""

_BATCHES_IN_FLIGHT = 8

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")


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


def _alone(
    method: Callable[Concatenate["TierStore", Parameters], Answer],
) -> Callable[Concatenate["TierStore", Parameters], Answer]:
    """Make a method one call of the store: `Planes.run`."""

    @wraps(method)
    def call(self: "TierStore", /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Answer:
        return self._planes.run(partial(method, self, *args, **kwargs))

    return call


class TierStore:
    """A store of KV-cache chunks in host memory and on disk.

    Thread-safe: one call runs at a time. Chunks of one prefix are given head first. What waits to
    be written when a call returns is written without a further call.

    A call from within a call of the same thread (a signal handler, a `__del__`, a log handler) or
    from a thread that does the store's I/O raises `ReentryError` and changes nothing; `close` from
    within a call closes when that call ends. An exception that such code lets through while the
    call is changing the tiers, and an interruption, leave in doubt what they hold: the store then
    refuses all calls but `close` with `ClosedError`.

    A store that is dropped without `close` warns (`ResourceWarning`) and closes in the background;
    at the interpreter's exit, open stores are closed within `Patience.exit_seconds`.
    """

    def __init__(
        self,
        config: StoreConfig,
        manifest: Manifest,
        stack: TierStack,
        executor: TransferExecutor,
        counters: Counters,
        *,
        patience: Patience | None = None,
    ) -> None:
        """Take over the two planes; use `open`."""
        self._config = config
        self._manifest = manifest
        self._stack = stack
        self._executor = executor
        self._counters = counters
        self._specs = manifest.group_specs()
        self._patience = Patience() if patience is None else patience
        tiers = [f"{tier.name} ({tier.path})" for tier in config.secondary]
        self._planes = Planes(
            stack,
            executor,
            counters,
            label=f"tiers: {', '.join(['memory', *tiers])}",
            patience=self._patience,
        )
        self._loop = self._planes.loop
        weakref.finalize(self, self._planes.abandon).atexit = False

    @classmethod
    def open(
        cls,
        config: StoreConfig | Mapping[str, Any] | str | Path,
        manifest: Manifest,
        *,
        open_backend: BackendOpener | None = None,
        open_system: SystemOpener = open_system,
        patience: Patience | None = None,
    ) -> Self:
        """Open the tiers, creating what does not exist.

        `config` is a parsed configuration, a mapping with the same keys, or a YAML file's path.
        `open_system` is replaced by tests that let devices fail, `open_backend` by those that let
        backends fail (None: those of the configuration), `patience` by impatient ones.

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
        stack = open_stack(
            config, manifest, rank_count=1, counters=counters, open_system=open_system
        )
        try:
            executor = TransferExecutor.open(
                config,
                manifest,
                rank=0,
                rank_count=1,
                caches=None,
                counters=counters,
                open_backend=open_backend or backend_opener(open_system),
            )
        except BaseException:
            stack.close()
            raise
        store = cls(config, manifest, stack, executor, counters, patience=patience)
        try:
            store._planes.open()
        except BaseException:
            store.close()
            raise
        return store

    @_alone
    def put(self, keys: Sequence[OffloadKey], array: object) -> int:
        """Store chunks; returns how many of them the store has now.

        `array` has one row of the group's chunk bytes per key: a C-contiguous numpy array or
        CPU torch tensor of shape (n, chunk_bytes), any dtype of 1 byte, or a sequence of n buffers.
        All keys are of one group. Chunks that are there already are touched, not written again.
        The bytes are copied before the call returns.

        Waits while the write-behind queue of a tier is full, of each tier for itself. Not accepted:
        chunks that pins leave no room for. Chunks that come to a tier whose queue has not moved for
        some seconds keep their place in memory and get no record there (counted as dropped
        demotes) until `flush`.

        Raises:
            TypeError, ValueError: wrong keys or a wrong array; nothing was stored.
            ReentryError: from within another call; nothing was stored.
            ClosedError: after `close`.
        """
        keys = require_keys(keys, self._manifest.namespace)
        group_idx = one_group(keys, self._specs)
        rows = byte_rows(array, len(keys), self._specs[group_idx].chunk_bytes)
        per_batch = self._batch_chunks(group_idx)
        self._planes.is_changing = True
        # Tail first, so that what has to go again goes from the tail of the prefix.
        return sum(
            self._put_batch(group_idx, keys[i : i + per_batch], rows[i : i + per_batch])
            for i in range(0, len(keys), per_batch)[::-1]
        )

    @_alone
    def get(self, keys: Sequence[OffloadKey], out: object) -> list[bool]:
        """Load chunks into the rows of `out`; returns for each key whether its row was filled.

        `out` is shaped as the array of `put` and writable. Chunks may come from memory and disk;
        those from disk become resident. A row whose answer is False is left untouched.

        Raises:
            TypeError, ValueError: wrong keys or a wrong `out`; nothing was loaded.
            ReentryError: from within another call; nothing was loaded.
            ClosedError: after `close`.
        """
        keys = require_keys(keys, self._manifest.namespace)
        group_idx = one_group(keys, self._specs)
        rows = byte_rows(out, len(keys), self._specs[group_idx].chunk_bytes, writable=True)
        found = [False] * len(keys)
        # Each chunk is in one batch, or a second one would find it on its way to memory.
        rows_of: dict[OffloadKey, list[int]] = {}
        for i, key in enumerate(keys):
            rows_of.setdefault(key, []).append(i)
        wanted = list(rows_of)
        per_batch = self._batch_chunks(group_idx)
        in_flight: list[_Batch] = []
        self._planes.is_changing = True
        self._loop.finish_left()
        try:
            for i in range(0, len(wanted), per_batch)[::-1]:
                part = wanted[i : i + per_batch]
                batch = self._start_get(group_idx, part, rows_of)
                if batch is None and in_flight:  # perhaps they hold the room that it needs
                    self._finish_first(in_flight, group_idx, rows, found)
                    batch = self._start_get(group_idx, part, rows_of)
                if batch is not None:
                    in_flight.append(batch)
                while len(in_flight) == _BATCHES_IN_FLIGHT:
                    self._finish_first(in_flight, group_idx, rows, found)
            while in_flight:
                self._finish_first(in_flight, group_idx, rows, found)
        finally:
            self._leave(in_flight)  # what an exception has left there
        return found

    @_alone
    def match_prefix(self, keys: Sequence[OffloadKey]) -> PrefixMatch:
        """Count the leading chunks that can be loaded now; loads and touches nothing.

        Raises:
            TypeError, ValueError: no keys, or keys of another namespace.
            ReentryError: from within another call.
            ClosedError: after `close`.
        """
        keys = require_keys(keys, self._manifest.namespace)
        self._planes.is_changing = True
        self._loop.pump()
        return PrefixMatch(self._stack.match_prefix(keys))

    @_alone
    def flush(self) -> None:
        """Bring every accepted chunk to the tiers whose rule admits it, and these to the device.

        `on_evict` tiers receive all chunks in memory that they do not have yet. What could not be
        written before is tried again.

        Raises:
            BackendError: chunks in memory are missing in a tier, whose device refused them or has
                not moved for a minute; the message says which tier, how many, and why. All other
                tiers are flushed.
            ReentryError: from within another call.
            ClosedError: after `close`.
        """
        self._planes.is_changing = True
        self._loop.flush(self._patience.flush_seconds)

    @_alone
    def reset(self) -> None:
        """Forget all chunks of this manifest in all tiers.

        Raises:
            ReentryError: from within another call.
            ClosedError: after `close`.
        """
        self._planes.is_changing = True
        self._stack.reset(self._manifest)
        self._loop.pump()

    @_alone
    def stats(self) -> StoreStats:
        """Count what the store holds and what it did.

        Raises:
            BackendError, CatalogError: a catalog cannot be read.
            ReentryError: from within another call.
            ClosedError: after `close`.
        """
        self._planes.is_changing = True
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

    @_alone
    def check(self) -> list[str]:
        """Verify the invariants of all tiers; returns the problems in words, empty when sound.

        Raises:
            ReentryError: from within another call.
            ClosedError: after `close`.
        """
        self._planes.is_changing = True
        self._loop.settle(lambda: not self._stack.has_work(), self._patience.put_seconds)
        return self._stack.check()

    def close(self) -> None:
        """Flush, stop the threads, release the memory; idempotent.

        Other threads' calls then raise `ClosedError`. From within a call of the same thread, the
        store closes when that call ends. A forked process has nothing to close.

        A tier that moves is flushed to its end. For one that does not, each step (flush, threads,
        catalog) waits for `Patience.close_seconds`: about half a minute for one tier, more if
        several catalogs hang, one after the other. What is lost is logged.

        Raises:
            ReentryError: in a thread that does the store's I/O.
        """
        self._planes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _put_batch(self, group_idx: int, keys: Sequence[OffloadKey], rows: Rows) -> int:
        need_bytes = len(keys) * self._specs[group_idx].chunk_bytes
        stack = self._stack
        self._loop.make_room(group_idx, len(keys), need_bytes, self._patience.put_seconds)
        reservation = stack.reserve_offload(group_idx, keys)
        failed: Sequence[int] = range(len(reservation.keys))
        self._planes.is_changing = False
        try:
            self._fill_slots(reservation, rows)
            failed = ()
        finally:
            self._planes.is_changing = True
            stack.finish_offload(reservation, failed)
            self._planes.is_changing = not failed
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

    def _start_get(
        self, group_idx: int, wanted: Sequence[OffloadKey], rows_of: Mapping[OffloadKey, list[int]]
    ) -> _Batch | None:
        if None in self._stack.primary.locate(wanted):
            # The coldest chunks may be pinned by these very batches, so that others have to go.
            count = _BATCHES_IN_FLIGHT * self._batch_chunks(group_idx)
            self._loop.record_victims(group_idx, count, self._patience.put_seconds)
        reservation = self._stack.reserve_load([(group_idx, wanted)], partial=True)
        if reservation is None or not reservation.keys[0]:
            return None
        rows = [rows_of[key] for key in reservation.keys[0]]
        return _Batch(self._loop.start_load(reservation), rows)

    def _finish_first(
        self, in_flight: list[_Batch], group_idx: int, out: Rows, found: list[bool]
    ) -> None:
        batch = in_flight[0]
        failed = self._loop.wait_for(batch.load)
        self._planes.is_changing = False
        self._copy_out(batch, failed, group_idx, out, found)
        self._planes.is_changing = True
        self._loop.finish_load(batch.load)
        in_flight[:1] = self._retry(batch)

    def _copy_out(
        self, batch: _Batch, failed: set[int], group_idx: int, out: Rows, found: list[bool]
    ) -> None:
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

    def _retry(self, batch: _Batch) -> list[_Batch]:
        """Load what a batch did not bring from another tier that has it, if any does."""
        assert batch.load.done is not None, "the load is not answered yet"
        again = self._stack.retry_load(batch.load.reservation, batch.load.done)
        if again is None:
            return []
        rows = dict(zip(batch.load.reservation.keys[0], batch.rows, strict=True))
        return [_Batch(self._loop.start_load(again), [rows[key] for key in again.keys[0]])]

    def _leave(self, in_flight: list[_Batch]) -> None:
        was_changing, self._planes.is_changing = self._planes.is_changing, True
        for batch in in_flight:
            self._loop.leave(batch.load)
        self._planes.is_changing = was_changing

    def _batch_chunks(self, group_idx: int) -> int:
        spec = self._specs[group_idx]
        # The batches of a get, or one of a put and the write-behind queue, fill half of the tier.
        # From a tier that hangs, those of a get take no more than its share before that is known.
        tier_count = max(1, len(self._config.secondary))
        hung_shares = [tier.io.breaker.hung_share for tier in self._config.secondary]
        part = min([1 / (2 * tier_count), *hung_shares])
        share = int(self._config.primary.capacity_bytes * part) // _BATCHES_IN_FLIGHT
        # What a write queue cannot hold of a batch would be dropped.
        queues = (tier.io.write_queue_bytes for tier in self._config.secondary)
        return max(1, min(_BATCH_BYTES, share, *queues) // spec.slot_bytes)
