"""What the primary tier asks of an eviction policy."""

from collections.abc import Collection, Sequence
from typing import Protocol

from tierstore.key import OffloadKey
from tierstore.policy.plan import EvictionPlan
from tierstore.policy.use import UNKNOWN_USE, UseContext

__all__ = ["EvictionPolicy"]


class EvictionPolicy(Protocol):
    """The resident keys in order of eviction, each with the number of its slot.

    The order needs a table of all resident keys anyway, so that table is also the index of the
    primary tier. An index of its own beside the policy would take 50 bytes per chunk and one more
    lookup for every change. Beyond that a policy knows keys only; slot numbers mean nothing to it,
    and bytes and pins are not its business.

    Callers pass the keys of one prefix tail first, so that the head ends up youngest and a tail
    is evicted before its head. Every call is a batch and takes no lock. Policies trust their
    caller: what a method says of its keys (distinct, resident) was checked before.

    Room for a batch of misses is made by three calls:

        plan = victims(count, pinned, incoming)     changes nothing
        slots = evict(plan)                         at once, before any other change
        insert(incoming, slots)                     when the bytes have arrived; perhaps some keys

    Together they mean: every key of `incoming`, in order, misses, takes a free slot or else the
    victim's, and becomes resident, one after the other as in a textbook; the batch's own keys
    count as pinned until its end, since their slots must exist at the same time.

    Each call is told the `UseContext` of its batch. A policy that goes by it sets `needs_use`;
    batches are then cut by request.
    """

    needs_use: bool
    """Whether it goes by the uses that it is told; if no part does, all are `UNKNOWN_USE`."""

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
    ) -> EvictionPlan:
        """Plan the eviction of the next `count` victims, in order, for `incoming`; change nothing.

        Pinned keys are passed over. The first `len(incoming) - count` of `incoming` find a free
        slot. Victims beyond `len(incoming)` are those for keys that were never seen. The plan has
        fewer victims if fewer can be evicted. O(count + pinned keys passed over).

        The plan keeps the lists that it was given; the caller leaves them as they are.
        """

    def evict(self, plan: EvictionPlan) -> list[int]:
        """Remove the victims, in their order, and record the misses; return the victims' slots.

        The plan was made by `victims` of this policy, and nothing has changed since; or the caller
        made it: of some victims of such a plan, in their order, or of none, when slots are free.

        A policy may remember the victims as ghosts and learn from misses of its ghosts.
        """

    def remove(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Remove resident keys whose bytes are invalid, without a ghost; return their slots."""

    def clear(self) -> None:
        """Forget everything, ghosts included."""

    def __len__(self) -> int:
        """Return the number of resident keys."""
