"""Least recently used."""

from collections.abc import Collection, Sequence

from tierstore.key import OffloadKey
from tierstore.policy.key_index import KeyIndex
from tierstore.policy.key_queue import KeyQueue
from tierstore.policy.plan import EvictionPlan
from tierstore.policy.use import UNKNOWN_USE, UseContext

__all__ = ["LruPolicy"]

_CAPACITY_CHUNKS = 1 << 16


class LruPolicy:
    """Exact LRU: the victim is the key whose last use is the longest ago. Keeps no ghosts."""

    needs_use = False

    def __init__(self, capacity_chunks: int = _CAPACITY_CHUNKS) -> None:
        """Make room for about `capacity_chunks` keys; more are no error."""
        self._capacity_chunks = capacity_chunks
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._resident = KeyIndex(self._capacity_chunks)
        self._order = KeyQueue(self._resident)

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
        """Add keys as the most recently used, in order."""
        self._order.push(keys, slots)

    def touch(
        self,
        keys: Sequence[OffloadKey],
        use: UseContext = UNKNOWN_USE,  # noqa: ARG002 - as in `insert`
    ) -> None:
        """Make resident keys the most recently used, in order."""
        self._order.touch(keys)

    def victims(
        self,
        count: int,
        pinned: Collection[OffloadKey],
        incoming: Sequence[OffloadKey] = (),
        use: UseContext = UNKNOWN_USE,
    ) -> EvictionPlan:
        """Plan the eviction of the least recently used keys that are not pinned, oldest first."""
        return EvictionPlan(self._order.peek(count, pinned), incoming, use)

    def evict(self, plan: EvictionPlan) -> list[int]:
        """Remove the victims; return their slots."""
        return self._order.pop(plan.keys)

    def remove(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Remove resident keys; return their slots."""
        return self._order.pop(keys)

    def __len__(self) -> int:
        return len(self._order)
