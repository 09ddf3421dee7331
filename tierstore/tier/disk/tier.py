"""A secondary tier on this machine: a catalog behind two threads that may wait for its device.

one thread   looks records up (`lookup` over `catalog_reads`)
one thread   writes, in batched transactions (`dispatcher`); its answers wait for `poll`
one thread   opens the catalog, and another one after it was lost (`catalog_keeper`)
"""

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from tierstore.backend.protocol import LostFinder
from tierstore.bounded_log import bounded
from tierstore.catalog.catalog import Catalog
from tierstore.catalog.messages import (
    CommitTicket,
    Evict,
    LosePayload,
    Operation,
    ReleaseDone,
    RemoveKeys,
    RequestPlaces,
    SweepGarbage,
    TouchKeys,
)
from tierstore.clock import MonotonicClock
from tierstore.codec.opening import open_codec
from tierstore.config import SecondaryConfig
from tierstore.device.system import SystemCalls
from tierstore.errors import BackendError, CatalogError, ClosedError
from tierstore.geometry import SpaceGeometry
from tierstore.key import OffloadKey
from tierstore.manifest import Manifest
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.tier.disk.catalog_keeper import KeeperPace
from tierstore.tier.disk.flushes import CatalogFlushes
from tierstore.tier.disk.lookup import Lookups
from tierstore.tier.disk.pins import Pins
from tierstore.tier.disk.resets import Resets
from tierstore.tier.disk.served_catalog import ServedCatalog
from tierstore.tier.disk.threads import CatalogThreads, NotOpenError
from tierstore.tier.disk.touches import Touches
from tierstore.tier.reservation import ChunkState
from tierstore.tier.secondary import HiddenListener, LossListener
from tierstore.tier_events import SecondaryEvent, SecondaryStats
from tierstore.transfer import Place

__all__ = ["DiskTier"]

_logger = bounded(logging.getLogger(__name__))

_CLOSE_SECONDS = 30.0
_ADVICE_WAITING_MAX = 1024
"""Uses and removals are dropped while so many operations wait for the catalog: queued, they would
take memory for as long as another process holds it."""


