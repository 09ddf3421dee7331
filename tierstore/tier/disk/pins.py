"""Records that are not evicted while they are read."""

from collections import Counter
from collections.abc import Sequence

from tierstore.key import OffloadKey

__all__ = ["Pins"]


class Pins(Counter[OffloadKey]):
    """How often each record is pinned: this process does not evict those that are."""

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        """Keep records from being evicted (counted)."""
        self.update(keys)

    def unpin(self, keys: Sequence[OffloadKey]) -> None:
        """Undo one `pin` per key."""
        self.subtract(keys)
        for key in set(keys):
            if self[key] <= 0:
                del self[key]
