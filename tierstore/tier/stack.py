"""All tiers of one engine behind one interface for lookups and reservations.

The stack is the control plane below the planner and the embedded store: it handles keys, slots and
places, never bytes. It takes no lock and is called by one thread. It knows tiers by the protocol
`secondary`: the contracts of imports forbid it `disk` and the catalog.
"""

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from tierstore.bounded_log import bounded
from tierstore.clock import Clock
from tierstore.io_pool import run_side_by_side
from tierstore.key import OffloadKey
from tierstore.layout import GroupSpec
from tierstore.manifest import Manifest
from tierstore.metrics import Counters, Metric
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.tier.cascade import Cascade
from tierstore.tier.intake import Intake
from tierstore.tier.loads import Loads
from tierstore.tier.locator import Locator
from tierstore.tier.memory.primary import PrimaryTier
from tierstore.tier.movement_log import MovementLog
from tierstore.tier.next_victims import NextVictims
from tierstore.tier.promotion import Promotions
from tierstore.tier.readable_records import ReadableRecords
from tierstore.tier.reservation import NONE_TRIED, ChunkState, LoadReservation, OffloadReservation
from tierstore.tier.secondary import SecondaryTier
from tierstore.tier.stale import StaleChunks
from tierstore.tier.uses import Uses
from tierstore.transfer import Command, JobId, TransferDone

__all__ = ["TierStack"]

_logger = bounded(logging.getLogger(__name__))

_CLOSE_SECONDS = 5.0
_WAITING_SHARE = 0.75
"""The share of a close's time for the threads of a catalog; the rest is for its file."""