class DiskTier:
    """The records of one tier in a catalog on this machine. See `SecondaryTier`.

    Several processes may open the same path: they share the catalog, each appends to segments of
    its own, and the capacity holds for all of them together.

    A tier whose device fails, or whose path is lost, has no catalog until it can be opened again:
    nothing is found in it, and requests are refused.
    """

    def __init__(
        self,
        config: SecondaryConfig,
        manifest: Manifest,
        *,
        tier_idx: int,
        rank_count: int,
        system: SystemCalls | None = None,
        lookup_seconds_max: float | None = None,
        on_opened: Callable[[Catalog], None] | None = None,
        pace: KeeperPace | None = None,
    ) -> None:
        """Describe the tier; open it by `begin` and `wait_open`.

        `system` is what the configuration says unless it is given. `lookup_seconds_max` bounds what
        `locate` waits for, by default as a read of this tier. `on_opened` is told of each opening
        of its catalog, in the thread that calls `poll` or `wait_open`.

        Raises:
            ConfigError: the capacity is too small for the catalog and one segment, or the key file
                cannot be used.
            MissingExtraError: keyed records are wanted, and `cryptography` is not installed.
        """
        open_codec(config, manifest)  # only checked: the data planes need it
        self._config = config
        self._geometry = SpaceGeometry.of(config, manifest, rank_count)
        self._name = name = f"{tier_idx}-{config.name}"
        clock = MonotonicClock()
        self.pins = Pins()
        """Records that this process does not evict while they are read."""
        self._threads = CatalogThreads(
            name,
            config,
            manifest,
            rank_count=rank_count,
            system=system,
            pins=self.pins,
            clock=clock,
            pace=pace,
        )
        self._lookups = Lookups(
            self._threads.locate,
            self._threads.reads,
            places_seconds_max=lookup_seconds_max or config.io.deadline_seconds,
        )
        self._served = ServedCatalog(self._threads.dispatcher, self._lookups.reset, on_opened)
        self._resets = Resets(manifest, self._threads)
        self._flushes = CatalogFlushes(config.name, self._threads, self._resets)
        self._touches = Touches(clock, self._offer)
        self._is_closed = False

    def begin(self) -> None:
        """Start the threads, which open the catalog."""
        self._threads.begin()

    def wait_open(self, seconds: float) -> None:
        """Wait for the first try to open the catalog, for so long at most.

        Raises:
            TierStoreError: the user has to change something; nothing is tried any more.
        """
        self._threads.wait_open(seconds)
        self._served.follow()

    @property
    def is_open(self) -> bool:
        """Whether the tier has its catalog now; without it, nothing is found nor stored."""
        return self._threads.opened is not None

    @property
    def is_stuck(self) -> bool:
        """Whether a lookup hangs in the device: nothing is found until it has ended."""
        return self._lookups.is_stuck

    @property
    def complaint(self) -> str:
        """Why there is no catalog, or why it did not do what it was last told; empty: it did."""
        return self._threads.complaint

    @property
    def change_count(self) -> int:
        """How often the catalog in use was lost or opened, as `poll` and `wait` have found."""
        return self._served.change_count

    @property
    def owner(self) -> int:
        """Whose places `Placed` names; the data planes keep this owner alive (`catalog.owners`)."""
        return self._served.owner

    def locate(self, keys: Sequence[OffloadKey]) -> list[Place | None]:
        """Return the place of each recorded key; about 1.5 us per key, and 50 us for the thread.

        Nothing is found where the bounded time is too short, or without a catalog.
        """
        if not self.is_open or self._resets.is_pending:
            return [None] * len(keys)
        return self._lookups.places(keys)

    def tell_of_hidden(self, listener: HiddenListener) -> None:
        """Call `listener` with the keys that `locate` and `states` could not look up."""
        self._lookups.on_hidden = listener

    def tell_of_loss(self, listener: LossListener) -> None:
        """Call `listener` when the catalog in use was lost, with its records."""
        self._served.on_lost = listener

    def look_ahead(self, keys: Sequence[OffloadKey]) -> Callable[[], None] | None:
        """Begin to look up what `locate` is asked for next (`Lookups.look_ahead`)."""
        is_found = self.is_open and not self._resets.is_pending
        return self._lookups.look_ahead(keys) if is_found else None

    def states(self, keys: Sequence[OffloadKey]) -> list[ChunkState]:
        """Return of each key whether it is recorded, absent, or (arriving) being looked up.

        Waits for the answer about a few keys. Many are looked up in the background: LMDB gives the
        interpreter away with every key, so that 512 would take 0.8 ms of the step at best.
        """
        if not self.is_open or self._resets.is_pending:
            return [ChunkState.ABSENT] * len(keys)
        return self._lookups.states(keys)

    def request_places(
        self,
        ticket: int,
        keys: Sequence[OffloadKey],
        payload_bytes: int,
        use: UseContext = UNKNOWN_USE,
    ) -> None:
        """Ask for one place per key; evicts the least recently used as needed.

        Waits, in the queue, until the bytes of victims were given back. Keys that are being written
        are left out, and those that are recorded, but not in what `take_lost` has found.
        """
        del use  # the catalog's order is recency
        # Answered later: reserving here would wait for LMDB's writer lock in the scheduler's
        # thread, and other processes hold that lock, too.
        self._put(RequestPlaces(ticket, tuple(keys), payload_bytes))

    def commit(self, ticket: int, failed: Collection[int] = ()) -> None:
        """Publish the records of a `Placed`, but for those that could not be written (by index)."""
        self._put(CommitTicket(ticket, frozenset(failed)))

    def touch(self, keys: Sequence[OffloadKey], *, use: UseContext = UNKNOWN_USE) -> None:
        """Record one use of each key, tail first: it becomes the last to be evicted.

        Uses wait a moment for others (`touches`); whatever could see the order comes after them.
        Dropped while too much waits for the catalog.
        """
        del use
        self._touches.add(keys)

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        """Keep this process from evicting records (counted); others may."""
        self.pins.pin(keys)

    def unpin(self, keys: Sequence[OffloadKey]) -> None:
        """Undo one `pin` per key."""
        self.pins.unpin(keys)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget records (corrupt, or absent in the file) and free their places.

        Dropped while too much waits for the catalog, or it fails: the next read finds them again.
        """
        self._lookups.forget(keys)
        self._touches.put()
        self._offer(RemoveKeys(tuple(keys)))

    def reset(self, manifest: Manifest) -> None:
        """Make every record of this tier's manifest unreachable at once, and free their bytes.

        In one transaction, however many there are. Requests that wait are refused.
        """
        self._lookups.reset()
        self._resets.begin(manifest, self._put)

    def make_way(self, chunk_count: int, payload_bytes: int) -> None:
        """Evict as much as so many chunks take, although there is room for them."""
        self._put(Evict(chunk_count * self._geometry.stride_pages(payload_bytes)))

    def is_settled(self) -> bool:
        """Return whether the writer has done all that is queued, and `poll` has nothing."""
        # In this order: what the writer does leaves events behind before it is idle.
        return self._threads.wait_idle(0) and not self._served.has_answers()

    def released(self, release_id: int) -> None:
        """Confirm a `Freed`: every rank has given the bytes back; only now they may be reused."""
        self._put(ReleaseDone(release_id))

    def poll(self) -> list[SecondaryEvent]:
        """Return the events since the last call; never blocks."""
        self._lookups.end_step()
        self._touches.put_if_due()
        self._served.follow()
        polled = self._served.take_answers()
        self._lookups.hear(polled)
        opened = self._served.opened
        if not polled and opened is not None and self._threads.wait_idle(0):
            if opened.writer.waiting or opened.writer.is_due:
                # Another process may have given the bytes back that a request waits for, and a
                # reset that failed hides the tier until it is done.
                self._put(Evict())
            elif opened.writer.has_garbage:
                self._put(SweepGarbage())
        return polled

    def has_messages(self) -> bool:
        """Return whether `poll` has something to return, or will have without being asked."""
        return bool(self._touches) or not self.is_settled()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until the writer has done all that is queued and doable.

        False: time is up, or there is no catalog, or one that is lost.
        """
        self._touches.put()
        is_idle = self._threads.wait_idle(timeout_seconds)
        self._served.follow()
        return is_idle and self.is_open and not self.is_lost

    @property
    def is_lost(self) -> bool:
        """Whether `sync` has found the catalog lost, and it is not given up yet."""
        return self._flushes.is_lost

    def stats(self) -> SecondaryStats:
        """Count records and bytes; without a catalog nothing is known.

        Raises:
            BackendError: the catalog cannot be read, or does not answer.
            CatalogError: the catalog is damaged.
        """
        with suppress(NotOpenError):
            return self._threads.catalog.stats()
        return SecondaryStats.unknown(self._config.capacity_bytes)

    def check(self) -> list[str]:
        """Verify the catalog's invariants; return the violations in words (empty: sound).

        That the catalog cannot be verified is a violation.
        """
        try:
            return self._threads.catalog.check()
        except (BackendError, CatalogError, ClosedError) as error:
            return [str(error)]

    def sync(self, find_lost: LostFinder | None = None) -> None:
        """Flush the catalog to the device (`CatalogFlushes.sync`); for a thread that may wait.

        Raises:
            BackendError: the device refused, or there is no catalog, or it lacks a reset.
        """
        self._flushes.sync(find_lost, self._config.io.deadline_seconds)

    def take_lost(self) -> bool:
        """Return whether `sync` has found payload gone, once.

        What was recorded there until now is recorded again when it is asked for.
        """
        segments = self._flushes.take_lost()
        if segments:
            self._put(LosePayload(segments))
        return bool(segments)

    def close(self, timeout_seconds: float | None = None) -> None:
        """Finish the queue, sync the catalog to the device, stop the threads; idempotent.

        Waits half a minute by default. What hangs then in its device is left to its thread.
        """
        if self._is_closed:
            return
        self._is_closed = True
        seconds = _CLOSE_SECONDS if timeout_seconds is None else timeout_seconds
        self._touches.put()
        if not self._threads.close(seconds):
            _logger.error("catalog thread hangs: tier=%s; its device does not answer", self._name)

    def _put(self, operation: Operation) -> None:
        self._touches.put()
        self._threads.put(operation)

    def _offer(self, advice: TouchKeys | RemoveKeys) -> None:
        self._threads.offer(advice, _ADVICE_WAITING_MAX)
