"""What the primary tier asks of an eviction policy."""

from collections.abc import Collection, Sequence
from typing import Protocol

from tierstore.key import OffloadKey
from tierstore.policy.use import UNKNOWN_USE, UseContext

__all__ = ["EvictionPolicy"]


class EvictionPolicy(Protocol):
    """The resident keys in order of eviction, each with the number of its slot.

    The order needs a table of all resident keys anyway, so that table is also the index: a second
    one would double the memory and the cost of every change. Beyond that a policy knows keys only;
    slot numbers mean nothing to it, and bytes and pins are not its business.

    Callers pass the keys of one prefix tail first, so that the head ends up youngest and a tail
    is evicted before its head. Every call is a batch and takes no lock. Policies trust their
    caller: what a method says of its keys (distinct, resident) was checked before.

    Room for a batch of misses is made by three calls:

        victims(count, pinned, incoming)    changes nothing
        evict(chosen, incoming)             at once; `chosen` may be empty when slots are free
        insert(incoming, slots)             when the bytes have arrived; perhaps only some keys

    Each is told the `UseContext` of its batch; a policy that goes by it sets `needs_use`, since
    batches are cut by request then.

    Together they mean: every key of `incoming`, in order, misses, takes a free slot or else the
    victim's, and becomes resident, one after the other as in a textbook; the batch's own keys
    count as pinned until its end, since their slots must exist at the same time.
    """

    needs_use: bool
    """Whether the policy goes by the uses that it is told; others are given `UNKNOWN_USE`."""

    def locate(self, keys: Sequence[OffloadKey]) -> list[int | None]:
        """Return the slot of each resident key, None for others; no use is recorded."""

    def holds_any(self, keys: Sequence[OffloadKey]) -> bool:
        """Return whether any of the keys is resident."""

    def holds_all(self, keys: Sequence[OffloadKey]) -> bool:
        """Return whether all of the keys are resident."""

    def insert(
        self, keys: Sequence[OffloadKey], slots: Sequence[int], use: UseContext = UNKNOWN_USE
    ) -> None:
        """Add keys that became resident, in order; none of them is resident. O(len(keys))."""

    def touch(self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE) -> None:
        """Record one use of each resident key, in order. O(len(keys))."""

    def victims(
        self,
        count: int,
        pinned: Collection[OffloadKey],
        incoming: Sequence[OffloadKey] = (),
        use: UseContext = UNKNOWN_USE,
    ) -> list[OffloadKey]:
        """Name the next `count` victims in order, skipping pinned keys; changes nothing.

        `incoming` are the keys that room is made for (ARC's choice depends on its ghosts); the
        first `len(incoming) - count` of them find a free slot. Victims beyond `len(incoming)` are
        named as for keys that were never seen.
        Returns fewer when fewer are evictable. O(count + pinned keys passed over).
        """

    def evict(
        self,
        keys: Sequence[OffloadKey],
        incoming: Sequence[OffloadKey] = (),
        use: UseContext = UNKNOWN_USE,
    ) -> list[int]:
        """Remove victims, in the order `victims` named them, and record the misses of `incoming`.

        Returns the slots of `keys`.
        A policy may remember the victims as ghosts and learn from misses of its ghosts.
        """

    def remove(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Remove resident keys without a trace (invalid bytes); return their slots."""

    def clear(self) -> None:
        """Forget everything, ghosts included."""

    def __len__(self) -> int:
        """Return the number of resident keys."""
