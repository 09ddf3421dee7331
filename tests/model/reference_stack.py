"""A tier stack for planner tests: dicts instead of tiers, and a count of everything it gave out."""

import itertools

import numpy as np

from tierstore.policy.use import UNKNOWN_USE
from tierstore.tier.reservation import ChunkState, LoadReservation, OffloadReservation
from tierstore.tier.stack import TierStack
from tierstore.transfer import JobId, Place, Promote, place_array

__all__ = ["ReferenceStack"]

IN_SLOT = (ChunkState.ARRIVING, ChunkState.RESIDENT)


class ReferenceStack(TierStack):
    """States by key; `contents` is what a key's slot holds.

    With `needs_use` it keeps what it is told of uses: `told` are (call, use, keys).

    Without `slot_count` there is room for everything. With it, chunks that no transfer holds go
    when others need their slots.
    """

    needs_use = False

    def __init__(self, slot_count=None, *, needs_use=False):
        self.needs_use = needs_use
        self.told = []
        self.slot_count = 1 << 40 if slot_count is None else slot_count
        self.state_by_key = {}
        self.slots = {}
        self.pins = {}
        self.contents = {}
        self.stale = set()
        self.locate_calls = 0
        self.room_questions = 0
        self.refuses_loads = False
        self._job_ids = itertools.count(1)
        self._next_slot = itertools.count(1)

    def new_job_id(self):
        return JobId(next(self._job_ids))

    def states(self, keys):
        self.locate_calls += 1
        return [self.state_by_key.get(key, ChunkState.ABSENT) for key in keys]

    def states_in_step(self, keys):
        return self.states(keys)

    def states_of_run(self, keys):
        return self.states(keys)

    def touch(self, keys, *, use=UNKNOWN_USE):
        pass

    def commands(self):
        return []

    def complete(self, done):
        return False

    def has_work(self):
        return False

    def reserve_offload(self, group_idx, keys, *, use=UNKNOWN_USE):
        self.told.append(("offload", use, list(keys)))
        wanted = {}
        for i, key in enumerate(keys):
            if self.state_by_key.get(key, ChunkState.ABSENT) in (
                ChunkState.ABSENT,
                ChunkState.RECORDED,
            ):
                wanted.setdefault(key, i)
        wanted = dict(itertools.islice(wanted.items(), self._room()))
        self._make_room(len(wanted))
        for key in wanted:
            self.state_by_key[key] = ChunkState.ARRIVING
            self.slots[key] = next(self._next_slot)
        slots = np.array([self.slots[key] for key in wanted], np.int64)
        return OffloadReservation(group_idx, tuple(wanted.values()), tuple(wanted), slots)

    def finish_offload(self, reservation, failed=()):
        for i, key in enumerate(reservation.keys):
            assert self.state_by_key[key] is ChunkState.ARRIVING, "answered twice"
            if i in failed or key in self.stale:
                del self.state_by_key[key]
                self.stale.discard(key)
            else:
                self.state_by_key[key] = ChunkState.RESIDENT

    def _held(self):
        return [
            key
            for key, state in self.state_by_key.items()
            if state is ChunkState.ARRIVING or self.pins.get(key)
        ]

    def _room(self):
        return self.slot_count - len(self._held())

    def _make_room(self, count, staying=()):
        """Let resident chunks go, oldest first; to a secondary tier."""
        held = {*self._held(), *staying}
        free = self.slot_count - sum(s in IN_SLOT for s in self.state_by_key.values())
        for key in list(self.state_by_key):
            if free < count and self.state_by_key[key] is ChunkState.RESIDENT and key not in held:
                self.state_by_key[key] = ChunkState.RECORDED
                free += 1
        assert free >= count

    @property
    def is_room_held(self):
        return bool(self._held())

    def could_hold(self, counts):
        return sum(counts.values()) <= self.slot_count

    def has_room(self, groups):
        self.room_questions += 1
        return self._has_room(groups)

    def _has_room(self, groups):
        keys = {key for _, keys in groups for key in keys}
        return len(keys.union(self._held())) <= self.slot_count

    def reserve_load(self, groups, *, use=UNKNOWN_USE):
        self.told.append(("load", use, [key for _, keys in groups for key in keys]))
        job_id = self.new_job_id()
        states = [
            [self.state_by_key.get(key, ChunkState.ABSENT) for key in keys] for _, keys in groups
        ]
        if self.refuses_loads or any(s < ChunkState.RECORDED for row in states for s in row):
            return None
        if not self._has_room(groups):
            return None
        asked_keys = [key for _, keys in groups for key in keys]
        recorded = [key for key in asked_keys if self.state_by_key[key] is ChunkState.RECORDED]
        self._make_room(len(recorded), asked_keys)
        promotes, pinned = [], []
        for (group_idx, keys), row in zip(groups, states, strict=True):
            promoted = [k for k, s in zip(keys, row, strict=True) if s is ChunkState.RECORDED]
            for key in promoted:
                self.state_by_key[key] = ChunkState.ARRIVING
                self.slots[key] = next(self._next_slot)
            for key in set(keys) - set(promoted):
                self.pins[key] = self.pins.get(key, 0) + 1
                pinned.append(key)
            if promoted:
                slots = np.array([self.slots[key] for key in promoted], np.int64)
                places = place_array([Place(key) for key in promoted])
                promotes.append(
                    Promote(
                        tier_idx=0,
                        group_idx=group_idx,
                        keys=tuple(promoted),
                        places=places,
                        slots=slots,
                    )
                )
        slots = tuple(np.array([self.slots[k] for k in keys], np.int64) for _, keys in groups)
        asked = tuple(tuple(keys) for _, keys in groups)
        return LoadReservation(job_id, asked, slots, tuple(promotes), tuple(pinned))

    def finish_load(self, reservation, done):
        for key in reservation.pinned:
            self.pins[key] -= 1
            assert self.pins[key] >= 0, "unpinned twice"
        keys = [key for promote in reservation.promotes for key in promote.keys]
        for i, key in enumerate(keys):
            assert self.state_by_key[key] is ChunkState.ARRIVING
            if i in done.failed or key in self.stale:
                del self.state_by_key[key]
                self.stale.discard(key)
            else:
                self.state_by_key[key] = ChunkState.RESIDENT

    def reset(self, manifest, *, keeps_records=False):
        """Keep what is recorded, as if the disk failed: the epoch alone must hide it."""
        self.stale = {k for k, state in self.state_by_key.items() if state is ChunkState.ARRIVING}
        kept = (ChunkState.ARRIVING, ChunkState.RECORDED)
        self.state_by_key = {k: state for k, state in self.state_by_key.items() if state in kept}

    def evict(self, keys):
        """Let unpinned resident and recorded chunks go."""
        for key in keys:
            if self.state_by_key.get(key, 0) >= ChunkState.RECORDED and not self.pins.get(key):
                del self.state_by_key[key]

    def leaks(self):
        """Name what is still pinned or arriving."""
        return [f"pinned: {k!r}" for k, count in self.pins.items() if count] + [
            f"arriving: {k!r}" for k, s in self.state_by_key.items() if s is ChunkState.ARRIVING
        ]
