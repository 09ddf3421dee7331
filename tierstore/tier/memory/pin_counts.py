"""How often each resident chunk is pinned."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat

from tierstore.key import OffloadKey

__all__ = ["PinCounts"]


class PinCounts:
    """Counted pins by key; a key without a pin takes no memory. Most keys have one pin."""

    __slots__ = ("by_key",)

    def __init__(self) -> None:
        self.by_key: dict[OffloadKey, int] = {}
        """Only to be read. Policies look up every victim, and a read-only view would be slower."""

    def __len__(self) -> int:
        """Return how many keys are pinned, each counted once."""
        return len(self.by_key)

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self.by_key)

    def __contains__(self, key: object) -> bool:
        return key in self.by_key

    def add(self, keys: Sequence[OffloadKey]) -> None:
        """Pin each key once more."""
        pins = self.by_key
        if pins and not pins.keys().isdisjoint(keys):
            for key in keys:
                pins[key] = pins.get(key, 0) + 1
            return
        count = len(pins) + len(keys)
        for key in keys:
            pins[key] = 1
        if len(pins) != count:
            pins.update(Counter(keys))

    def remove(self, keys: Sequence[OffloadKey]) -> OffloadKey | None:
        """Undo one pin per key; or change nothing, and return the first key with too few pins."""
        pins = self.by_key
        counts = list(map(pins.pop, keys, repeat(0)))
        if counts.count(1) == len(keys):
            return None
        # Some key is pinned more than once, comes twice, or is not pinned: put the counts back
        # and go key by key. A key's later places popped nothing, hence 0.
        pins.update((key, count) for key, count in zip(keys, counts, strict=True) if count)
        left: dict[OffloadKey, int] = {}
        for key in keys:
            left[key] = left.get(key, pins.get(key, 0)) - 1
        if min(left.values()) < 0:
            return next(key for key, count in left.items() if count < 0)
        for key, count in left.items():
            if count:
                pins[key] = count
            else:
                del pins[key]
        return None

    def unpinned(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return those of the keys that have no pin."""
        pins = self.by_key
        return [key for key in keys if key not in pins]