class TierStack:
    """Primary tier over secondary tiers, with the cascade between them."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        primary: PrimaryTier,
        secondaries: Sequence[SecondaryTier],
        cascades: Sequence[Cascade],
        records: Sequence[ReadableRecords],
        *,
        counters: Counters,
        clock: Clock,
        movements: MovementLog | None = None,
    ) -> None:
        """Take over the tiers; sequences are in the configuration's order of secondary tiers."""
        self._groups = groups
        self._primary = primary
        self._secondaries = secondaries
        self._cascades = cascades
        self._counters = counters
        self._offloaded_chunks = counters.tally(Metric.OFFLOADED_CHUNKS)
        self._offloaded_bytes = counters.tally(Metric.OFFLOADED_BYTES)
        self._movements = movements
        self._job_ids = itertools.count(1)
        self._stale = StaleChunks(primary, cascades)
        self._locator = Locator(primary, records, self._stale.keys)
        self._intake = Intake(primary, cascades, records, counters, movements)
        self._uses = Uses(primary, cascades, secondaries)
        self._victims = NextVictims(primary, cascades, self._locator, self._stale)
        self._promotions = Promotions(
            groups=groups,
            primary=primary,
            secondaries=secondaries,
            records=records,
            cascades=cascades,
            intake=self._intake,
            stale=self._stale.keys,
            counters=counters,
            clock=clock,
        )
        self._loads = Loads(
            primary=primary,
            locator=self._locator,
            promotions=self._promotions,
            intake=self._intake,
            victims=self._victims,
            uses=self._uses,
            stale=self._stale,
            counters=counters,
            new_job_id=self.new_job_id,
        )

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Finish the catalogs' queues and close them, concurrently; idempotent.

        Returns after at most `timeout_seconds`: catalogs that hang are left to their threads.
        """
        closes = [
            partial(secondary.close, timeout_seconds * _WAITING_SHARE)
            for secondary in self._secondaries
        ]
        if not run_side_by_side(closes, "tierstore-close", timeout_seconds):
            _logger.error("catalogs hang at close: their threads continue to close them")

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
        """The ways down into the secondary tiers, in their order."""
        return self._cascades

    def new_job_id(self) -> JobId:
        """Return an id that was not used before."""
        return JobId(next(self._job_ids))

    def states(self, keys: Sequence[OffloadKey]) -> list[ChunkState]:
        """Return where each chunk is, without changing or touching it (`Locator.states`)."""
        return self._locator.states(keys)

    def states_in_step(self, keys: Sequence[OffloadKey]) -> list[ChunkState]:
        """Return where each chunk is, as far as it is known now (`Locator.states_in_step`)."""
        return self._locator.states_in_step(keys)

    def states_of_run(self, keys: Sequence[OffloadKey]) -> list[ChunkState]:
        """Return where the chunks of a prefix are up to its first gap (`Locator.states_of_run`)."""
        return self._locator.states_of_run(keys)

    def look_ahead(
        self, keys: Sequence[OffloadKey], tried: Mapping[OffloadKey, int] = NONE_TRIED
    ) -> list[Callable[[], None]]:
        """Start the lookups that are needed next (`Locator.look_ahead`)."""
        return self._locator.look_ahead(keys, tried)

    def match_prefix(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many leading chunks can be loaded now (resident or recorded)."""
        return self._locator.match_prefix(keys)

    @property
    def needs_use(self) -> bool:
        """Whether a policy or an admission wants uses; if not, callers omit them."""
        return self._primary.needs_use or any(cascade.needs_use for cascade in self._cascades)

    def touch(self, keys: Sequence[OffloadKey], *, use: UseContext = UNKNOWN_USE) -> None:
        """Record a use of resident chunks of one prefix, head first and each once.

        Others are ignored.
        """
        resident = self._locator.resident(keys)
        if resident:
            self._uses.touch(resident, use)

    def reserve_offload(
        self, group_idx: int, keys: Sequence[OffloadKey], *, use: UseContext = UNKNOWN_USE
    ) -> OffloadReservation:
        """Reserve slots for chunks that are not in the primary tier yet.

        The chunks are of one prefix, head first. If pins leave too little room, chunks are omitted
        from the tail and counted. Chunks that are resident already are touched.
        """
        chosen, tail_first = keys, keys[::-1]
        indices: Sequence[int] = range(len(keys))
        if not self._primary.are_new(tail_first):
            self.touch(list(dict.fromkeys(keys)), use=use)
            new = self._locator.indices_of_new(keys)
            chosen, indices = list(new), list(new.values())
            tail_first = chosen[::-1]
            if indices and use is not UNKNOWN_USE:
                use = use.at_depth(use.depth + indices[0])
        reserved = self._intake.reserve(group_idx, tail_first, use)
        while reserved is None and chosen:
            chosen = chosen[: len(chosen) // 2]
            reserved = self._intake.reserve(group_idx, chosen[::-1], use)
        self._victims.demote_ahead(group_idx, len(chosen))
        refused_count = len(indices) - len(chosen)
        self._counters.add(Metric.REFUSED_OFFLOADS, refused_count, label="primary_pinned")
        return OffloadReservation(
            group_idx,
            indices[: len(chosen)],
            tuple(chosen),
            np.empty(0, np.int64) if reserved is None else reserved,
            use,
        )

    def finish_offload(self, reservation: OffloadReservation, failed: Collection[int] = ()) -> None:
        """Commit the chunks that arrived, abort the failed ones (indices into the reservation)."""
        keys = reservation.keys
        lost = set(failed)
        if lost:
            self._counters.add(Metric.REFUSED_OFFLOADS, len(lost), label="copy_failed")
        if self._stale.keys:
            lost |= self._stale.take_arrived(keys)
        if lost:
            self._intake.abort([keys[i] for i in sorted(lost)])
            keys = tuple(key for i, key in enumerate(keys) if i not in lost)
        chunk_bytes = self._groups[reservation.group_idx].chunk_bytes
        self._offloaded_chunks.add(len(keys))
        self._offloaded_bytes.add(len(keys) * chunk_bytes)
        self._intake.commit(reservation.group_idx, keys, use=reservation.use)

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
        (with `partial`, it is omitted instead), or pins leave no room for all of them. Then nothing
        has changed, except that chunks may have been evicted. `tried`: as `Promotions.find`.
        """
        return self._loads.reserve(groups, partial=partial, tried=tried, use=use)

    def finish_load(self, reservation: LoadReservation, done: TransferDone) -> None:
        """Take the answer to a load or promote: unpin, commit arrived chunks, drop failed ones.

        Chunks that missed their deadline are absent from now on, but a hung read may still write
        to their slots: a second answer of the same job, passed to `complete`, settles them.
        """
        self._loads.finish(reservation, done)

    def retry_load(
        self, reservation: LoadReservation, done: TransferDone
    ) -> LoadReservation | None:
        """Reserve the chunks that a finished load did not bring from later tiers that have them.

        As `reserve_load` with `partial`. None: no later tier has any of them, or there is no room.
        """
        return self._loads.retry(reservation, done)

    def has_room(self, groups: Sequence[tuple[int, Sequence[OffloadKey]]]) -> bool:
        """Return whether `reserve_load` would find room for these chunks now.

        The chunks must be resident or recorded. True holds until the next call that changes state.
        """
        return self._loads.has_room(groups)

    def could_hold(self, counts: Mapping[int, int]) -> bool:
        """Return whether so many chunks per group fit if nothing else holds room."""
        return self._primary.could_hold(counts)

    @property
    def is_room_held(self) -> bool:
        """Whether transfers hold room in the primary tier, which comes back when they end."""
        return self._primary.is_room_held

    def commands(self) -> list[Command]:
        """Return the demotes and releases that became possible since the last call."""
        commands = [
            command
            for cascade in self._cascades
            for command in cascade.demotes.commands(self.new_job_id)
        ]
        self._stale.forget_released()  # a demote that outlived a reset may have ended
        return commands

    def complete(self, done: TransferDone) -> bool:
        """Take the answer to a command of `commands`, or the late answer to a load.

        False: the job is not one of them.
        """
        if self._promotions.finish_late(done):
            self._stale.forget_released()
            return True
        return any(cascade.demotes.complete(done) for cascade in self._cascades)

    def demote_victims(self, tier_idx: int, group_idx: int, count: int) -> int:
        """Ask a tier to record what `count` new chunks would evict (`NextVictims.demote_for`)."""
        return self._victims.demote_for(tier_idx, group_idx, count)

    def demote_coldest(self, count: int) -> int:
        """Ask every tier to record the `count` coldest chunks (`NextVictims.demote_coldest`)."""
        return self._victims.demote_coldest(count)

    def demote_resident(self, tier_idx: int, keys: Sequence[OffloadKey]) -> int:
        """Ask a tier to record chunks that are in memory (`NextVictims.demote_resident`)."""
        return self._victims.demote_resident(tier_idx, keys)

    def busy(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of some chunks whose state changes when a transfer ends."""
        return self._locator.busy(keys)

    def has_work(self) -> bool:
        """Return whether demotes, releases or hung reads are waiting for an answer."""
        are_working = (cascade.demotes.has_work() for cascade in self._cascades)
        return self._promotions.has_late() or any(are_working)

    def is_healing(self) -> bool:
        """Return whether chunks in memory wait for a tier that is out of use.

        The caller then calls `commands` from time to time: they include trials of the tier.
        """
        return any(cascade.demotes.is_healing for cascade in self._cascades)

    def reset(self, manifest: Manifest, *, keeps_records: bool = False) -> None:
        """Forget all chunks in all tiers (the weights changed); new ones belong to `manifest`.

        Chunks that a transfer holds are unreachable from now on and forgotten when it ends. With
        `keeps_records`, only chunks that are resident or arriving are forgotten; `manifest` is
        unchanged, and demotes in flight are still recorded.
        """
        for cascade in self._cascades:
            if keeps_records:
                cascade.forget_resident()
            else:
                cascade.cancel()
        if self._movements is not None:
            self._movements.left(self._primary.coldest(len(self._primary)))
        self._stale.add(self._primary.clear())
        self._stale.add(self._primary.arriving)
        self._promotions.reset()
        if not keeps_records:
            for secondary in self._secondaries:
                secondary.reset(manifest)

    def mark_stale(self, keys: Iterable[OffloadKey]) -> None:
        """Make chunks that an offload holds unreachable, and forget them when it ends."""
        self._stale.add(keys)

    def check_memory(self) -> list[str]:
        """Verify the invariants of the primary tier; return the violations in words."""
        return self._primary.check() + self._promotions.check()

    def check(self) -> list[str]:
        """Verify the invariants of all tiers; return the violations in words (empty: sound)."""
        problems = self.check_memory()
        for secondary in self._secondaries:
            problems += secondary.check()
        return problems
