"""Records that are not evicted while they are read."""

from collections import Counter, deque
from collections.abc import Sequence
from itertools import repeat

from tierstore.key import OffloadKey

__all__ = ["Pins"]


class Pins(Counter[OffloadKey]):
    """How often each record is pinned: this process does not evict those that are."""

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        """Keep records from being evicted (counted)."""
        self.update(keys)

    def unpin(self, keys: Sequence[OffloadKey]) -> None:
        """Undo one `pin` per key."""
        # `subtract`, `self[key]` and `del` of a counter may call Python for each key. A key that
        # stays pinned is never absent: the catalog's thread looks meanwhile.
        get, pop = self.get, self.pop
        if list(map(get, keys)).count(1) == len(keys):  # usual: nobody else reads them
            deque(map(pop, keys, repeat(None)), maxlen=0)
            return
        for key in keys:
            count = get(key, 0) - 1
            if count > 0:
                self[key] = count
            else:
                pop(key, None)
