"""Adaptive replacement cache: recency and frequency, balanced by what it evicted wrongly.

Megiddo & Modha, FAST'03, Fig. 4. Names as in the paper: T1 holds the resident keys that were used
once since they came, T2 those used more often; B1 and B2 are their ghosts; p is the size that T1
aims at; c is the capacity.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import not_, or_

from tierstore.key import OffloadKey
from tierstore.policy.arc_misses import ArcLists
from tierstore.policy.ghost_queue import GhostQueue
from tierstore.policy.key_queue import KeyQueue
from tierstore.policy.plan import EvictionPlan
from tierstore.policy.use import UNKNOWN_USE, UseContext

__all__ = ["ArcPolicy"]

_DIGEST_MASK = (1 << 60) - 1
"""An `int` of more bits takes more memory."""


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
        self._p = 0.0
        self._t1, self._t2 = KeyQueue(), KeyQueue()
        self._b1, self._b2 = GhostQueue(), GhostQueue()
        self._returning: set[int] = set()
        """Digests of keys that missed together with a ghost and are not inserted yet. `insert` need
        not look for ghosts among other keys: a key on its way cannot be evicted."""

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
        use: UseContext = UNKNOWN_USE,
    ) -> EvictionPlan:
        """Plan what REPLACE does for the last `count` of `incoming`, in order."""
        digests = _digests(incoming)
        if self._no_ghost_in(digests):
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
        return self._pop(keys)[0]

    def clear(self) -> None:
        """Forget all keys and ghosts, and start over with p = 0."""
        self._t1.clear()
        self._t2.clear()
        self._b1.clear()
        self._b2.clear()
        self._returning.clear()
        self._p = 0.0

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
        steps = self._lists().in_detail(digests)
        self._b1.remove(steps.gone)
        self._b2.remove(steps.gone)
        was_ghost = steps.was_ghost
        was_stranger = list(map(not_, was_ghost))
        self._t2.push(list(compress(keys, was_ghost)), compress(slots, was_ghost))
        self._t1.push(list(compress(keys, was_stranger)), compress(slots, was_stranger))

    def _evict_chosen(self, plan: EvictionPlan) -> list[int]:
        """Evict what the caller has chosen among the victims; p adapts as in `victims`."""
        digests = _digests(plan.incoming)
        if not self._no_ghost_in(digests):
            t1 = self._t1.table
            cold = (
                [key for key in plan.keys if key in t1],
                [key for key in plan.keys if key not in t1],
            )
            self._p = self._lists().misses(digests, cold, len(plan.keys)).p
            self._expect(digests)
        return self._pop_to_ghosts(plan.keys)

    def _pop_to_ghosts(self, keys: Sequence[OffloadKey]) -> list[int]:
        slots, t1_victims, t2_victims = self._pop(keys)
        self._b1.push(_digests(t1_victims))
        self._b2.push(_digests(t2_victims))
        return slots

    def _lists(self) -> ArcLists:
        return ArcLists(self._c, self._p, len(self._t1), len(self._t2), self._b1, self._b2)

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


def _digests(keys: Sequence[OffloadKey]) -> list[int]:
    return [hash(key) & _DIGEST_MASK for key in keys]
