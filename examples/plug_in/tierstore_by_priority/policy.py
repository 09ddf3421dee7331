"""Least urgent first, then least recently used."""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from itertools import filterfalse, islice

from tierstore.key import OffloadKey
from tierstore.policy.plan import EvictionPlan
from tierstore.policy.use import UNKNOWN_USE, UseContext

__all__ = ["PriorityPolicy"]


class PriorityPolicy:
    """Keeps a queue per priority; the victims are from the least urgent one. See `EvictionPolicy`.

    A key has the priority of its last use. It keeps it where a use is unknown.
    """

    needs_use = True

    def __init__(self, capacity_chunks: int, *, newest_first: bool = False) -> None:
        """`newest_first`: of equal priority, the most recently used key leaves first.

        That suits requests that go through more chunks than memory holds, again and again. This
        policy has no ghosts, hence no use for `capacity_chunks`.
        """
        del capacity_chunks
        self._newest_first = newest_first
        self._slots: dict[OffloadKey, int] = {}
        self._priorities: dict[OffloadKey, int] = {}
        self._queues: dict[int, OrderedDict[OffloadKey, None]] = {}

    def locate(self, keys: Sequence[OffloadKey]) -> list[int | None]:
        """Return the slot of each resident key, None for others."""
        return list(map(self._slots.get, keys))

    def holds_any(self, keys: Sequence[OffloadKey]) -> bool:
        """Return whether any of the keys is resident."""
        return not self._slots.keys().isdisjoint(keys)

    def holds_all(self, keys: Sequence[OffloadKey]) -> bool:
        """Return whether all of the keys are resident."""
        return all(map(self._slots.__contains__, keys))

    def insert(
        self, keys: Sequence[OffloadKey], slots: Sequence[int], use: UseContext = UNKNOWN_USE
    ) -> None:
        """Add keys as the most recently used of their priority."""
        self._slots.update(zip(keys, slots, strict=True))
        self._enqueue(keys, use.priority)

    def touch(self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE) -> None:
        """Make keys the most recently used of the priority of this use."""
        for key in keys:
            priority = self._dequeue(key)
            self._enqueue([key], priority if use is UNKNOWN_USE else use.priority)

    def victims(
        self,
        count: int,
        pinned: Collection[OffloadKey],
        incoming: Sequence[OffloadKey] = (),
        use: UseContext = UNKNOWN_USE,
    ) -> EvictionPlan:
        """Plan the eviction of the least urgent keys that are not pinned."""
        evictable = filterfalse(pinned.__contains__, self._in_order())
        return EvictionPlan(list(islice(evictable, count)), incoming, use)

    def evict(self, plan: EvictionPlan) -> list[int]:
        """Remove the victims; return their slots."""
        return self.remove(plan.keys)

    def remove(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Remove resident keys; return their slots."""
        for key in keys:
            self._dequeue(key)
        return [self._slots.pop(key) for key in keys]

    def clear(self) -> None:
        """Forget everything."""
        self._slots.clear()
        self._priorities.clear()
        self._queues.clear()

    def __len__(self) -> int:
        return len(self._slots)

    def _in_order(self) -> Iterator[OffloadKey]:
        # As in vLLM, a smaller number is more urgent.
        for priority in sorted(self._queues, reverse=True):
            queue = self._queues[priority]
            yield from reversed(queue) if self._newest_first else queue

    def _enqueue(self, keys: Sequence[OffloadKey], priority: int) -> None:
        self._queues.setdefault(priority, OrderedDict()).update(dict.fromkeys(keys))
        self._priorities.update(dict.fromkeys(keys, priority))

    def _dequeue(self, key: OffloadKey) -> int:
        priority = self._priorities.pop(key)
        queue = self._queues[priority]
        del queue[key]
        if not queue:
            del self._queues[priority]
        return priority
