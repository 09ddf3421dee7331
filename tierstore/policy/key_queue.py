"""An ordered set of keys, oldest first, built on a plain `dict`."""

import sys
from collections.abc import Collection, Iterator, KeysView, Sequence
from itertools import filterfalse, islice

from tierstore.key import OffloadKey

__all__ = ["KeyQueue"]

_COLD_KEYS_MIN = 1024
_TABLE_BYTES_PER_KEY_MAX = 80
_TABLE_BYTES_SLACK = 4096


class KeyQueue:
    """Keys in order of their last use. No lock; the caller keeps the preconditions.

    A `dict` keeps the order of insertion, and deleting and inserting a key again makes it the
    youngest. That is a third of the memory of an `OrderedDict`, with two catches that are handled
    here: deleted entries stay in the table until it is rebuilt, so looking at the oldest key scans
    all that were evicted since (hence `_cold`), and a table that fills up is replaced by one for
    three times its keys (hence `_compact`).
    """

    __slots__ = ("_cold", "_keys")

    def __init__(self) -> None:
        self._keys: dict[OffloadKey, None] = {}
        self._cold: dict[OffloadKey, None] = {}
        """The first keys of `_keys` in their order, or nothing: a short table to scan."""

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._keys)

    def view(self) -> KeysView[OffloadKey]:
        """Return the keys as a set-like view; valid until the next change of the queue."""
        return self._keys.keys()

    def push(self, keys: Sequence[OffloadKey]) -> None:
        """Append keys that are not in the queue, in order, as the youngest."""
        table = self._keys
        for key in keys:
            table[key] = None
        self._compact()

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Make keys of the queue its youngest, in order; of a repeated key the last place counts."""
        table = self._keys
        for key in keys:
            table[key] = table.pop(key)
        self._forget_cold(keys)
        self._compact()

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Remove distinct keys of the queue."""
        table = self._keys
        for key in keys:
            del table[key]
        self._forget_cold(keys)

    def pop_present(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Remove those of the distinct keys that are in the queue; return them in order."""
        present = list(filter(self._keys.__contains__, keys))
        if present:
            self.discard(present)
        return present

    def peek(self, count: int, skip: Collection[OffloadKey] = ()) -> list[OffloadKey]:
        """Return the `count` oldest keys that are not in `skip`, fewer if there are fewer.

        O(count + skipped keys passed over), amortised.
        """
        if count <= 0:
            return []
        while True:
            oldest = filterfalse(skip.__contains__, self._cold) if skip else self._cold
            found = list(islice(oldest, count))
            if len(found) == count or len(self._cold) == len(self._keys):
                return found
            # The next look is for as many keys at least, so a large request pays for one scan.
            size = max(_COLD_KEYS_MIN, len(self._keys) >> 8, 4 * count, 2 * len(self._cold))
            self._cold = dict.fromkeys(islice(self._keys, size))

    def clear(self) -> None:
        """Remove all keys."""
        self._keys = {}
        self._cold = {}

    def _forget_cold(self, keys: Sequence[OffloadKey]) -> None:
        cold = self._cold
        if cold and not cold.keys().isdisjoint(keys):
            for key in keys:
                cold.pop(key, None)

    def _compact(self) -> None:
        table_bytes_max = _TABLE_BYTES_PER_KEY_MAX * len(self._keys) + _TABLE_BYTES_SLACK
        if sys.getsizeof(self._keys) > table_bytes_max:
            self._keys = dict.fromkeys(self._keys)
