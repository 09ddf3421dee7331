"""How often each resident chunk is pinned."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from tierstore.key import OffloadKey
from tierstore.policy.small_tables import small_tables

__all__ = ["PinCounts"]

_PINNED_COUNT = 1 << 17


class PinCounts(Mapping[OffloadKey, int]):
    """Counted pins by key; a key without a pin takes no memory. Most keys have one pin."""

    __slots__ = ("_count", "_tables")

    def __init__(self) -> None:
        self._count = 0
        self._tables: list[dict[OffloadKey, int]] = small_tables(_PINNED_COUNT)
        """By the last byte of the key; long prompts pin as many chunks as a tier holds."""

    def __len__(self) -> int:
        """Return how many keys are pinned, each counted once."""
        return self._count

    def __iter__(self) -> Iterator[OffloadKey]:
        return chain.from_iterable(self._distinct_tables())

    def __contains__(self, key: object) -> bool:
        # Policies ask for each victim.
        return key in self._tables[key[-1]]  # type: ignore[index]

    def __getitem__(self, key: OffloadKey) -> int:
        return self._tables[key[-1]][key]

    def counts(self) -> Iterable[tuple[OffloadKey, int]]:
        """Return all pinned keys, each with its pins; faster than `items`."""
        return chain.from_iterable(table.items() for table in self._distinct_tables())

    def add(self, keys: Sequence[OffloadKey]) -> None:
        """Pin each key once more."""
        tables = self._tables
        again_count = 0
        for key in keys:
            table = tables[key[-1]]
            if key in table:
                table[key] += 1
                again_count += 1
            else:
                table[key] = 1
        self._count += len(keys) - again_count

    def remove(self, keys: Sequence[OffloadKey]) -> OffloadKey | None:
        """Undo one pin per key; or change nothing, and return the first key with too few pins."""
        tables = self._tables
        stay_count = 0
        for position, key in enumerate(keys):
            table = tables[key[-1]]
            count = table.pop(key, 0)
            if count > 1:
                table[key] = count - 1
                stay_count += 1
            elif not count:
                self._count -= position - stay_count
                self.add(keys[:position])
                return key
        self._count -= len(keys) - stay_count
        return None

    def unpinned(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return those of the keys that have no pin."""
        tables = self._tables
        return [key for key in keys if key not in tables[key[-1]]]

    def _distinct_tables(self) -> Iterable[dict[OffloadKey, int]]:
        return {id(table): table for table in self._tables}.values()
