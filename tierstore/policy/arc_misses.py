"""What a batch of misses does to the lists of ARC, worked out on numbers alone.

Cases II to IV of Fig. 4 in Megiddo & Modha, FAST'03. Nothing is changed here.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import NamedTuple

from tierstore.key import OffloadKey
from tierstore.policy.ghost_queue import GhostIndex, GhostQueue

__all__ = ["ArcLists", "Misses", "MissesInDetail"]

_NO_DIGEST = -1
"""No key has this digest."""


class Misses(NamedTuple):
    """What a batch of misses does before its keys arrive."""

    p: float
    victims: list[OffloadKey]
    t1_victim_count: int


class MissesInDetail(NamedTuple):
    """What a batch of misses does, and where its keys go when they arrive."""

    misses: Misses
    was_ghost: list[bool]
    """Per incoming key: it goes to T2, not T1."""
    gone: dict[int, None]
    """What leaves B1 and B2: the ghosts among the incoming, and the oldest that are dropped."""


class ArcLists(NamedTuple):
    """The lists of ARC as a batch of misses finds them.

    `incoming` are the digests of the keys that miss. The last `count` of them evict; victims beyond
    their number leave for keys that were never seen. `cold` is what may be evicted from T1 and from
    T2, in order.
    """

    c: int
    p: float
    t1_size: int
    t2_size: int
    ghosts: GhostIndex
    b1: GhostQueue
    b2: GhostQueue

    def misses(
        self,
        incoming: Sequence[int],
        cold: tuple[Sequence[OffloadKey], Sequence[OffloadKey]],
        count: int,
    ) -> Misses:
        """Return what misses that include ghosts do."""
        is_plenty = len(cold[0]) == len(cold[1]) == count == len(incoming)
        if is_plenty:
            queues = self.ghosts.queues(incoming)
            if None not in queues:
                b1 = self.b1
                return self._misses_of_ghosts([queue is b1 for queue in queues], cold)
        return self.in_detail(incoming, cold, count).misses

    def in_detail(  # noqa: C901 - a function per case would be called once per key, the main cost
        self,
        incoming: Sequence[int],
        cold: tuple[Iterable[OffloadKey], Iterable[OffloadKey]] = ((), ()),
        count: int = 0,
    ) -> MissesInDetail:
        """Return what misses that include ghosts do, key by key."""
        c, p, t1_size, t2_size = self.c, self.p, self.t1_size, self.t2_size
        b1, b2 = self.b1, self.b2
        b1_size, b2_size = len(b1), len(b2)
        t1_cold, t2_cold = map(iter, cold)
        gone: dict[int, None] = {}
        b1_oldest = _drop_oldest(self.b1, len(incoming), gone)
        b2_oldest = _drop_oldest(self.b2, len(incoming), gone)
        victims: list[OffloadKey] = []
        t1_victim_count = 0
        was_ghost: list[bool] = []
        free = len(incoming) - count
        misses = zip(
            chain(incoming, repeat(_NO_DIGEST, -free)),
            chain(self.ghosts.queues(incoming), repeat(None)),
            strict=False,
        )
        for number, (ghost, queue) in enumerate(misses):
            # The sizes in the formulas of p are those before the ghost leaves its list.
            in_b1 = queue is b1 and ghost not in gone
            in_b2 = queue is b2 and ghost not in gone
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
        return MissesInDetail(Misses(p, victims, t1_victim_count), was_ghost, gone)

    def _misses_of_ghosts(
        self, in_b1s: Iterable[bool], cold: tuple[Sequence[OffloadKey], Sequence[OffloadKey]]
    ) -> Misses:
        """Do as `in_detail` where every miss is a ghost and evicts, and there is plenty of both.

        No stranger comes, so no old ghost is dropped, and neither list of victims ends.
        """
        c, p, t1_size = self.c, self.p, self.t1_size
        b1_size, b2_size = len(self.b1), len(self.b2)
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
        return Misses(p, _in_turns(turns, *cold), turns.count(True))


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
