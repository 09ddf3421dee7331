"""Adaptive replacement cache: recency and frequency, balanced by what it evicted wrongly.

Megiddo & Modha, FAST'03, Fig. 4. Names as in the paper: T1 holds the resident keys that were used
once since they came, T2 those used more often; B1 and B2 are their ghosts; p is the size that T1
aims at; c is the capacity.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

from tierstore.key import OffloadKey
from tierstore.policy.key_queue import KeyQueue

__all__ = ["ArcPolicy"]


class ArcPolicy:
    """Exact ARC in batches; one key at a time it is the paper's algorithm, step for step.

    A batch is its keys one by one in order, with the batch's own keys pinned: where the paper
    would evict a key of the same batch, the other list gives a victim. p adapts when room is made
    (`evict`), since the miss is what it learns from; the keys enter T1 or T2 by `insert`. Pass the
    same order to both. Pinned keys are passed over within their list; a list in which nothing can
    be evicted leaves its turn to the other.

    Two things follow the paper in effect, not in letter. The oldest ghost goes after the new key
    came, not before: what the paper drops without a ghost (T1 = c) is a ghost for that moment. And
    ghosts are bounded by |T1| + |B1| <= c and all four <= 2c even if more than c keys are resident,
    which happens when the tier holds slots of several sizes.
    """

    def __init__(self, capacity_chunks: int) -> None:
        """`capacity_chunks` is the paper's c."""
        if capacity_chunks <= 0:
            raise ValueError(f"capacity_chunks: expected at least 1, got {capacity_chunks}")
        self._c = capacity_chunks
        self._p = 0.0
        self._t1 = KeyQueue()
        self._t2 = KeyQueue()
        self._b1 = KeyQueue()
        self._b2 = KeyQueue()
        self._plan: _Plan | None = None
        """What `victims` found out, for the `evict` that follows at once."""

    def locate(self, keys: Sequence[OffloadKey]) -> list[int | None]:
        """Return the slot of each resident key, None for others."""
        first, second = self._t2.table, self._t1.table
        if keys and keys[0] in second:
            # The chunks of a request were mostly used together: one list has them all.
            first, second = second, first
        slots: list[int | None] = list(map(first.get, keys))
        return list(map(second.get, keys, slots)) if None in slots else slots

    def insert(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        """Add keys, in order: ghosts to T2, all others to T1; then drop the oldest ghosts."""
        if self._no_ghost_in(keys):
            self._t1.push(keys, slots)
            self._trim()
        else:
            steps = self._replay(keys, (len(self._t1), len(self._t2)), ([], []), 0)
            self._b1.pop(list(steps.b1.gone))
            self._b2.pop(list(steps.b2.gone))
            slot_by_key = dict(zip(keys, slots, strict=True))
            self._t2.push(steps.hits, map(slot_by_key.__getitem__, steps.hits))
            self._t1.push(steps.strangers, map(slot_by_key.__getitem__, steps.strangers))
        self._plan = None

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Make resident keys the most recently used of T2, in order (case I)."""
        self._plan = None
        t1 = self._t1.table
        moved = list(filter(t1.__contains__, keys)) if t1 else []
        if moved:
            moved = list(dict.fromkeys(moved))
            self._t2.push(moved, self._t1.pop(moved))
        if len(moved) < len(keys):
            # The moved keys too: they take their turn between those that were in T2 before.
            self._t2.touch(keys)

    def victims(
        self,
        count: int,
        pinned: Collection[OffloadKey],
        incoming: Sequence[OffloadKey] = (),
    ) -> list[OffloadKey]:
        """Name the keys that REPLACE takes for the last `count` of `incoming`, in order."""
        if self._no_ghost_in(incoming):
            found = self._victims_for_strangers(count, pinned, len(incoming))
            self._plan = _Plan(incoming, found, self._p)
        else:
            cold = self._t1.peek(count, pinned), self._t2.peek(count, pinned)
            steps = self._replay(incoming, (len(self._t1), len(self._t2)), cold, count)
            found = steps.victims
            self._plan = _Plan(incoming, found, steps.p)
        return found

    def evict(self, keys: Sequence[OffloadKey], incoming: Sequence[OffloadKey] = ()) -> list[int]:
        """Move victims to B1 and B2, in order, and adapt p to the ghosts among `incoming`."""
        sizes = len(self._t1.table), len(self._t2.table)
        slots, t1_victims, t2_victims = self._pop(keys)
        plan = self._plan
        if plan is not None and plan.incoming is incoming and plan.victims is keys:
            self._p = plan.p
        elif not self._no_ghost_in(incoming):
            self._p = self._replay(incoming, sizes, (t1_victims, t2_victims), len(keys)).p
        self._plan = None
        if t1_victims:
            self._b1.push(t1_victims, repeat(0))
        if t2_victims:
            self._b2.push(t2_victims, repeat(0))
        return slots

    def remove(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Remove resident keys from T1 and T2; they leave no ghost."""
        self._plan = None
        return self._pop(keys)[0]

    def clear(self) -> None:
        """Forget all keys and ghosts, and start over with p = 0."""
        for keys in (self._t1, self._t2, self._b1, self._b2):
            keys.clear()
        self._p = 0.0
        self._plan = None

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)

    def _victims_for_strangers(
        self, count: int, pinned: Collection[OffloadKey], incoming_count: int
    ) -> list[OffloadKey]:
        # Keys without a ghost leave p alone, and each makes T1 grow by one: REPLACE takes from T2
        # until |T1| > p, from then on from T1, whose size then stays.
        t1_size = len(self._t1.table) + max(incoming_count - count, 0)
        t2_turns = min(int(self._p) + 1 - t1_size, count)
        from_t2 = self._t2.peek(t2_turns, pinned) if t2_turns > 0 else []
        found = from_t2 + self._t1.peek(count - len(from_t2), pinned)
        if len(found) < count:
            more = self._t2.peek(count - len(found) + len(from_t2), pinned)
            found += more[len(from_t2) :]
        return found

    def _pop(
        self, keys: Sequence[OffloadKey]
    ) -> tuple[list[int], Sequence[OffloadKey], Sequence[OffloadKey]]:
        """Remove keys; return their slots, those that were in T1, and those that were in T2."""
        in_t2_first = bool(keys) and keys[0] in self._t2.table
        first, second = (self._t2, self._t1) if in_t2_first else (self._t1, self._t2)
        found = first.pop_present(keys)
        slots = [slot for slot in found if slot is not None]
        first_keys: Sequence[OffloadKey] = keys
        second_keys: Sequence[OffloadKey] = ()
        if len(slots) < len(keys):
            pairs = list(zip(keys, found, strict=True))
            first_keys = [key for key, slot in pairs if slot is not None]
            second_keys = [key for key, slot in pairs if slot is None]
            second_slots = iter(second.pop(second_keys))
            slots = [next(second_slots) if slot is None else slot for slot in found]
        return (slots, second_keys, first_keys) if in_t2_first else (slots, first_keys, second_keys)

    def _no_ghost_in(self, keys: Sequence[OffloadKey]) -> bool:
        b1, b2 = self._b1.table, self._b2.table
        return (not b1 or b1.keys().isdisjoint(keys)) and (not b2 or b2.keys().isdisjoint(keys))

    def _replay(
        self,
        incoming: Sequence[OffloadKey],
        sizes: tuple[int, int],
        cold: tuple[Sequence[OffloadKey], Sequence[OffloadKey]],
        count: int,
    ) -> "_Replay":
        """Go through misses that include ghosts; the last `count` of them evict.

        `sizes` are |T1| and |T2| before the batch, `cold` what may be evicted from each in order.
        """
        steps = _Replay(
            c=self._c,
            p=self._p,
            t1_size=sizes[0],
            t2_size=sizes[1],
            b1=_GhostView(self._b1, len(incoming)),
            b2=_GhostView(self._b2, len(incoming)),
            t1_cold=iter(cold[0]),
            t2_cold=iter(cold[1]),
        )
        free = len(incoming) - count
        for number, key in enumerate(incoming):
            steps.miss(key, evict=number >= free)
        for _ in range(-free):
            steps.make_way()
        return steps

    def _trim(self) -> None:
        b1_size, b2_size = len(self._b1.table), len(self._b2.table)
        l1_size = len(self._t1.table) + b1_size
        if l1_size > self._c and b1_size:
            excess = min(l1_size - self._c, b1_size)
            self._b1.pop(self._b1.peek(excess))
            l1_size -= excess
        excess = l1_size + len(self._t2.table) + b2_size - 2 * self._c
        if excess > 0 and b2_size:
            self._b2.pop(self._b2.peek(min(excess, b2_size)))


