"""TierStore: both planes in one process, for embedded use and for tools.

put:  keys -> slots (copied from the caller's array) -> resident -> cascade
get:  resident or promoted slots -> copied to the caller's array
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from tierstore.arrays import ChunkRows, WritableChunkRows, byte_rows, one_group
from tierstore.backend.opening import BackendOpener, backend_opener
from tierstore.config import StoreConfig
from tierstore.embedded.answers import PrefixMatch, StoreStats
from tierstore.embedded.batched_put import BatchedPut
from tierstore.embedded.batches import batch_chunks
from tierstore.embedded.pipelined_get import Retrieval
from tierstore.embedded.planes import Patience, Planes
from tierstore.embedded.store_input import no_memory, require_arguments, require_config
from tierstore.errors import BackendError
from tierstore.executor import TransferExecutor
from tierstore.faults import SystemOpener, open_system
from tierstore.key import OffloadKey, require_keys
from tierstore.manifest import Manifest
from tierstore.metrics import Counters
from tierstore.native.library import find_library
from tierstore.tier.opening import open_stack
from tierstore.tier.pending_read import PendingRead
from tierstore.tier.secondary import SecondaryTier
from tierstore.tier.stack import TierStack

__all__ = ["TierStore"]

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")


def _alone(
    method: Callable[Concatenate["TierStore", Parameters], Answer],
) -> Callable[Concatenate["TierStore", Parameters], Answer]:
    """Make a method one call of the store: `Planes.run`."""

    @wraps(method)
    def call(self: "TierStore", /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Answer:
        try:
            return self._planes.run(partial(method, self, *args, **kwargs))
        except MemoryError as error:
            raise no_memory(error) from error

    return call


class TierStore:
    """A store of KV-cache chunks in host memory and on disk.

    Thread-safe. One call runs at a time, except where it waits for a tier: for a read, for room in
    a write queue, for a flush, for a catalog. Others run meanwhile, so that what is in memory is
    put and got without waiting for any disk. Between two such points a call is atomic; `get` and
    `put` are so for each batch of chunks, not for all of them. A `get` waits for chunks that
    another one brings already; if a `reset` comes meanwhile, it finds what was there before, or
    nothing.

    Chunks of one prefix are given head first. What waits to be written when a call returns is
    written without a further call.

    A call from within a call of the same thread (a signal handler, a `__del__`, a log handler) or
    from a thread that does the store's I/O raises `ReentryError` and changes nothing; `close` from
    within a call closes when that call ends. An exception that such code lets through while the
    call is changing the tiers, and an interruption, leave in doubt what they hold: the store then
    refuses all calls but `close` with `ClosedError`.

    Where the system has no memory left for a call, it raises `ConfigError`.

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
        tiers = [
            f"{tier.name} ({tier.path if tier.is_on_disk else tier.tier})"
            for tier in config.secondary
        ]
        self._planes = Planes(
            stack,
            executor,
            counters,
            label=f"tiers: {', '.join(['memory', *tiers])}",
            patience=self._patience,
        )
        self._loop = self._planes.loop
        self._pool = executor.pool.array
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
        Tests replace `open_system` to let devices fail, `open_backend` to let backends fail (None:
        those of the configuration), and `patience` to wait less.

        Raises:
            TypeError: `manifest`, a function or `patience` is of another type.
            ConfigError: the configuration is wrong, or the system cannot allocate
                `primary.capacity` bytes.
            CatalogError, ManifestError, BackendError: a secondary tier cannot be opened.
        """
        opener = open_backend if open_backend is not None else backend_opener(open_system)
        require_arguments(manifest, patience, open_backend=opener, open_system=open_system)
        checked = require_config(config)
        try:
            return cls._open(checked, manifest, opener, open_system, patience)
        except MemoryError as error:
            raise no_memory(error) from error

    @classmethod
    def _open(
        cls,
        config: StoreConfig,
        manifest: Manifest,
        open_backend: BackendOpener,
        open_system: SystemOpener,
        patience: Patience | None,
    ) -> Self:
        counters = Counters()
        with ExitStack() as undo:
            stack = open_stack(
                config, manifest, rank_count=1, counters=counters, open_system=open_system
            )
            undo.callback(stack.close)
            executor = TransferExecutor.open(
                config,
                manifest,
                rank=0,
                rank_count=1,
                caches=None,
                counters=counters,
                open_backend=open_backend,
            )
            undo.callback(executor.close)
            store = cls(config, manifest, stack, executor, counters, patience=patience)
            undo.pop_all()
        try:
            store._planes.open()
        except BaseException:
            store.close()
            raise
        return store

    @_alone
    def put(self, keys: Sequence[OffloadKey], array: ChunkRows) -> list[bool]:
        """Store chunks; returns for each key whether the store has that chunk now.

        `array` has one row per key (`ChunkRows`). All keys are of one group. Chunks that are there
        already are touched, not written again.
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
        put = BatchedPut(
            self._planes, self._stack, self._patience.put_seconds, self._pool, self._specs
        )
        return put.run(group_idx, keys, rows, batch_chunks(self._config, self._specs[group_idx]))

    @_alone
    def get(self, keys: Sequence[OffloadKey], out: WritableChunkRows) -> list[bool]:
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
        retrieval = Retrieval(
            self._planes, self._stack, self._patience.put_seconds, self._pool, self._specs
        )
        per_batch = batch_chunks(self._config, self._specs[group_idx])
        return retrieval.run(group_idx, keys, rows, per_batch)

    @_alone
    def match_prefix(self, keys: Sequence[OffloadKey]) -> PrefixMatch:
        """Count the leading keys for which `get` would answer True; loads and touches nothing.

        Raises:
            TypeError, ValueError: no keys, or keys of another namespace.
            ReentryError: from within another call.
            ClosedError: after `close`.
        """
        keys = require_keys(keys, self._manifest.namespace)
        self._planes.is_changing = True
        self._loop.pump()
        self._loop.look_ahead(keys)
        return PrefixMatch(self._stack.match_prefix(keys))

    @_alone
    def flush(self) -> None:
        """Bring every accepted chunk to the tiers whose rule admits it, and these to the device.

        `on_evict` tiers receive all chunks in memory that they do not have yet. What could not be
        written before is tried again. What was written is written again if its file is gone: a
        look at each file that was used, about 2 us. What is lost again meanwhile is written up to
        three times. What has been changed in a file is not seen.

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
        readings = self._ask(lambda tier: tier.stats())
        return StoreStats(
            primary_chunk_count=len(self._stack.primary),
            primary_capacity_bytes=self._config.primary.capacity_bytes,
            secondary={name: read.answer() for name, read in zip(names, readings, strict=True)},
            counters=self._counters.snapshot(),
            why_interpreted=find_library().why,
        )

    @_alone
    def check(self) -> list[str]:
        """Verify the invariants of all tiers; returns the problems in words, empty when sound.

        Waits for what is on its way, and then for the catalogs, as long as they move and for
        `Patience.check_seconds` otherwise. A catalog that does not answer is a problem, too.

        Raises:
            ReentryError: from within another call.
            ClosedError: after `close`.
        """
        self._planes.is_changing = True
        self._loop.settle(lambda: not self._stack.has_work(), self._patience.check_seconds)
        problems = self._stack.check_memory()
        names = [tier.name for tier in self._config.secondary]
        for name, reading in zip(names, self._ask(lambda tier: tier.check()), strict=True):
            try:
                problems += reading.answer()
            except BackendError as error:
                problems.append(f"tier {name} cannot be checked: {error}")
        return problems

    def close(self) -> None:
        """Flush, stop the threads, release the memory; idempotent.

        Other threads' calls then raise `ClosedError`. From within a call of the same thread, the
        store closes when that call ends. A forked process has nothing to close.

        Tiers that move are flushed to their end. Whatever hangs, the call takes no longer than
        `Patience.close_seconds` after the last movement, or after its begin. What is lost is
        logged: in which tier, how many chunks, and why.

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

    def _ask(self, read: Callable[[SecondaryTier], Answer]) -> list[PendingRead[Answer]]:
        """Ask the catalogs, while others call; those that hang are not waited for long."""
        readings = self._planes.reader.ask(read)
        self._loop.settle_within(
            lambda: all(reading.is_done for reading in readings), self._patience.check_seconds
        )
        return readings
