"""All tiers of one engine, as one place to ask and one place to reserve.

The stack is the control plane below the planner and the embedded store: it knows keys, slots and
places, never bytes. It takes no lock and is called by one thread.
"""

import dataclasses
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from tierstore.bounded_log import bounded
from tierstore.clock import Clock
from tierstore.io_pool import run_side_by_side
from tierstore.key import OffloadKey, get_offload_group_idx
from tierstore.layout import GroupSpec
from tierstore.manifest import Manifest
from tierstore.metrics import Counters, Metric
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.tier.disk.secondary import SecondaryTier
from tierstore.tier.locator import Locator
from tierstore.tier.memory.primary import PrimaryTier
from tierstore.tier.promotion import Promotions
from tierstore.tier.readable import ReadableRecords
from tierstore.tier.reservation import NONE_TRIED, ChunkState, LoadReservation, OffloadReservation
from tierstore.tier.residency import ResidencyLog
from tierstore.tier.write_behind.cascade import Cascade
from tierstore.transfer import Command, IntArray, JobId, Promote, TransferDone

__all__ = ["TierStack"]

_logger = bounded(logging.getLogger(__name__))

_CLOSE_SECONDS = 5.0
_WAITING_SHARE = 0.75
"""Of the time of a close, for the threads of a catalog; the rest is for its file."""

_DEMOTE_AHEAD = 2
"""An `on_evict` tier records the victims of the next reservations ahead, by this many times the
size of the last one, so that a reservation need not wait for a write."""

_PRIMARY_NAME = "primary"
"""The primary tier's label in metrics."""