class _Plan(NamedTuple):
    """The victims that were named for a batch of misses, and p after it."""

    incoming: Sequence[OffloadKey]
    victims: Sequence[OffloadKey]
    p: float


class _GhostView:
    """B1 or B2 as a batch of misses changes it: its size, and which of its ghosts are gone."""

    __slots__ = ("_ghosts", "_oldest", "gone", "size")

    def __init__(self, ghosts: KeyQueue, batch_size: int) -> None:
        self._ghosts = ghosts
        self._oldest = iter(ghosts.peek(batch_size))
        self.size = len(ghosts)
        self.gone: dict[OffloadKey, None] = {}

    def take(self, key: OffloadKey) -> bool:
        """Remove `key` if it is a ghost here."""
        if key not in self._ghosts or key in self.gone:
            return False
        self.gone[key] = None
        self.size -= 1
        return True

    def trim(self) -> None:
        """Drop the oldest ghost; past the old ones that is a victim of this very batch."""
        self.size -= 1
        for key in self._oldest:
            if key not in self.gone:
                self.gone[key] = None
                return


@dataclass(slots=True, kw_only=True)
class _Replay:
    """Cases II to IV of Fig. 4 for a batch, on sizes: what it does, without doing it."""

    c: int
    p: float
    t1_size: int
    t2_size: int
    b1: _GhostView
    b2: _GhostView
    t1_cold: Iterator[OffloadKey]
    t2_cold: Iterator[OffloadKey]
    """What may be evicted from T2, oldest first; `t1_cold` likewise."""
    victims: list[OffloadKey] = field(default_factory=list)
    hits: list[OffloadKey] = field(default_factory=list)
    strangers: list[OffloadKey] = field(default_factory=list)

    def miss(self, key: OffloadKey, *, evict: bool) -> None:
        """Let one key come, into a free slot or in a victim's place."""
        # The sizes of the formulas are those before `key` leaves its ghost list.
        b1_size, b2_size = self.b1.size, self.b2.size
        in_b2 = False
        if self.b1.take(key):
            self.p = min(self.c, self.p + max(1.0, b2_size / b1_size))
        elif self.b2.take(key):
            in_b2 = True
            self.p = max(0.0, self.p - max(1.0, b1_size / b2_size))
        else:
            if evict:
                self._replace(in_b2=False)
            self.strangers.append(key)
            self.t1_size += 1
            self._trim()
            return
        if evict:
            self._replace(in_b2=in_b2)
        self.hits.append(key)
        self.t2_size += 1

    def make_way(self) -> None:
        """Name one more victim, as for a key never seen."""
        self._replace(in_b2=False)
        self.t1_size += 1

    def _replace(self, *, in_b2: bool) -> None:
        t1_first = self.t1_size > 0 and (
            self.t1_size > self.p or (in_b2 and self.t1_size == self.p)
        )
        key = next(self.t1_cold, None) if t1_first else None
        if key is None:
            key = next(self.t2_cold, None)
            if key is not None:
                self.t2_size -= 1
                self.b2.size += 1
                self.victims.append(key)
                return
            key = next(self.t1_cold, None)
        if key is not None:
            self.t1_size -= 1
            self.b1.size += 1
            self.victims.append(key)

    def _trim(self) -> None:
        if self.t1_size + self.b1.size > self.c:
            if self.b1.size:
                self.b1.trim()
        elif (
            self.t1_size + self.t2_size + self.b1.size + self.b2.size > 2 * self.c and self.b2.size
        ):
            self.b2.trim()
