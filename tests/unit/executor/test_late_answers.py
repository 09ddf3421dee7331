"""Loads that fail, hang and are answered late, in any order: no slot ever has two owners.

Method: a random engine plays with a stack over two disks. What lies in a slot is written down as
(key, resets before it was made). A hung read writes to its slots whenever it likes, until its late
answer. After every move, each resident chunk must lie in its slot, and be of the time after the
last reset.
"""

import random

import pytest
from fake_clock import FakeClock
from opened_stack import RESIDENT, Tiers, keys, opened

from tierstore.tier.readable_records import HIDDEN_SECONDS
from tierstore.transfer import FailureReason, TransferDone

KEYS = keys(*range(30))
SLOT_COUNT = 12
LOADS_MAX = 4
MOVES = 200
FAILURES = [
    FailureReason.ABSENT,
    FailureReason.CORRUPT,
    FailureReason.IO_ERROR,
    FailureReason.STALLED,
    FailureReason.CLOSED,
]


class Engine:
    """Loads and offloads at random, and the bytes that this moves."""

    def __init__(self, tiers: Tiers, clock: FakeClock, seed: int):
        self.tiers = tiers
        self.clock = clock
        self.dice = random.Random(seed)
        self.contents = {}
        self.reset_count = 0
        self.loads = []  # (reservation, resets before it)
        self.late = []  # (reservation, resets before it, late indices)
        self.seen = set()

    def fill(self):
        for first in range(0, len(KEYS), 2):
            self.offload(KEYS[first : first + 2])
            self.write_down()

    def play(self):
        moves = [self.offload] + [self.load] * 4 + [self.answer] * 4
        moves += [self.answer_late, self.write_late, self.pass_time, self.tiers.loop.pump]
        moves += [self.write_down] * 2
        self.dice.choice(moves)()
        if self.dice.random() < 0.01:
            self.reset()
        self.verify()

    def offload(self, wanted=None):
        wanted = wanted or self.dice.sample(KEYS, self.dice.randrange(1, 3))
        reservation = self.tiers.stack.reserve_offload(0, wanted)
        for key, slot in zip(reservation.keys, reservation.slots.tolist(), strict=True):
            self.contents[slot] = (key, self.reset_count)
        self.tiers.stack.finish_offload(reservation)

    def load(self):
        if len(self.loads) == LOADS_MAX:
            self.answer()
        wanted = self.dice.sample(KEYS, self.dice.randrange(1, 5))
        reservation = self.tiers.stack.reserve_load([(0, wanted)], partial=True)
        if reservation is not None:
            self.loads.append((reservation, self.reset_count))

    def answer(self):
        if not self.loads:
            return
        load, made = self.loads.pop(self.dice.randrange(len(self.loads)))
        failed, late = {}, []
        for i, (key, slot) in enumerate(promoted(load)):
            outcome = self.dice.choice([None, None, "late", self.dice.choice(FAILURES)])
            self.seen.add(outcome)
            if outcome is None:
                self.contents[slot] = (key, made)
                continue
            self.contents[slot] = "garbage"
            failed[i] = FailureReason.DEADLINE if outcome == "late" else outcome
            if outcome == "late":
                late.append(i)
        done = TransferDone(job_id=load.job_id, ok=not failed, failed=failed)
        self.tiers.stack.finish_load(load, done)
        if late:
            self.late.append((load, made, late))
        again = self.tiers.stack.retry_load(load, done)
        if again is not None:
            self.seen.add("again")
            self.loads.append((again, self.reset_count))

    def write_late(self):
        for load, _, late in self.late:
            for i in late:
                self.contents[promoted(load)[i][1]] = "half a chunk"

    def answer_late(self):
        if not self.late:
            return
        load, made, late = self.late.pop(self.dice.randrange(len(self.late)))
        failed = {}
        for i in late:
            key, slot = promoted(load)[i]
            reason = self.dice.choice([None, None, FailureReason.CORRUPT, FailureReason.IO_ERROR])
            self.contents[slot] = "garbage" if reason else (key, made)
            if reason:
                failed[i] = reason
        done = TransferDone(job_id=load.job_id, ok=not failed, failed=failed)
        assert self.tiers.stack.complete(done)

    def write_down(self):
        self.tiers.settle_writes()

    def pass_time(self):
        self.clock.now += self.dice.random() * HIDDEN_SECONDS

    def reset(self):
        self.tiers.reset()
        self.reset_count += 1
        self.fill()

    def verify(self):
        slots = self.tiers.stack.primary.locate(KEYS)
        states = self.tiers.stack.states(KEYS)
        for key, slot, state in zip(KEYS, slots, states, strict=True):
            if state is RESIDENT:
                assert self.contents[slot] == (key, self.reset_count)
                self.seen.add("resident")
        assert self.tiers.stack.primary.check() == []

    def end(self):
        while self.loads or self.late:
            self.answer()
            self.answer_late()
            self.verify()
        self.tiers.assert_all_slots_can_be_had()


@pytest.mark.parametrize("number", range(8))
def test_late_answers_in_any_order_never_leave_a_wrong_chunk_nor_a_lost_slot(tmp_path, number):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    clock = FakeClock()

    with opened(tmp_path, {}, {}, clock=clock, slot_count=SLOT_COUNT) as tiers:
        engine = Engine(tiers, clock, seed)
        engine.fill()
        for _ in range(MOVES):
            engine.play()
        engine.end()
        assert {"resident", "late", "again", None} <= engine.seen


def promoted(load):
    return [
        (key, slot)
        for promote in load.promotes
        for key, slot in zip(promote.keys, promote.slots.tolist(), strict=True)
    ]