class TierStack:
    """Primary tier over secondary tiers, with the cascade between them."""

    needs_use = False
    """Whether a policy or an admission goes by the uses that callers tell of."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        primary: PrimaryTier,
        secondaries: Sequence[SecondaryTier],
        cascades: Sequence[Cascade],
        counters: Counters,
        *,
        hung_bytes_max: Sequence[int],
        clock: Clock,
        residency: ResidencyLog | None = None,
    ) -> None:
        """Take over the tiers; `secondaries` and `cascades` are in the order of the config.

        A tier whose hung reads hold more than its `hung_bytes_max` of slots is not asked for more.
        """
        self._groups = groups
        self._primary = primary
        self._secondaries = secondaries
        self._cascades = cascades
        self._counters = counters
        self._evicted_chunks = counters.tally(Metric.EVICTED_CHUNKS, label=_PRIMARY_NAME)
        self._hit_chunks = counters.tally(Metric.HIT_CHUNKS, label=_PRIMARY_NAME)
        self._offloaded_chunks = counters.tally(Metric.OFFLOADED_CHUNKS)
        self._offloaded_bytes = counters.tally(Metric.OFFLOADED_BYTES)
        self._residency = residency
        self._job_ids = itertools.count(1)
        # Chunks that were in flight when the tiers were reset: their bytes must not be found.
        self._doomed: set[OffloadKey] = set()
        records = [
            ReadableRecords(
                tier,
                cascade.health,
                clock,
                counters,
                hung_bytes_max=bytes_max,
                on_removed=cascade.on_erased,
            )
            for tier, cascade, bytes_max in zip(secondaries, cascades, hung_bytes_max, strict=True)
        ]
        self._locator = Locator(primary, records, self._doomed)
        self._promotions = Promotions(
            groups=groups,
            primary=primary,
            secondaries=secondaries,
            records=records,
            cascades=cascades,
            doomed=self._doomed,
            counters=counters,
            residency=residency,
            clock=clock,
        )

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Finish the catalogs' queues and close them, side by side; idempotent.

        Returns after `timeout_seconds` at the latest: catalogs that hang are left to their threads.
        """
        closes = [
            partial(secondary.close, timeout_seconds * _WAITING_SHARE)
            for secondary in self._secondaries
        ]
        if not run_side_by_side(closes, "tierstore-close", timeout_seconds):
            _logger.error("catalogs hang at close: their threads go on closing them")

    @property
    def primary(self) -> PrimaryTier:
        """The primary tier, for its counts and its check."""
        return self._primary

    @property
    def secondaries(self) -> Sequence[SecondaryTier]:
        """The secondary tiers, for their counts and checks."""
        return self._secondaries

    @property
    def cascades(self) -> Sequence[Cascade]:
        """The rules of the secondary tiers, in their order."""
        return self._cascades

    def new_job_id(self) -> JobId:
        """Return an id that was not used before."""
        return JobId(next(self._job_ids))

    def locate(self, keys: Sequence[OffloadKey]) -> list[ChunkState]:
        """Say where each chunk is; changes nothing, touches nothing (`Locator.locate`)."""
        return self._locator.locate(keys)

    def locate_in_step(self, keys: Sequence[OffloadKey]) -> list[ChunkState]:
        """Say where each chunk is, as far as that is known at once (`Locator.locate_in_step`)."""
        return self._locator.locate_in_step(keys)

    def locate_run(self, keys: Sequence[OffloadKey]) -> list[ChunkState]:
        """Say where the chunks of a prefix are up to its first gap (`Locator.locate_run`)."""
        return self._locator.locate_run(keys)

    def look_ahead(
        self, keys: Sequence[OffloadKey], tried: Mapping[OffloadKey, int] = NONE_TRIED
    ) -> list[Callable[[], None]]:
        """Begin to look up what is asked for next (`Locator.look_ahead`)."""
        return self._locator.look_ahead(keys, tried)

    def match_prefix(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many leading chunks can be loaded now (resident or recorded)."""
        return self._locator.match_prefix(keys)

    def touch(self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE) -> None:
        """Record a use of resident chunks of one prefix, head first and each once.

        Others are ignored.
        """
        slots = self._locator.slots(keys)
        resident = [key for key, slot in zip(keys, slots, strict=True) if slot is not None]
        if resident:
            self._touch_resident(resident)

    def reserve_offload(
        self, group_idx: int, keys: Sequence[OffloadKey], *, use: UseContext = UNKNOWN_USE
    ) -> OffloadReservation:
        """Reserve slots for chunks that are not in the primary tier yet.

        Chunks of one prefix come head first. What finds no room (pins) is left out from the tail
        and counted; chunks that are resident already are touched.
        """
        chosen, tail_first = keys, keys[::-1]
        indices: Sequence[int] = range(len(keys))
        if not self._primary.are_new(tail_first):
            self.touch(list(dict.fromkeys(keys)))
            new = self._locator.indices_of_new(keys)
            chosen, indices = list(new), list(new.values())
            tail_first = chosen[::-1]
        reserved = self._reserve(group_idx, tail_first)
        while reserved is None and chosen:
            chosen = chosen[: len(chosen) // 2]
            reserved = self._reserve(group_idx, chosen[::-1])
        self._demote_ahead(group_idx, len(chosen))
        refused_count = len(indices) - len(chosen)
        self._counters.add(Metric.REFUSED_OFFLOADS, refused_count, label="primary_pinned")
        return OffloadReservation(
            group_idx,
            indices[: len(chosen)],
            tuple(chosen),
            np.empty(0, np.int64) if reserved is None else reserved,
        )

    def finish_offload(self, reservation: OffloadReservation, failed: Collection[int] = ()) -> None:
        """Commit the chunks that arrived, abort the failed ones (indices into the reservation)."""
        keys = reservation.keys
        lost = set(failed)
        if lost:
            self._counters.add(Metric.REFUSED_OFFLOADS, len(lost), label="copy_failed")
        if self._doomed:
            lost.update(i for i, key in enumerate(keys) if key in self._doomed)
            self._doomed.difference_update(keys)
        if lost:
            dropped = [keys[i] for i in sorted(lost)]
            self._primary.abort(dropped)
            if self._residency is not None:
                self._residency.lost(dropped)
            keys = tuple(key for i, key in enumerate(keys) if i not in lost)
        chunk_bytes = self._groups[reservation.group_idx].chunk_bytes
        self._offloaded_chunks.add(len(keys))
        self._offloaded_bytes.add(len(keys) * chunk_bytes)
        self._promotions.commit(reservation.group_idx, keys)

    def reserve_load(
        self,
        groups: Sequence[tuple[int, Sequence[OffloadKey]]],
        *,
        partial: bool = False,
        tried: Mapping[OffloadKey, int] = NONE_TRIED,
        use: UseContext = UNKNOWN_USE,
    ) -> LoadReservation | None:
        """Pin resident chunks and reserve slots for recorded ones.

        `groups` are (group index, keys head first, each once). None: a chunk is absent or arriving
        (`partial`: it is left out instead), or pins leave no room for all of them; nothing was
        changed then, but for evictions. `tried`: as `Promotions.find`.
        """
        wanted: list[tuple[Sequence[OffloadKey], list[int | None]]] = []
        found: list[Promote] = []
        pinned: list[OffloadKey] = []
        for group_idx, keys in groups:
            slots = self._pin_found(keys) if self._doomed else self._primary.pin_resident(keys)
            if None not in slots:
                wanted.append((keys, slots))
                pinned.extend(keys)
                continue
            pinned.extend(key for key, slot in zip(keys, slots, strict=True) if slot is not None)
            missing = [key for key, slot in zip(keys, slots, strict=True) if slot is None]
            known = [key for key in missing if not self._locator.is_busy(key)]
            promotes, nowhere = self._promotions.find(group_idx, known, tried)
            found.extend(promotes)
            if nowhere or len(known) < len(missing):
                if not partial:
                    self._primary.unpin(pinned)
                    return None
                lost = set(missing).difference(known).union(nowhere)
                held = [i for i, key in enumerate(keys) if key not in lost]
                wanted.append(([keys[i] for i in held], [slots[i] for i in held]))
            else:
                wanted.append((keys, slots))
        reserved = self._reserve_promotes(found) if found else found
        if reserved is None:
            self._primary.unpin(pinned)
            return None
        job_id = self.new_job_id()
        if reserved:
            self._promotions.begin(job_id, reserved)
        return LoadReservation.of(job_id, wanted, reserved, tuple(pinned))

    def has_room(self, groups: Sequence[tuple[int, Sequence[OffloadKey]]]) -> bool:
        """Return whether `reserve_load` would find room for these chunks now.

        Of every resident or recorded chunk: True holds until the next call that changes something.
        """
        counts: Counter[int] = Counter()
        for group_idx, keys in groups:
            counts[group_idx] += len(keys)
        # The quicker question first: as if what is resident had to come, too.
        if self._primary.has_room(counts):
            return True
        resident: list[OffloadKey] = []
        for group_idx, keys in groups:
            slots = self._primary.locate(keys)
            here = [key for key, slot in zip(keys, slots, strict=True) if slot is not None]
            counts[group_idx] -= len(here)
            resident += here
        return self._primary.has_room(counts, resident)

    def could_hold(self, counts: Mapping[int, int]) -> bool:
        """Return whether so many chunks per group have room if nothing else holds any."""
        return self._primary.could_hold(counts)

    @property
    def is_room_held(self) -> bool:
        """Whether transfers hold room in the primary tier, which comes back when they end."""
        return self._primary.is_room_held

    def _pin_found(self, keys: Sequence[OffloadKey]) -> list[int | None]:
        """Do as `PrimaryTier.pin_resident` with the chunks that can be found."""
        slots = self._locator.slots(keys)
        self._primary.pin([key for key, slot in zip(keys, slots, strict=True) if slot is not None])
        return slots

    def _reserve_promotes(self, found: Sequence[Promote]) -> list[Promote] | None:
        """Give every promote its slots; None: there is no room, and nothing was changed."""
        reserved: list[Promote] = []
        for promote in found:
            slots = self._reserve(promote.group_idx, promote.keys[::-1])
            if slots is None:
                for undone in reserved:
                    self._primary.abort(undone.keys)
                    if self._residency is not None:
                        self._residency.lost(undone.keys)
                return None
            reserved.append(dataclasses.replace(promote, slots=slots))
        for promote in reserved:
            # Not before all of them have their slots: it pins victims, for which room was promised.
            self._demote_ahead(promote.group_idx, len(promote.keys))
        return reserved

    def finish_load(self, reservation: LoadReservation, done: TransferDone) -> None:
        """Take the answer to a load or promote: unpin, commit what came, drop what failed.

        Chunks that missed their deadline are absent from then on, but a hung read may still write
        to their slots: a second answer of the same job, given to `complete`, settles them.
        """
        if reservation.promotes:
            self._promotions.finish(reservation, done)
        self._hit_chunks.add(len(reservation.pinned))
        if self._doomed:
            self._primary.unpin(reservation.pinned)
            self._bury()
            self.touch(reservation.pinned)
        elif reservation.pinned:
            tail_first = reservation.pinned[::-1]
            self._primary.release(tail_first)
            self._tell_of_touch(reservation.pinned, tail_first)

    def retry_load(
        self, reservation: LoadReservation, done: TransferDone
    ) -> LoadReservation | None:
        """Reserve again what a finished load did not bring, from later tiers that have it.

        As `reserve_load` with `partial`. None: no later tier has any of it, or there is no room.
        """
        tried = reservation.failed_tiers(done.failed)
        if all(tier_idx + 1 == len(self._secondaries) for tier_idx in tried.values()):
            return None
        groups = [
            (get_offload_group_idx(chosen[0]), chosen)
            for keys in reservation.keys
            if (chosen := [key for key in keys if key in tried])
        ]
        again = self.reserve_load(groups, partial=True, tried=tried)
        return again if again is not None and any(again.keys) else None

    def commands(self) -> list[Command]:
        """Return the demotes and releases that became possible since the last call."""
        commands = [
            command for cascade in self._cascades for command in cascade.commands(self.new_job_id)
        ]
        self._bury()  # a demote that outlived a reset may have ended
        return commands

    def complete(self, done: TransferDone) -> bool:
        """Take the answer to a command of `commands`, or the late answer to a load.

        False: the job is not one of them.
        """
        if self._promotions.finish_late(done):
            self._bury()
            return True
        return any(cascade.complete(done) for cascade in self._cascades)

    def demote_victims(self, tier_idx: int, group_idx: int, count: int) -> int:
        """Ask an `on_evict` tier to record the chunks that `count` new ones would evict.

        Returns how many of them are not recorded yet: 0 means that they can go without loss. Looks
        past what other tiers or loads have pinned now: what a tier that hangs has pinned stays in
        memory, and others go in its place.
        """
        cascade = self._cascades[tier_idx]
        shortage = count - self._primary.free_count(group_idx)
        if shortage <= 0 or not cascade.records_victims:
            return 0
        victims = self._primary.victims(shortage, cascade.in_flight)
        return cascade.record_victims([key for key in victims if key not in self._doomed])

    def demote_coldest(self, count: int) -> int:
        """Ask every `on_evict` tier to record the `count` coldest chunks.

        Returns how many of them are not recorded yet.
        """
        if not count or not any(cascade.records_victims for cascade in self._cascades):
            return 0
        coldest = self._primary.coldest(count)
        if self._doomed:
            coldest = [key for key in coldest if key not in self._doomed]
        return sum(cascade.record_victims(coldest) for cascade in self._cascades)

    def demote_resident(self, tier_idx: int, keys: Sequence[OffloadKey]) -> int:
        """Ask an `on_evict` tier to record those of some chunks that are in memory.

        Returns how many of them are not recorded yet.
        """
        slots = self._locator.slots(keys)
        resident = [key for key, slot in zip(keys, slots, strict=True) if slot is not None]
        return self._cascades[tier_idx].record_victims(resident)

    def busy(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of some chunks that come or go when a transfer ends."""
        if not self._locator.is_any_busy(keys):
            return []
        return [key for key in keys if self._locator.is_busy(key)]

    def has_work(self) -> bool:
        """Return whether demotes, releases or hung reads are waiting for an answer."""
        return self._promotions.has_late() or any(cascade.has_work() for cascade in self._cascades)

    def is_healing(self) -> bool:
        """Return whether chunks wait for a tier that is out of use: trials go with `commands`."""
        return any(cascade.is_healing for cascade in self._cascades)

    def reset(self, manifest: Manifest, *, keeps_records: bool = False) -> None:
        """Forget all chunks in all tiers (the weights changed); those to come are `manifest`'s.

        Chunks that a transfer holds are unreachable from now on and forgotten when it ends.
        `keeps_records`: only what is in memory or on its way there is forgotten; `manifest` is
        the same as before, and what is being demoted will be recorded.
        """
        for cascade in self._cascades:
            if keeps_records:
                cascade.forget_resident()
            else:
                cascade.cancel()
        if self._residency is not None:
            self._residency.left(self._primary.coldest(len(self._primary)))
        self._doomed.update(self._primary.clear())
        self._doomed.update(self._primary.arriving)
        self._promotions.reset()
        if not keeps_records:
            for secondary in self._secondaries:
                secondary.reset(manifest)

    def doom(self, keys: Iterable[OffloadKey]) -> None:
        """Make chunks that an offload holds unreachable, and forget them when it ends."""
        self._doomed.update(keys)

    def check_memory(self) -> list[str]:
        """Verify the invariants of the primary tier; return the violations in words."""
        return self._primary.check() + self._promotions.check()

    def check(self) -> list[str]:
        """Verify the invariants of all tiers; return the violations in words (empty: sound)."""
        problems = self.check_memory()
        for secondary in self._secondaries:
            problems += secondary.check()
        return problems

    def _reserve(self, group_idx: int, tail_first: Sequence[OffloadKey]) -> IntArray | None:
        """Reserve slots for chunks of one prefix, answered head first."""
        if not tail_first:
            return None
        reservation = self._primary.reserve(group_idx, tail_first)
        if reservation is None:
            return None
        if reservation.evicted:
            self._evicted_chunks.add(len(reservation.evicted))
            if self._residency is not None:
                self._residency.left(reservation.evicted)
            for cascade in self._cascades:
                cascade.on_evicted(reservation.evicted)
        if self._residency is not None:
            self._residency.arriving(tail_first)
        return reservation.slots[::-1]

    def _demote_ahead(self, group_idx: int, count: int) -> None:
        """Let the victims of the next reservations be recorded, by the size of this one."""
        if self._cascades and count:
            shortage = _DEMOTE_AHEAD * count - self._primary.free_count(group_idx)
            self.demote_coldest(max(0, shortage))

    def _bury(self) -> None:
        """Forget doomed chunks that no transfer holds any more."""
        if self._doomed:
            arriving = self._primary.arriving.keys()
            held = self._primary.discard(self._doomed - arriving)
            gone = self._doomed - arriving - set(held)
            self._doomed -= gone
            for cascade in self._cascades:
                cascade.on_buried(gone)

    def _touch_resident(self, keys: Sequence[OffloadKey]) -> None:
        tail_first = keys[::-1]
        self._primary.touch(tail_first)
        self._tell_of_touch(keys, tail_first)

    def _tell_of_touch(self, keys: Sequence[OffloadKey], tail_first: Sequence[OffloadKey]) -> None:
        for cascade in self._cascades:
            cascade.on_touched(keys)
        for secondary in self._secondaries:
            secondary.touch(tail_first)
