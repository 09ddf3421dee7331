"""Adaptive replacement cache: recency and frequency, balanced by what it evicted wrongly.

Megiddo & Modha, FAST'03, Fig. 4. Names as in the paper: T1 holds the resident keys that were used
once since they came, T2 those used more often; B1 and B2 are their ghosts; p is the size that T1
aims at; c is the capacity.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

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
        self._strangers: Sequence[OffloadKey] | None = None
        """The batch that `victims` found to hold no ghost, so that `evict` need not ask again."""

    def insert(self, keys: Sequence[OffloadKey]) -> None:
        """Add keys, in order: ghosts to T2, all others to T1; then drop the oldest ghosts."""
        if self._no_ghost_in(keys):
            self._t1.push(keys)
            self._trim()
        else:
            steps = self._replay(keys, (), ())
            self._b1.discard(list(steps.b1.gone))
            self._b2.discard(list(steps.b2.gone))
            self._t2.push(steps.hits)
            self._t1.push(steps.strangers)
        self._strangers = None

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Make resident keys the most recently used of T2, in order (case I)."""
        if not self._t1.view().isdisjoint(keys):
            moved = self._t1.pop_present(list(dict.fromkeys(keys)))
            self._t2.push(moved)
        self._t2.touch(keys)

    def victims(
        self,
        count: int,
        pinned: Collection[OffloadKey],
        incoming: Sequence[OffloadKey] = (),
    ) -> list[OffloadKey]:
        """Name the keys that REPLACE takes for the last `count` of `incoming`, in order."""
        if not self._no_ghost_in(incoming):
            self._strangers = None
            return self._replay(
                incoming, self._t1.peek(count, pinned), self._t2.peek(count, pinned), count
            ).victims
        self._strangers = incoming
        # Keys without a ghost leave p alone, and each makes T1 grow by one: REPLACE takes from T2
        # until |T1| > p, from then on from T1, whose size then stays.
        t1_size = len(self._t1) + max(len(incoming) - count, 0)
        from_t2 = self._t2.peek(min(int(self._p) + 1 - t1_size, count), pinned)
        from_t1 = self._t1.peek(count - len(from_t2), pinned)
        missing = count - len(from_t2) - len(from_t1)
        if missing > 0:
            more = self._t2.peek(len(from_t2) + missing, pinned)
            return from_t2 + from_t1 + more[len(from_t2) :]
        return from_t2 + from_t1

    def evict(self, keys: Sequence[OffloadKey], incoming: Sequence[OffloadKey] = ()) -> None:
        """Move victims to B1 and B2, in order, and adapt p to the ghosts among `incoming`."""
        t1_victims = list(filter(self._t1.view().__contains__, keys))
        t2_victims = (
            list(filter(self._t2.view().__contains__, keys)) if len(t1_victims) < len(keys) else []
        )
        if incoming is not self._strangers and not self._no_ghost_in(incoming):
            self._p = self._replay(incoming, t1_victims, t2_victims, len(keys)).p
        if t1_victims:
            self._t1.discard(t1_victims)
            self._b1.push(t1_victims)
        if t2_victims:
            self._t2.discard(t2_victims)
            self._b2.push(t2_victims)
        self._strangers = None

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Remove resident keys from T1 and T2; they leave no ghost."""
        t1_count = len(self._t1.pop_present(keys))
        if t1_count < len(keys):
            self._t2.pop_present(keys)

    def clear(self) -> None:
        """Forget all keys and ghosts, and start over with p = 0."""
        for keys in (self._t1, self._t2, self._b1, self._b2):
            keys.clear()
        self._p = 0.0
        self._strangers = None

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)

    def _no_ghost_in(self, keys: Sequence[OffloadKey]) -> bool:
        return self._b1.view().isdisjoint(keys) and self._b2.view().isdisjoint(keys)

    def _replay(
        self,
        incoming: Sequence[OffloadKey],
        t1_cold: Sequence[OffloadKey],
        t2_cold: Sequence[OffloadKey],
        count: int = 0,
    ) -> "_Replay":
        """Go through misses that include ghosts; the last `count` of them evict."""
        steps = _Replay(
            c=self._c,
            p=self._p,
            t1_size=len(self._t1),
            t2_size=len(self._t2),
            b1=_GhostView(self._b1, len(incoming)),
            b2=_GhostView(self._b2, len(incoming)),
            t1_cold=iter(t1_cold),
            t2_cold=iter(t2_cold),
        )
        free = len(incoming) - count
        for number, key in enumerate(incoming):
            steps.miss(key, evict=number >= free)
        return steps

    def _trim(self) -> None:
        l1_excess = len(self._t1) + len(self._b1) - self._c
        if l1_excess > 0:
            self._b1.discard(self._b1.peek(l1_excess))
        excess = len(self) + len(self._b1) + len(self._b2) - 2 * self._c
        if excess > 0:
            self._b2.discard(self._b2.peek(excess))


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
