"""The control half of one secondary tier: its catalog, behind a mailbox."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress

from tierstore.backend.protocol import LostFinder
from tierstore.bounded_log import bounded
from tierstore.catalog.catalog import Catalog
from tierstore.catalog.messages import (
    BeginEpoch,
    CommitTicket,
    Evict,
    ForgetNamespace,
    Leave,
    LosePayload,
    Operation,
    ReleaseDone,
    RemoveKeys,
    RequestPlaces,
    SweepGarbage,
    TouchKeys,
    take_all,
)
from tierstore.catalog.writer import CatalogWriter
from tierstore.clock import MonotonicClock
from tierstore.codec.opening import open_codec
from tierstore.config import SecondaryConfig
from tierstore.device.system import SystemCalls
from tierstore.errors import BackendError, CatalogError, ClosedError
from tierstore.geometry import SpaceGeometry
from tierstore.io_pool import Mailbox
from tierstore.key import OffloadKey
from tierstore.manifest import Manifest
from tierstore.tier.disk.desk import CatalogDesk, CatalogEnd, DeskItem
from tierstore.tier.disk.keeper import CatalogKeeper, CatalogNews, KeeperPace, OpenCatalog
from tierstore.tier.disk.lookup import Hidden, Lookups
from tierstore.tier.disk.pins import Pins
from tierstore.tier.disk.reads import CatalogReads
from tierstore.tier.disk.touches import Touches
from tierstore.tier.reservation import ChunkState
from tierstore.tier_events import Evicted, SecondaryEvent, SecondaryStats
from tierstore.transfer import Place

__all__ = ["SecondaryTier"]

_logger = bounded(logging.getLogger(__name__))

_CLOSE_SECONDS = 30.0
_ADVICE_WAITING_MAX = 1024
"""A catalog that is slower than its callers hears no more of uses and of worthless records."""


class _NotOpenError(BackendError):
    """The tier has no catalog now."""


class SecondaryTier:
    """Which keys have a record, where, and in which order they leave.

    Reads are done by one thread, for which a caller waits a bounded time (`lookup`). Everything
    that writes is queued and done by another one in batched transactions; its answers are collected
    by `poll`. Several processes may open the same path: they share the catalog, each appends to
    segments of its own, and the capacity holds for all of them together.

    A tier whose device fails, or whose path is lost, has no catalog until it can be opened: then
    nothing is found in it, requests are refused, and a third thread tries to open it.
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
        """Describe the tier; to be opened by `begin` and `wait_open`.

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
        self._manifest = manifest
        self._rank_count = rank_count
        self._system = system
        self._geometry = SpaceGeometry.of(config, manifest, rank_count)
        self._namespace = manifest.namespace
        self._name = name = f"{tier_idx}-{config.name}"
        self.pins = Pins()
        """Records that this process does not evict while they are read."""
        self._clock = MonotonicClock()
        self._reads = CatalogReads(f"lookup-{name}")
        self._lookups = Lookups(
            self._look_up,
            self._reads,
            places_seconds_max=lookup_seconds_max or config.io.deadline_seconds,
        )
        if pace is None:
            # Each search of an lmdb tier opens its databases, and what is in them is bounded.
            searches_once = config.backend == "lmdb"
            pace = KeeperPace(orphans_seconds=math.inf) if searches_once else KeeperPace()
        self._keeper = CatalogKeeper(config.name, config.path, self._open_catalog, self._hear, pace)
        self._desk = CatalogDesk(config.name, self._reads, self._keeper.look)
        self._mailbox: Mailbox[DeskItem] = Mailbox(f"catalog-{name}", self._desk.handle)
        self._on_opened = on_opened
        self.on_lost: Callable[[], None] = _nothing
        """Called by `poll` and `wait` when the catalog in use was lost, with its records."""
        self.change_count = 0
        """How often the catalog in use was lost or opened, as `poll` and `wait` have found."""
        self._losing = threading.Lock()
        self._lost: deque[AbstractSet[int]] = deque()
        """Segments, from `sync` to `take_lost`."""
        self._doubted: Catalog | None = None
        """`sync` has found that it is lost; the keeper has not, perhaps."""
        self._served: OpenCatalog | None = None
        """Whose answers `poll` returns: what it is asked for comes from this one."""
        self._owner = 0
        self._touches = Touches(self._clock, self._offer)
        self._hidden_until = 0
        """Nothing is located before so many namespaces are forgotten."""
        self._is_closed = False
        self._is_failing = False

    def begin(self) -> None:
        """Start the threads, which open the catalog; whoever called it closes what was started."""
        self._mailbox.open()
        self._reads.open()
        self._keeper.open()

    def wait_open(self, seconds: float) -> None:
        """Wait for the first try to open the catalog, for so long at most.

        Raises:
            TierStoreError: the user has to mend something; nothing is tried any more.
        """
        self._keeper.wait_first(seconds)
        self._mailbox.wait_idle(max(0.0, seconds))
        self._serve()

    def _open_catalog(self) -> OpenCatalog:
        catalog = Catalog.open(
            self._config, self._manifest, rank_count=self._rank_count, system=self._system
        )
        writer = CatalogWriter(catalog, self.pins, self._clock)
        writer.recover()
        return OpenCatalog(catalog, writer)

    def _hear(self, news: CatalogNews) -> None:
        self._mailbox.put(news)

    @property
    def is_open(self) -> bool:
        """Whether the tier has its catalog now; without it, nothing is found nor stored."""
        return self._desk.opened is not None

    @property
    def is_stuck(self) -> bool:
        """Whether a lookup hangs in the device: nothing is found until it has ended."""
        return self._lookups.is_stuck

    @property
    def complaint(self) -> str:
        """Why the tier is not open; empty: it is."""
        return "" if self.is_open else self._keeper.complaint

    @property
    def owner(self) -> int:
        """Whose places `Placed` names; the data planes hold him alive (`tier.owners`).

        Changes in `poll` and `wait` only, when the catalog was opened; 0: there never was one.
        """
        return self._owner

    @property
    def _catalog(self) -> Catalog:
        opened = self._desk.opened
        if opened is None:
            raise _NotOpenError(f"secondary {self._config.name!r}: {self.complaint}")
        return opened.catalog

    @property
    def failure(self) -> str:
        """Why the catalog did not do what it was last told; empty: it did."""
        opened = self._desk.opened
        return "" if opened is None else opened.writer.failure

    def _serve(self) -> None:
        """Turn to the catalog that is open now, between two calls of `poll`."""
        opened, before = self._desk.opened, self._served
        if opened is before:
            return
        self._served = opened
        self.change_count += 1
        self._lookups.reset()
        if before is not None:
            self.on_lost()
        if opened is not None:
            self._owner = opened.catalog.owner
            if self._on_opened is not None:
                self._on_opened(opened.catalog)

    def locate(self, keys: Sequence[OffloadKey]) -> list[Place | None]:
        """Return the place of each recorded key; about 1.5 us per key, and 50 us for the thread.

        Waits for a bounded time. Nothing is found where that is too short, or without a catalog.
        """
        if not self.is_open or self._desk.forgotten_count < self._hidden_until:
            return [None] * len(keys)
        return self._lookups.places(keys)

    def tell_of_hidden(self, listener: Hidden) -> None:
        """Call `listener` with the keys that `locate` and `states` could not look up."""
        self._lookups.on_hidden = listener

    def look_ahead(self, keys: Sequence[OffloadKey]) -> Callable[[], None] | None:
        """Begin to look up what `locate` is asked for next (`Lookups.look_ahead`)."""
        is_hidden = self._desk.forgotten_count < self._hidden_until
        return self._lookups.look_ahead(keys) if self.is_open and not is_hidden else None

    def states(self, keys: Sequence[OffloadKey]) -> list[ChunkState]:
        """Return of each key whether it is recorded, absent, or (arriving) being looked up still.

        Waits for the answer about a few keys; of many, until the question is repeated, none.
        """
        if not self.is_open or self._desk.forgotten_count < self._hidden_until:
            return [ChunkState.ABSENT] * len(keys)
        return self._lookups.states(keys)

    def on_recorded(self, keys: Sequence[OffloadKey]) -> None:
        """Take note that a commit of these keys was carried out."""
        self._lookups.forget(keys)

    def _look_up(self, keys: Sequence[OffloadKey]) -> list[Place | None]:
        """Look keys up, in the thread that reads; another catalog is closed there, too.

        Raises:
            BackendError, ClosedError: the catalog cannot be read.
        """
        opened = self._desk.opened
        if opened is None:
            return [None] * len(keys)
        try:
            return opened.catalog.locate(keys, self._reads.progressing)
        except (BackendError, ClosedError) as error:
            self._keeper.look()
            if not self._is_failing:
                self._is_failing = True
                _logger.warning("locate failed: tier=%s cause=%s", self._name, error)
            raise

    def request_places(self, ticket: int, keys: Sequence[OffloadKey], payload_bytes: int) -> None:
        """Ask for one place per key, all of `payload_bytes`; answered by `Placed` or `Refused`.

        Evicts in the tier's order as needed; waits (in the queue, not the caller) until the bytes
        of victims were given back. Keys that are recorded, but not in what `take_lost` has found,
        or are being written are left out. A ticket with an empty `Placed` needs no `commit`.
        """
        self._put(RequestPlaces(ticket, tuple(keys), payload_bytes))

    def commit(self, ticket: int, failed: Collection[int] = ()) -> None:
        """Publish the records of a `Placed`, but for those that could not be written (by index)."""
        self._put(CommitTicket(ticket, frozenset(failed)))

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Record one use of each key, tail first: it becomes the last to be evicted.

        Uses wait a moment for others, so that a burst of loads need not share the interpreter with
        the transactions that record it; whatever could see the order comes after them. Dropped
        while too much waits for the catalog.
        """
        self._touches.add(keys)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget records (corrupt, or absent in the file) and free their places.

        Dropped while too much waits for the catalog, or it fails: the next read finds them again.
        """
        self._lookups.forget(keys)
        self._touches.put()
        self._offer(RemoveKeys(tuple(keys)))

    def reset(self, manifest: Manifest) -> None:
        """Make every record of this tier's manifest unreachable at once, and free their bytes.

        One transaction, however many there are. Requests that wait are refused; what is being
        written now will not be published. What comes later is recorded under `manifest`: the same,
        or the next epoch of it.
        """
        self._lookups.reset()
        self._hidden_until += 1
        self._put(ForgetNamespace(self._namespace))
        if manifest.namespace != self._namespace:
            self._namespace = manifest.namespace
            self._put(BeginEpoch(manifest.namespace, manifest.canonical_json))

    def make_way(self, chunk_count: int, payload_bytes: int) -> None:
        """Evict as much as so many chunks take, although there is room for them.

        For a backend that found none in one piece.
        """
        self._put(Evict(chunk_count * self._geometry.stride_pages(payload_bytes)))

    def is_settled(self) -> bool:
        """Return whether the writer has done all that is queued, and `poll` has nothing."""
        # In this order: what the writer does leaves events behind before it is idle.
        return self._mailbox.wait_idle(0) and not self._has_answers()

    def released(self, release_id: int) -> None:
        """Confirm a `Freed`: every rank has given the bytes back; only now they may be reused."""
        self._put(ReleaseDone(release_id))

    def poll(self) -> list[SecondaryEvent]:
        """Return the events since the last call; never blocks."""
        self._lookups.end_step()
        self._touches.put_if_due()
        self._serve()
        polled = take_all(self._desk.answers)
        served = self._served
        if served is not None:
            polled += take_all(served.writer.events)
        for event in polled:
            if isinstance(event, Evicted):
                self._lookups.forget(event.keys)
        if not polled and served is not None and self._mailbox.wait_idle(0):
            if served.writer.waiting or served.writer.is_due:
                # Another process may have given the bytes back that a request waits for, and a
                # reset that failed hides the tier until it is done.
                self._put(Evict())
            elif served.writer.has_garbage:
                self._put(SweepGarbage())
        return polled

    def _has_answers(self) -> bool:
        served = self._served
        return bool(
            self._desk.answers
            or served is not self._desk.opened
            or (served is not None and served.writer.events)
        )

    def has_messages(self) -> bool:
        """Return whether `poll` has something to return, or will have without being asked."""
        return bool(self._touches) or not self.is_settled()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until the writer has done all that is queued and doable.

        False: time is up, or there is no catalog, or one that is lost.
        """
        self._touches.put()
        is_idle = self._mailbox.wait_idle(timeout_seconds)
        self._serve()
        return is_idle and self.is_open and not self.is_lost

    @property
    def is_lost(self) -> bool:
        """Whether `sync` has found the catalog lost, and it is not given up yet."""
        opened = self._desk.opened
        return opened is not None and opened.catalog is self._doubted

    def stats(self) -> SecondaryStats:
        """Count records and bytes; of a tier without its catalog nothing is known.

        Raises:
            BackendError: the catalog cannot be read, or does not answer.
            CatalogError: the catalog is damaged.
        """
        with suppress(_NotOpenError):
            return self._catalog.stats()
        return SecondaryStats.unknown(self._config.capacity_bytes)

    def check(self) -> list[str]:
        """Verify the catalog's invariants; return the violations in words (empty: sound).

        A tier that cannot be verified is none that is sound.
        """
        try:
            return self._catalog.check()
        except (BackendError, CatalogError, ClosedError) as error:
            return [str(error)]

    def sync(self, find_lost: LostFinder | None = None) -> None:
        """Flush the catalog to the device; for a thread that may wait.

        What `find_lost` says (`Backend.lost_segments`) is left for `take_lost`.

        Raises:
            BackendError: the device refused, there is no catalog, or it has not done a reset yet,
                or its path was lost, with what was recorded there.
        """
        if find_lost is not None:
            with self._losing:  # or another flush would find nothing, and end before this one
                self._find_lost(find_lost)
        self._require_reset()
        catalog = self._catalog
        try:
            catalog.sync()
        except ClosedError as error:
            raise BackendError(f"secondary {self._config.name!r}: is closed") from error
        if catalog.is_lost():
            self._doubted = catalog
            self._keeper.look()
            raise BackendError(f"secondary {self._config.name!r}: its path is lost")

    def _find_lost(self, find_lost: LostFinder) -> None:
        opened = self._desk.opened
        relied_on = frozenset[int]() if opened is None else opened.writer.lost.relied_on
        segments = find_lost(relied_on)
        if opened is not None:
            opened.writer.lost.note_looked_for(relied_on)
        if segments:
            with suppress(BackendError, CatalogError, ClosedError):
                segments = self._catalog.segments_in_use(segments)
            self._lost.append(segments)

    def take_lost(self) -> bool:
        """Return whether `sync` has found payload gone, once.

        What was recorded there until now is recorded anew when it is asked for.
        """
        segments = frozenset[int]().union(*take_all(self._lost))
        if segments:
            self._put(LosePayload(segments))
        return bool(segments)

    def _require_reset(self) -> None:
        """Try a reset once more that a failing catalog has not done."""
        if self._desk.forgotten_count >= self._hidden_until:
            return
        with suppress(ClosedError):
            self._mailbox.put(Evict())  # whatever comes, what has failed is tried before it
            self._mailbox.wait_idle(self._config.io.deadline_seconds)
        if self._desk.forgotten_count < self._hidden_until:
            raise BackendError(
                f"secondary {self._config.name!r}: its catalog has not recorded a reset: "
                f"{self.complaint or self.failure}"
            )

    def close(self, timeout_seconds: float | None = None) -> None:
        """Finish the queue, sync the catalog to the device, stop the threads; idempotent.

        Waits for `timeout_seconds` in all, by default half a minute. What hangs then in its device
        is left to its thread.
        """
        if self._is_closed:
            return
        self._is_closed = True
        seconds = _CLOSE_SECONDS if timeout_seconds is None else timeout_seconds
        until = time.monotonic() + seconds
        self._keeper.begin_close()
        self._touches.put()
        # Once nobody reads the catalog any more, it can be closed.
        end = CatalogEnd() if self._reads.close(seconds) else Leave()
        with suppress(ClosedError):  # it was never opened
            self._mailbox.put(end)
        is_ended = self._mailbox.close(max(0.0, until - time.monotonic()))
        is_ended = self._keeper.close(max(0.0, until - time.monotonic())) and is_ended
        if not is_ended or self.is_open:
            _logger.error("catalog thread hangs: tier=%s; its device does not answer", self._name)

    def _put(self, operation: Operation) -> None:
        self._touches.put()
        self._mailbox.put(operation)

    def _offer(self, advice: TouchKeys | RemoveKeys) -> None:
        self._mailbox.offer(advice, _ADVICE_WAITING_MAX)


def _nothing(*_: object) -> None:
    pass
