"""The control half of one secondary tier: its catalog, behind a mailbox."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from tierstore.clock import MonotonicClock
from tierstore.config import SecondaryConfig
from tierstore.errors import BackendError, CatalogError, ClosedError
from tierstore.io_pool import Mailbox
from tierstore.key import OffloadKey
from tierstore.manifest import Manifest
from tierstore.system import SystemCalls
from tierstore.tier.catalog import Catalog, SecondaryStats
from tierstore.tier.catalog_messages import (
    BeginEpoch,
    CommitTicket,
    Evict,
    ForgetNamespace,
    Freed,
    Leave,
    Operation,
    ReleaseDone,
    RemoveKeys,
    RequestPlaces,
    SecondaryEvent,
    SweepGarbage,
    TouchKeys,
)
from tierstore.tier.catalog_writer import CatalogWriter
from tierstore.tier.lookup import Lookups
from tierstore.tier.reservation import ChunkState
from tierstore.transfer import Place

__all__ = ["SecondaryTier"]

_logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 30.0
_LOOK_SECONDS = 0.01
"""Between two looks of `close` whether others have left the catalog."""
_ADVICE_WAITING_MAX = 1024
"""A catalog that is slower than its callers hears no more of uses and of worthless records."""
_TOUCH_SECONDS = 0.1
_TOUCH_KEYS_MAX = 512


class SecondaryTier:
    """Which keys have a record, where, and in which order they leave.

    Reads (`locate`) are one LMDB read transaction in the calling thread; an engine's step, which
    must not wait, asks for the `states` of many keys instead. Everything that writes is queued and
    done by one writer thread per process in batched transactions; its answers are collected by
    `poll`. Several processes may open the same path: they share the catalog, each appends to
    segments of its own, and the capacity holds for all of them together.
    """

    def __init__(self, catalog: Catalog, manifest: Manifest, name: str) -> None:
        self._catalog = catalog
        self._namespace = manifest.namespace
        self._name = name
        self._pins: Counter[OffloadKey] = Counter()
        self._clock = MonotonicClock()
        self._writer = CatalogWriter(catalog, self._pins, self._clock)
        self._mailbox: Mailbox[Operation] = Mailbox(f"catalog-{name}", self._writer.handle)
        self._lookups = Lookups(self._look_up, name)
        self._touched: list[OffloadKey] = []
        self._touched_at = 0.0
        self._hidden_until = 0
        """Nothing is located before so many namespaces are forgotten."""
        self._is_closed = False
        self._users: set[int] = set()
        """Threads of others that are in the catalog now, so that it must not be closed."""
        self._is_failing = False

    @classmethod
    def open(
        cls,
        config: SecondaryConfig,
        manifest: Manifest,
        *,
        tier_idx: int,
        rank_count: int,
        system: SystemCalls | None = None,
    ) -> Self:
        """Open or create the catalog, recover what a killed process left, start the writer.

        `system` is what the configuration says unless it is given.

        Raises:
            CatalogError: the catalog cannot be opened; the message says what to do.
            ManifestError: the path holds a manifest of the same namespace with other contents.
            ConfigError: the capacity is too small for the catalog and one segment, or the path
                belongs to another kind of tier.
        """
        catalog = Catalog.open(config, manifest, rank_count=rank_count, system=system)
        tier = cls(catalog, manifest, f"{tier_idx}-{config.name}")
        tier._writer.recover()
        tier._mailbox.open()
        tier._lookups.open()
        return tier

    @property
    def owner(self) -> int:
        """Whose places `Placed` names; the data planes hold him alive (`tier.owners`)."""
        return self._catalog.owner

    @property
    def damage(self) -> str:
        """Why the catalog was started anew when it was opened; empty: it was not."""
        return self._catalog.damage

    @property
    def failure(self) -> str:
        """Why the catalog did not do what it was last told; empty: it did."""
        return self._writer.failure

    @property
    def is_foreign(self) -> bool:
        """Whether the path knew other identities alone when it was opened."""
        return self._catalog.is_foreign

    def locate(self, keys: Sequence[OffloadKey]) -> list[Place | None]:
        """Return the place of each recorded key; one read transaction, about 1.5 us per key."""
        if self._writer.forgotten_count < self._hidden_until:
            return [None] * len(keys)
        return self._lookups.places(keys)

    def states(self, keys: Sequence[OffloadKey]) -> list[ChunkState]:
        """Return of each key whether it is recorded, absent, or (arriving) being looked up still.

        Costs a step a few lookups at most: a thread does the others until the question is repeated.
        """
        if self._writer.forgotten_count < self._hidden_until:
            return [ChunkState.ABSENT] * len(keys)
        return self._lookups.states(keys)

    def on_recorded(self, keys: Sequence[OffloadKey]) -> None:
        """Take note that a commit of these keys was carried out."""
        self._lookups.forget(keys)

    def _look_up(self, keys: Sequence[OffloadKey]) -> list[Place | None]:
        try:
            return self._catalog.locate(keys)
        except BackendError as error:
            if not self._is_failing:
                self._is_failing = True
                _logger.warning("locate failed: tier=%s cause=%s", self._name, error)
            return [None] * len(keys)

    def request_places(self, ticket: int, keys: Sequence[OffloadKey], payload_bytes: int) -> None:
        """Ask for one place per key, all of `payload_bytes`; answered by `Placed` or `Refused`.

        Evicts in the tier's order as needed; waits (in the queue, not the caller) until the bytes
        of victims were given back. Keys that are recorded or being written are left out. A ticket
        with an empty `Placed` needs no `commit`.
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
        if not self._touched:
            self._touched_at = self._clock.seconds()
        self._touched.extend(keys)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget records (corrupt, or absent in the file) and free their places.

        Dropped while too much waits for the catalog, or it fails: the next read finds them again.
        """
        self._lookups.forget(keys)
        self._put_touched()
        self._mailbox.offer(RemoveKeys(tuple(keys)), _ADVICE_WAITING_MAX)

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

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        """Keep this process from evicting records while they are read (counted)."""
        self._pins.update(keys)

    def unpin(self, keys: Sequence[OffloadKey]) -> None:
        """Undo one `pin` per key."""
        pins = self._pins
        pins.subtract(keys)
        for key in set(keys):
            if pins[key] <= 0:
                del pins[key]

    def make_way(self, chunk_count: int, payload_bytes: int) -> None:
        """Evict as much as so many chunks take, although there is room for them.

        For a backend that found none in one piece.
        """
        self._put(Evict(chunk_count * self._catalog.geometry.stride_pages(payload_bytes)))

    def is_settled(self) -> bool:
        """Return whether the writer has done all that is queued, and `poll` has nothing."""
        # In this order: what the writer does leaves events behind before it is idle.
        return self._mailbox.wait_idle(0) and not self._writer.events

    def released(self, release_id: int) -> None:
        """Confirm a `Freed`: every rank has given the bytes back; only now they may be reused."""
        self._put(ReleaseDone(release_id))

    def poll(self) -> list[SecondaryEvent]:
        """Return the events since the last call; never blocks."""
        self._lookups.end_step()
        if self._touched and self._clock.seconds() - self._touched_at > _TOUCH_SECONDS:
            self._put_touched()
        events = self._writer.events
        polled = [events.popleft() for _ in range(len(events))]
        for event in polled:
            if isinstance(event, Freed):
                self._lookups.forget(event.evicted)
        if not polled and self._mailbox.wait_idle(0):
            if self._writer.waiting or self._writer.is_due:
                # Another process may have given the bytes back that a request waits for, and a
                # reset that failed hides the tier until it is done.
                self._put(Evict())
            elif self._writer.has_garbage:
                self._put(SweepGarbage())
        return polled

    def has_messages(self) -> bool:
        """Return whether `poll` has something to return, or will have without being asked."""
        # In this order: what the writer does leaves events behind before it is idle.
        return not self._mailbox.wait_idle(0) or bool(self._writer.events or self._touched)

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until the writer has done all that is queued and doable; False: time is up."""
        self._put_touched()
        return self._mailbox.wait_idle(timeout_seconds)

    def stats(self) -> SecondaryStats:
        """Count records and bytes.

        Raises:
            BackendError: the catalog cannot be read.
            CatalogError: the catalog is damaged.
        """
        with self._in_use():
            return self._catalog.stats()

    def check(self) -> list[str]:
        """Verify the catalog's invariants; return the violations in words (empty: sound)."""
        with self._in_use():
            return self._catalog.check()

    def sync(self) -> None:
        """Flush the catalog to the device; for a thread that may wait.

        Raises:
            BackendError: the device refused.
        """
        with self._in_use():
            self._catalog.sync()

    def close(self, timeout_seconds: float | None = None) -> None:
        """Finish the queue, sync the catalog to the device, stop the writer; idempotent.

        Waits for `timeout_seconds` in all, by default half a minute, for its threads and for those
        that read it, and then for its file.
        """
        if self._is_closed:
            return
        self._is_closed = True
        seconds = _CLOSE_SECONDS if timeout_seconds is None else timeout_seconds
        until = self._clock.seconds() + seconds
        self._put(Leave())
        has_ended = self._lookups.close(seconds)
        has_ended &= self._mailbox.close(max(0.0, until - self._clock.seconds()))
        while self._users and self._clock.seconds() < until:
            time.sleep(_LOOK_SECONDS)
        if not has_ended or self._users:  # nobody in the library may find its environment closed
            _logger.error("catalog thread hangs: tier=%s; its device does not answer", self._name)
            return
        try:
            self._catalog.sync()
        except (BackendError, CatalogError) as error:
            _logger.warning("catalog sync failed: tier=%s cause=%s", self._name, error)
        self._catalog.close()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the catalog open for this thread; `close` waits for it."""
        thread_id = threading.get_ident()
        try:
            self._users.add(thread_id)
            if self._is_closed:
                raise ClosedError(f"the tier is closed: {self._name}")
            yield
        finally:
            self._users.discard(thread_id)

    def _put(self, operation: Operation) -> None:
        self._put_touched()
        self._mailbox.put(operation)

    def _put_touched(self) -> None:
        touched, self._touched = self._touched, []
        for start in range(0, len(touched), _TOUCH_KEYS_MAX):
            advice = TouchKeys(tuple(touched[start : start + _TOUCH_KEYS_MAX]))
            self._mailbox.offer(advice, _ADVICE_WAITING_MAX)
