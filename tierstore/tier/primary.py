"""The primary tier's index: which key lies in which slot, who is pinned, who goes next."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tierstore.config import PrimaryConfig
from tierstore.key import OffloadKey
from tierstore.transfer import IntArray

__all__ = ["PrimaryTier", "Reservation"]


@dataclass(frozen=True, slots=True)
class Reservation:
    """Slots set aside for incoming chunks, and what had to go for them."""

    slots: IntArray
    evicted: list[OffloadKey]


class PrimaryTier:
    """Control half of the pool in host memory. Moves no bytes, takes no lock, one thread.

    A key is absent, arriving (slot reserved, bytes on the way) or resident. Slots are page numbers:
    a slot's bytes start at `slot * PAGE_BYTES` in the pool. Size classes share the pool by slabs.
    """

    def __init__(self, config: PrimaryConfig, slot_bytes: Sequence[int]) -> None:
        """Divide `config.capacity_bytes`; `slot_bytes[g]` is the slot size of group g, 0: not cached.

        Raises:
            ConfigError: the capacity holds less than one slot of the largest group.
        """
        raise NotImplementedError

    def locate(self, keys: Sequence[OffloadKey]) -> list[int | None]:
        """Return the slot of each resident key, None for others. <= 0.1 us per key."""
        raise NotImplementedError

    @property
    def arriving(self) -> Mapping[OffloadKey, int]:
        """Slots that are reserved but not yet readable, by key (a live view)."""
        raise NotImplementedError

    def reserve(self, group_idx: int, keys: Sequence[OffloadKey]) -> Reservation | None:
        """Set aside one slot of the group's class per key, evicting unpinned chunks as needed.

        All or nothing: on None nothing was evicted. Duplicate, resident or arriving keys are a
        caller bug. The slots hold garbage until `commit`; nobody can pin them before.
        """
        raise NotImplementedError

    def commit(self, keys: Sequence[OffloadKey]) -> None:
        """Make arriving keys resident; in order of eviction, so a prefix comes tail first."""
        raise NotImplementedError

    def abort(self, keys: Sequence[OffloadKey]) -> None:
        """Give the slots of arriving keys back."""
        raise NotImplementedError

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        """Forbid the eviction of resident keys once more (counted)."""
        raise NotImplementedError

    def unpin(self, keys: Sequence[OffloadKey]) -> None:
        """Undo one `pin` per key."""
        raise NotImplementedError

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Record one use of each resident key, tail first."""
        raise NotImplementedError

    def coldest(self, count: int) -> list[OffloadKey]:
        """Name the next `count` victims in order, as if nothing was pinned; changes nothing."""
        raise NotImplementedError

    def free_count(self, group_idx: int) -> int:
        """Return how many chunks of a group find room without an eviction."""
        raise NotImplementedError

    def discard(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Forget those of the keys that are not pinned; return those that stay because they are."""
        raise NotImplementedError

    def clear(self) -> list[OffloadKey]:
        """Forget all resident, unpinned keys; return those that stay because they are pinned."""
        raise NotImplementedError

    def check(self) -> list[str]:
        """Verify every internal invariant; return the violations in words (empty: sound)."""
        raise NotImplementedError
