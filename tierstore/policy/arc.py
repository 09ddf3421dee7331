"""Adaptive replacement cache: recency and frequency, balanced by what it evicted wrongly.

Megiddo & Modha, FAST'03, Fig. 4. Names as in the paper: T1 holds the resident keys that were used
once since they came, T2 those used more often; B1 and B2 are their ghosts; p is the size that T1
aims at; c is the capacity.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import not_

from tierstore.key import OffloadKey
from tierstore.policy.arc_misses import ArcLists
from tierstore.policy.ghost_queue import GhostIndex, GhostQueue
from tierstore.policy.key_index import KeyIndex
from tierstore.policy.key_queue import KeyQueue
from tierstore.policy.plan import EvictionPlan
from tierstore.policy.use import UNKNOWN_USE, UseContext

__all__ = ["ArcPolicy"]

_DIGEST_MASK = (1 << 60) - 1
"""An `int` of more bits takes more memory."""
_RETURNING_MAX = 4096


@dataclass(slots=True, eq=False)
class _ArcPlan(EvictionPlan):
    """Spares `evict` from working out again what `victims` has found."""

    t1_victim_count: int = 0
    digests: Sequence[int] = ()
    """Of all incoming keys, if there are ghosts among them."""
    p: float = 0.0
    """After the misses of these."""


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

    A ghost is 60 bits of its key's hash, 32 bytes instead of 80, since its key is never returned.
    Two keys may share a digest, one pair in 10^18: a key never seen then passes for a ghost. That
    is a worse guess of what to keep, and never a wrong hit.
    """

    needs_use = False

    def __init__(self, capacity_chunks: int) -> None:
        """`capacity_chunks` is the paper's c."""
        if capacity_chunks <= 0:
            raise ValueError(f"capacity_chunks: expected at least 1, got {capacity_chunks}")
        self._c = capacity_chunks
        self.clear()

    def clear(self) -> None:
        """Forget all keys and ghosts, and start over with p = 0."""
        self._p = 0.0
        self._resident = KeyIndex(self._c)
        self._t1, self._t2 = KeyQueue(self._resident), KeyQueue(self._resident)
        self._ghosts = GhostIndex(self._c)
        self._b1, self._b2 = GhostQueue(self._ghosts), GhostQueue(self._ghosts)
        self._returning: set[int] | None = set()
        """Digests of keys that missed together with a ghost and are not inserted yet. `insert` need
        not look for ghosts among other keys: a key on its way cannot be evicted. None: they were
        too many, because batches never arrived, and `insert` always looks."""

    def locate(self, keys: Sequence[OffloadKey]) -> list[int | None]:
        """Return the slot of each resident key, None for others."""
        return self._resident.locate(keys)

    def holds_any(self, keys: Sequence[OffloadKey]) -> bool:
        """Return whether any of the keys is resident."""
        return self._resident.holds_any(keys)

    def holds_all(self, keys: Sequence[OffloadKey]) -> bool:
        """Return whether all of the keys are resident."""
        return self._resident.holds_all(keys)

    def insert(
        self,
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
        use: UseContext = UNKNOWN_USE,  # noqa: ARG002 - the protocol; all uses are alike here
    ) -> None:
        """Add keys, in order: ghosts to T2, all others to T1; then drop the oldest ghosts."""
        if self._returning or self._returning is None:
            digests = _digests(keys)
            if self._returning is not None:
                self._returning.difference_update(digests)
            if self._ghosts.holds_any(digests):
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
        self._t2.touch(keys)

    def victims(
        self,
        count: int,
        pinned: Collection[OffloadKey],
        incoming: Sequence[OffloadKey] = (),
        use: UseContext = UNKNOWN_USE,
    ) -> EvictionPlan:
        """Plan what REPLACE does for the last `count` of `incoming`, in order."""
        digests = _digests(incoming)
        if not self._ghosts.holds_any(digests):
            t1_count, found = self._victims_for_strangers(count, pinned, len(incoming))
            return _ArcPlan(found, incoming, use, t1_count)
        cold = self._t1.peek(count, pinned), self._t2.peek(count, pinned)
        misses = self._lists().misses(digests, cold, count)
        return _ArcPlan(misses.victims, incoming, use, misses.t1_victim_count, digests, misses.p)

    def evict(self, plan: EvictionPlan) -> list[int]:
        """Move the victims to B1 and B2, in order, and adapt p to the ghosts among `incoming`."""
        if not isinstance(plan, _ArcPlan):
            return self._evict_chosen(plan)
        keys = plan.keys
        if plan.digests:
            self._expect(plan.digests)
            self._p = plan.p
        if plan.t1_victim_count == len(keys):
            self._b1.push(_digests(keys))
            return self._t1.pop(keys)
        if not plan.t1_victim_count:
            self._b2.push(_digests(keys))
            return self._t2.pop(keys)
        return self._pop_to_ghosts(keys)

    def remove(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Remove resident keys from T1 and T2; they leave no ghost."""
        return self._t1.pop(keys)

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)

    def _insert_ghosts(
        self, keys: Sequence[OffloadKey], slots: Sequence[int], digests: Sequence[int]
    ) -> None:
        if None not in self._ghosts.queues(digests):
            # What left together comes back together, and only strangers drop old ghosts.
            self._ghosts.remove(digests)
            self._t2.push(keys, slots)
            return
        steps = self._lists().in_detail(digests)
        self._ghosts.remove(steps.gone)
        was_ghost = steps.was_ghost
        was_stranger = list(map(not_, was_ghost))
        self._t2.push(list(compress(keys, was_ghost)), compress(slots, was_ghost))
        self._t1.push(list(compress(keys, was_stranger)), compress(slots, was_stranger))

    def _evict_chosen(self, plan: EvictionPlan) -> list[int]:
        """Evict what the caller has chosen among the victims; p adapts as in `victims`."""
        digests = _digests(plan.incoming)
        if self._ghosts.holds_any(digests):
            t1 = self._t1
            cold = (
                [key for key in plan.keys if key in t1],
                [key for key in plan.keys if key not in t1],
            )
            self._p = self._lists().misses(digests, cold, len(plan.keys)).p
            self._expect(digests)
        return self._pop_to_ghosts(plan.keys)

    def _pop_to_ghosts(self, keys: Sequence[OffloadKey]) -> list[int]:
        in_t1 = list(map(self._t1.__contains__, keys))
        self._b1.push(_digests(compress(keys, in_t1)))
        self._b2.push(_digests(compress(keys, map(not_, in_t1))))
        return self._t1.pop(keys)

    def _lists(self) -> ArcLists:
        return ArcLists(
            self._c, self._p, len(self._t1), len(self._t2), self._ghosts, self._b1, self._b2
        )

    def _expect(self, digests: Sequence[int]) -> None:
        if self._returning is not None:
            self._returning.update(digests)
            if len(self._returning) > min(2 * self._c, _RETURNING_MAX):
                # Left by batches that never arrived.
                left = self._ghosts.present(self._returning)
                self._returning = left if len(left) <= _RETURNING_MAX // 2 else None

    def _victims_for_strangers(
        self, count: int, pinned: Collection[OffloadKey], incoming_count: int
    ) -> tuple[int, list[OffloadKey]]:
        """Return how many victims are from T1, and all of them in order.

        Keys without a ghost leave p alone, and each makes T1 grow by one: REPLACE takes from T2
        until |T1| > p, from then on from T1, whose size then stays.
        """
        t1_size = self._t1.size + max(incoming_count - count, 0)
        t2_turns = min(int(self._p) + 1 - t1_size, count)
        from_t2 = self._t2.peek(t2_turns, pinned) if t2_turns > 0 else []
        from_t1 = self._t1.peek(count - len(from_t2), pinned)
        found = from_t2 + from_t1 if from_t2 else from_t1
        if len(found) < count:
            more = self._t2.peek(count - len(from_t1), pinned)
            found = found + more[len(from_t2) :]
        return len(from_t1), found

    def _trim(self) -> None:
        b1_size, b2_size = self._b1.size, self._b2.size
        l1_size = self._t1.size + b1_size
        excess = l1_size - self._c
        if excess > 0:
            self._b1.drop_oldest(excess)
            l1_size -= min(excess, b1_size)
        excess = l1_size + self._t2.size + b2_size - 2 * self._c
        if excess > 0:
            self._b2.drop_oldest(excess)


def _digests(keys: Iterable[OffloadKey]) -> list[int]:
    return [digest & _DIGEST_MASK for digest in map(hash, keys)]
