"""A tier stack for planner tests: dicts instead of tiers, and a count of everything it gave out."""

import itertools

import numpy as np

from tierstore.tier.reservation import ChunkState, LoadReservation, OffloadReservation
from tierstore.tier.stack import TierStack
from tierstore.transfer import JobId, Place, Promote

__all__ = ["ReferenceStack"]

IN_SLOT = (ChunkState.ARRIVING, ChunkState.RESIDENT)


class ReferenceStack(TierStack):
    """States by key; `contents` is what a key's slot holds.

    Without `slot_count` there is room for everything. With it, chunks that no transfer holds go
    when others need their slots.
    """

    def __init__(self, slot_count=None):
        self.slot_count = 1 << 40 if slot_count is None else slot_count
        self.states = {}
        self.slots = {}
        self.pins = {}
        self.contents = {}
        self.doomed = set()
        self.locate_calls = 0
        self.room_questions = 0
        self.refuses_loads = False
        self._job_ids = itertools.count(1)
        self._next_slot = itertools.count(1)

    def new_job_id(self):
        return JobId(next(self._job_ids))

    def locate(self, keys):
        self.locate_calls += 1
        return [self.states.get(key, ChunkState.ABSENT) for key in keys]

    def locate_in_step(self, keys):
        return self.locate(keys)

    def locate_run(self, keys):
        return self.locate(keys)

    def touch(self, keys):
        pass

    def commands(self):
        return []

    def complete(self, done):
        return False

    def has_work(self):
        return False

    def reserve_offload(self, group_idx, keys):
        wanted = {}
        for i, key in enumerate(keys):
            if self.states.get(key, ChunkState.ABSENT) in (ChunkState.ABSENT, ChunkState.RECORDED):
                wanted.setdefault(key, i)
        wanted = dict(itertools.islice(wanted.items(), self._room()))
        self._make_room(len(wanted))
        for key in wanted:
            self.states[key] = ChunkState.ARRIVING
            self.slots[key] = next(self._next_slot)
        slots = np.array([self.slots[key] for key in wanted], np.int64)
        return OffloadReservation(group_idx, tuple(wanted.values()), tuple(wanted), slots)

    def finish_offload(self, reservation, failed=()):
        for i, key in enumerate(reservation.keys):
            assert self.states[key] is ChunkState.ARRIVING, "answered twice"
            if i in failed or key in self.doomed:
                del self.states[key]
                self.doomed.discard(key)
            else:
                self.states[key] = ChunkState.RESIDENT

    def _held(self):
        return [
            key
            for key, state in self.states.items()
            if state is ChunkState.ARRIVING or self.pins.get(key)
        ]

    def _room(self):
        return self.slot_count - len(self._held())

    def _make_room(self, count, staying=()):
        """Let resident chunks go, oldest first; to a secondary tier."""
        held = {*self._held(), *staying}
        free = self.slot_count - sum(s in IN_SLOT for s in self.states.values())
        for key in list(self.states):
            if free < count and self.states[key] is ChunkState.RESIDENT and key not in held:
                self.states[key] = ChunkState.RECORDED
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

    def reserve_load(self, groups):
        job_id = self.new_job_id()
        states = [[self.states.get(key, ChunkState.ABSENT) for key in keys] for _, keys in groups]
        if self.refuses_loads or any(s < ChunkState.RECORDED for row in states for s in row):
            return None
        if not self._has_room(groups):
            return None
        asked_keys = [key for _, keys in groups for key in keys]
        recorded = [key for key in asked_keys if self.states[key] is ChunkState.RECORDED]
        self._make_room(len(recorded), asked_keys)
        promotes, pinned = [], []
        for (group_idx, keys), row in zip(groups, states, strict=True):
            promoted = [k for k, s in zip(keys, row, strict=True) if s is ChunkState.RECORDED]
            for key in promoted:
                self.states[key] = ChunkState.ARRIVING
                self.slots[key] = next(self._next_slot)
            for key in set(keys) - set(promoted):
                self.pins[key] = self.pins.get(key, 0) + 1
                pinned.append(key)
            if promoted:
                slots = np.array([self.slots[key] for key in promoted], np.int64)
                places = tuple(Place(key) for key in promoted)
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
            assert self.states[key] is ChunkState.ARRIVING
            if i in done.failed or key in self.doomed:
                del self.states[key]
                self.doomed.discard(key)
            else:
                self.states[key] = ChunkState.RESIDENT

    def reset(self, manifest, *, keeps_records=False):
        """Keep what is recorded, as if the disk failed: the epoch alone must hide it."""
        self.doomed = {k for k, state in self.states.items() if state is ChunkState.ARRIVING}
        kept = (ChunkState.ARRIVING, ChunkState.RECORDED)
        self.states = {k: state for k, state in self.states.items() if state in kept}

    def evict(self, keys):
        """Let unpinned resident and recorded chunks go."""
        for key in keys:
            if self.states.get(key, 0) >= ChunkState.RECORDED and not self.pins.get(key):
                del self.states[key]

    def leaks(self):
        """Name what is still pinned or arriving."""
        return [f"pinned: {k!r}" for k, count in self.pins.items() if count] + [
            f"arriving: {k!r}" for k, s in self.states.items() if s is ChunkState.ARRIVING
        ]
