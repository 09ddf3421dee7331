"""Adaptive replacement cache: recency and frequency, balanced by what it evicted wrongly.

Megiddo & Modha, FAST'03, Fig. 4. Names as in the paper: T1 holds the resident keys that were used
once since they came, T2 those used more often; B1 and B2 are their ghosts; p is the size that T1
aims at; c is the capacity.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, compress, repeat
from operator import not_, or_
from typing import NamedTuple

from tierstore.key import OffloadKey
from tierstore.policy.ghost_queue import GhostQueue
from tierstore.policy.key_queue import KeyQueue
from tierstore.policy.use import UNKNOWN_USE, UseContext

__all__ = ["ArcPolicy"]

_Plan = tuple[Sequence[OffloadKey], Sequence[OffloadKey], int, tuple[list[int], float] | None]
"""Incoming keys, the victims that were named for them, and how many of these are in T1. If there
are ghosts among the incoming: the digests of all of them, and p after their misses."""

_DIGEST_MASK = (1 << 60) - 1
"""Larger numbers take 16 bytes more."""
_NOBODY = -1
"""No key has this digest."""


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

    A ghost is 60 bits of its key's hash, since nobody ever asks for the key itself: 32 bytes, a key
    has 80. Two keys that share a digest, one pair in 10^18, could make a stranger pass for a ghost,
    which is a worse guess of what to keep and never a wrong hit.
    """

    needs_use = False

    def __init__(self, capacity_chunks: int) -> None:
        """`capacity_chunks` is the paper's c."""
        if capacity_chunks <= 0:
            raise ValueError(f"capacity_chunks: expected at least 1, got {capacity_chunks}")
        self._c = capacity_chunks
        self._p = 0.0
        self._t1, self._t2 = KeyQueue(), KeyQueue()
        self._b1, self._b2 = GhostQueue(), GhostQueue()
        self._plan: _Plan | None = None
        """What `victims` found out, for the `evict` that follows at once."""
        self._returning: set[int] = set()
        """Keys that were missed together with a ghost and are not inserted yet: the others are no
        ghosts, since a key that is on its way cannot be evicted."""

    def locate(self, keys: Sequence[OffloadKey]) -> list[int | None]:
        """Return the slot of each resident key, None for others."""
        if not keys:
            return []
        # The chunks of a request mostly came and were used together: one list has all or none.
        first, second = self._t1.table, self._t2.table
        if keys[0] in second:
            first, second = second, first
        elif keys[0] not in first and not self.holds_any(keys):
            return [None] * len(keys)
        slots: list[int | None] = list(map(first.get, keys))
        return list(map(second.get, keys, slots)) if None in slots else slots

    def holds_any(self, keys: Sequence[OffloadKey]) -> bool:
        """Return whether any of the keys is resident."""
        t1, t2 = self._t1.table, self._t2.table
        return not (t1.keys().isdisjoint(keys) and t2.keys().isdisjoint(keys))

    def holds_all(self, keys: Sequence[OffloadKey]) -> bool:
        """Return whether all of the keys are resident."""
        first, second = self._t1.table, self._t2.table
        if keys and keys[0] in second:
            first, second = second, first
        return all(map(first.__contains__, keys)) or all(
            map(or_, map(first.__contains__, keys), map(second.__contains__, keys))
        )

    def insert(
        self,
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
        use: UseContext = UNKNOWN_USE,  # noqa: ARG002 - the protocol; all uses are alike here
    ) -> None:
        """Add keys, in order: ghosts to T2, all others to T1; then drop the oldest ghosts."""
        self._plan = None
        if self._returning:
            digests = _digests(keys)
            self._returning.difference_update(digests)
            if not self._no_ghost_in(digests):
                self._insert_ghosts(keys, slots, digests)
                return
        self._t1.push(keys, slots)
        self._trim()

    def touch(
        self,
        keys: Sequence[OffloadKey],
        use: UseContext = UNKNOWN_USE,  # noqa: ARG002 - as in `insert`
    ) -> None:
        """Make resident keys the most recently used of T2, in order (case I)."""
        self._plan = None
        if self._t1.table.keys().isdisjoint(keys):
            self._t2.touch(keys)
            return
        popped = self._t1.pop_present(keys)
        slots = [slot for slot in popped if slot is not None]
        if len(slots) == len(keys):
            self._t2.push(keys, slots)
            return
        moved = [key for key, slot in zip(keys, popped, strict=True) if slot is not None]
        self._t2.push(moved, slots)
        # The moved keys too: they take their turn between those that were in T2 before.
        self._t2.touch(keys)

    def victims(
        self,
        count: int,
        pinned: Collection[OffloadKey],
        incoming: Sequence[OffloadKey] = (),
        use: UseContext = UNKNOWN_USE,  # noqa: ARG002 - as in `insert`
    ) -> list[OffloadKey]:
        """Name the keys that REPLACE takes for the last `count` of `incoming`, in order."""
        digests = _digests(incoming)
        if self._no_ghost_in(digests):
            t1_count, found = self._victims_for_strangers(count, pinned, len(incoming))
            self._plan = incoming, found, t1_count, None
            return found
        cold = self._t1.peek(count, pinned), self._t2.peek(count, pinned)
        steps = self._misses(digests, (len(self._t1), len(self._t2)), cold, count)
        self._plan = incoming, steps.victims, steps.t1_victim_count, (digests, steps.p)
        return steps.victims

    def evict(
        self,
        keys: Sequence[OffloadKey],
        incoming: Sequence[OffloadKey] = (),
        use: UseContext = UNKNOWN_USE,  # noqa: ARG002 - as in `insert`
    ) -> list[int]:
        """Move victims to B1 and B2, in order, and adapt p to the ghosts among `incoming`."""
        plan, self._plan = self._plan, None
        if plan is not None and plan[0] is incoming and plan[1] is keys:
            t1_count, ghosts = plan[2:]
            if ghosts is not None:
                self._expect(ghosts[0])
                self._p = ghosts[1]
            if t1_count == len(keys):
                self._b1.push(_digests(keys))
                return self._t1.pop(keys)
            if not t1_count:
                self._b2.push(_digests(keys))
                return self._t2.pop(keys)
            slots, t1_victims, t2_victims = self._pop(keys)
        else:
            sizes = len(self._t1), len(self._t2)
            slots, t1_victims, t2_victims = self._pop(keys)
            digests = _digests(incoming)
            if not self._no_ghost_in(digests):
                self._expect(digests)
                self._p = self._misses(digests, sizes, (t1_victims, t2_victims), len(keys)).p
        self._b1.push(_digests(t1_victims))
        self._b2.push(_digests(t2_victims))
        return slots

    def remove(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Remove resident keys from T1 and T2; they leave no ghost."""
        self._plan = None
        return self._pop(keys)[0]

    def clear(self) -> None:
        """Forget all keys and ghosts, and start over with p = 0."""
        self._t1.clear()
        self._t2.clear()
        self._b1.clear()
        self._b2.clear()
        self._returning.clear()
        self._p = 0.0
        self._plan = None

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)

    def _insert_ghosts(
        self, keys: Sequence[OffloadKey], slots: Sequence[int], digests: Sequence[int]
    ) -> None:
        b1, b2 = self._b1.members, self._b2.members
        if all(map(or_, map(b1.__contains__, digests), map(b2.__contains__, digests))):
            # What left together comes back together, and only strangers drop old ghosts.
            self._b1.remove(digests)
            self._b2.remove(digests)
            self._t2.push(keys, slots)
            return
        steps = self._replay(digests, (len(self._t1), len(self._t2)), ((), ()), 0)
        self._b1.remove(steps.gone)
        self._b2.remove(steps.gone)
        was_ghost = steps.was_ghost
        was_stranger = list(map(not_, was_ghost))
        self._t2.push(list(compress(keys, was_ghost)), compress(slots, was_ghost))
        self._t1.push(list(compress(keys, was_stranger)), compress(slots, was_stranger))

    def _expect(self, digests: Sequence[int]) -> None:
        self._returning.update(digests)
        if len(self._returning) > 2 * self._c:
            # Left by batches that never arrived.
            self._returning &= self._b1.members | self._b2.members

    def _victims_for_strangers(
        self, count: int, pinned: Collection[OffloadKey], incoming_count: int
    ) -> tuple[int, list[OffloadKey]]:
        """Return how many victims are from T1, and all of them in order.

        Keys without a ghost leave p alone, and each makes T1 grow by one: REPLACE takes from T2
        until |T1| > p, from then on from T1, whose size then stays.
        """
        t1_size = len(self._t1.table) + max(incoming_count - count, 0)
        t2_turns = min(int(self._p) + 1 - t1_size, count)
        from_t2 = self._t2.peek(t2_turns, pinned) if t2_turns > 0 else []
        from_t1 = self._t1.peek(count - len(from_t2), pinned)
        found = from_t2 + from_t1 if from_t2 else from_t1
        if len(found) < count:
            more = self._t2.peek(count - len(from_t1), pinned)
            found = found + more[len(from_t2) :]
        return len(from_t1), found

    def _pop(
        self, keys: Sequence[OffloadKey]
    ) -> tuple[list[int], list[OffloadKey], list[OffloadKey]]:
        """Remove keys; return their slots, those that were in T1, and those that were in T2."""
        t1 = self._t1.table
        in_t1 = list(map(t1.__contains__, keys))
        t1_keys = list(compress(keys, in_t1))
        t2_keys = list(compress(keys, map(not_, in_t1)))
        t1_slots, t2_slots = iter(self._t1.pop(t1_keys)), iter(self._t2.pop(t2_keys))
        slots = [next(t1_slots) if flag else next(t2_slots) for flag in in_t1]
        return slots, t1_keys, t2_keys

    def _no_ghost_in(self, digests: Sequence[int]) -> bool:
        return self._b1.members.isdisjoint(digests) and self._b2.members.isdisjoint(digests)

    def _misses(
        self,
        incoming: Sequence[int],
        sizes: tuple[int, int],
        cold: tuple[Sequence[OffloadKey], Sequence[OffloadKey]],
        count: int,
    ) -> "_Misses":
        is_plenty = len(cold[0]) == len(cold[1]) == count == len(incoming)
        if is_plenty:
            in_b1s = list(map(self._b1.members.__contains__, incoming))
            if all(map(or_, in_b1s, map(self._b2.members.__contains__, incoming))):
                return self._replay_ghosts(in_b1s, sizes, cold)
        return self._replay(incoming, sizes, cold, count).misses

    def _replay(  # noqa: C901 - a function per case would be called once per key, the main cost
        self,
        incoming: Sequence[int],
        sizes: tuple[int, int],
        cold: tuple[Iterable[OffloadKey], Iterable[OffloadKey]],
        count: int,
    ) -> "_Replay":
        """Go through misses that include ghosts; say what happens, and let nothing happen.

        Cases II to IV of Fig. 4 on sizes. The last `count` misses evict; if there are fewer misses
        than that, the rest are evictions for keys never seen. `sizes` are |T1| and |T2| before the
        batch, `cold` what may be evicted from each in order.
        """
        c, p, (t1_size, t2_size) = self._c, self._p, sizes
        b1, b2 = self._b1.members, self._b2.members
        b1_size, b2_size = len(b1), len(b2)
        t1_cold, t2_cold = map(iter, cold)
        gone: dict[int, None] = {}
        b1_oldest = _drop_oldest(self._b1, len(incoming), gone)
        b2_oldest = _drop_oldest(self._b2, len(incoming), gone)
        victims: list[OffloadKey] = []
        t1_victim_count = 0
        was_ghost: list[bool] = []
        free = len(incoming) - count
        for number, ghost in enumerate(chain(incoming, repeat(_NOBODY, -free))):
            # The sizes in the formulas of p are those before the ghost leaves its list.
            in_b1 = ghost in b1 and ghost not in gone
            in_b2 = not in_b1 and ghost in b2 and ghost not in gone
            if in_b1:
                p = min(c, p + max(1.0, b2_size / b1_size))
                b1_size -= 1
            elif in_b2:
                p = max(0.0, p - max(1.0, b1_size / b2_size))
                b2_size -= 1
            if number >= free:
                # REPLACE
                from_t1 = t1_size > 0 and (t1_size > p or (in_b2 and t1_size == p))
                key = next(t1_cold, None) if from_t1 else None
                if key is None:
                    key, from_t1 = next(t2_cold, None), False
                    if key is None:
                        key, from_t1 = next(t1_cold, None), True
                if key is not None:
                    victims.append(key)
                    t1_victim_count += from_t1
                    t1_size, b1_size = t1_size - from_t1, b1_size + from_t1
                    t2_size, b2_size = t2_size - (not from_t1), b2_size + (not from_t1)
            was_ghost.append(in_b1 or in_b2)
            if in_b1 or in_b2:
                gone[ghost] = None
                t2_size += 1
                continue
            t1_size += 1
            if t1_size + b1_size > c:
                if b1_size:
                    b1_size -= 1
                    next(b1_oldest, None)
            elif b2_size and t1_size + t2_size + b1_size + b2_size > 2 * c:
                b2_size -= 1
                next(b2_oldest, None)
        return _Replay(_Misses(p, victims, t1_victim_count), was_ghost, gone)

    def _replay_ghosts(
        self,
        in_b1s: Iterable[bool],
        sizes: tuple[int, int],
        cold: tuple[Sequence[OffloadKey], Sequence[OffloadKey]],
    ) -> "_Misses":
        """Do as `_replay` where every miss is a ghost and evicts, and there is plenty of both.

        No stranger comes, so no old ghost is dropped, and neither list of victims ends.
        """
        c, p, t1_size = self._c, self._p, sizes[0]
        b1_size, b2_size = len(self._b1), len(self._b2)
        turns: list[bool] = []
        for in_b1 in in_b1s:
            if in_b1:
                p += b2_size / b1_size if b2_size > b1_size else 1.0
                if p > c:  # noqa: PLR1730 - a call would cost as much as the rest
                    p = c
                b1_size -= 1
                from_t1 = t1_size > p
            else:
                p -= b1_size / b2_size if b1_size > b2_size else 1.0
                if p < 0.0:  # noqa: PLR1730 - as above
                    p = 0.0
                b2_size -= 1
                from_t1 = t1_size >= p
            if from_t1:
                t1_size -= 1
                b1_size += 1
            else:
                b2_size += 1
            turns.append(from_t1)
        return _Misses(p, _in_turns(turns, *cold), turns.count(True))

    def _trim(self) -> None:
        b1_size, b2_size = len(self._b1.members), len(self._b2.members)
        l1_size = len(self._t1.table) + b1_size
        excess = l1_size - self._c
        if excess > 0:
            self._b1.drop_oldest(excess)
            l1_size -= min(excess, b1_size)
        excess = l1_size + len(self._t2.table) + b2_size - 2 * self._c
        if excess > 0:
            self._b2.drop_oldest(excess)


class _Misses(NamedTuple):
    """What a batch of misses does before its keys arrive."""

    p: float
    victims: list[OffloadKey]
    t1_victim_count: int


class _Replay(NamedTuple):
    """What a batch of misses does."""

    misses: _Misses
    was_ghost: list[bool]
    """Per incoming key: it goes to T2, not T1."""
    gone: dict[int, None]
    """What leaves B1 and B2: the ghosts among the incoming, and the oldest that are dropped."""


def _in_turns(
    turns: Sequence[bool], t1_cold: Sequence[OffloadKey], t2_cold: Sequence[OffloadKey]
) -> list[OffloadKey]:
    """Return the next key of T1 for each True, of T2 for each False."""
    t1_count = turns.count(True)
    if t1_count == len(turns):
        return list(t1_cold[:t1_count])
    if not t1_count:
        return list(t2_cold[: len(turns)])
    t1_next, t2_next = iter(t1_cold), iter(t2_cold)
    return [next(t1_next) if from_t1 else next(t2_next) for from_t1 in turns]


def _drop_oldest(ghosts: GhostQueue, count: int, gone: dict[int, None]) -> Iterator[int]:
    """Add the oldest ghosts to `gone`, one per step; `count` is enough to look at.

    When they have all gone, the next would be a victim of this very batch, which is no ghost yet.
    """
    for ghost in ghosts.peek(count):
        if ghost not in gone:
            gone[ghost] = None
            yield ghost


def _digests(keys: Sequence[OffloadKey]) -> list[int]:
    return [hash(key) & _DIGEST_MASK for key in keys]
