"""Uses of records on their way to a catalog: they wait a moment, so that a burst is one message.

At once, a burst of loads would share the interpreter with the transactions that record it. What a
kill loses is the order of that moment.
"""

from collections.abc import Callable, Sequence

from tierstore.catalog.messages import TouchKeys
from tierstore.clock import Clock
from tierstore.key import OffloadKey

__all__ = ["Touches"]

_WAIT_SECONDS = 0.1
_KEYS_MAX = 512


class Touches:
    """The uses of one tier's records, in order. One thread."""

    def __init__(self, clock: Clock, offer: Callable[[TouchKeys], object]) -> None:
        """`offer` takes a message, or drops it."""
        self._clock = clock
        self._offer = offer
        self._keys: list[OffloadKey] = []
        self._since = 0.0

    def __bool__(self) -> bool:
        return bool(self._keys)

    def add(self, keys: Sequence[OffloadKey]) -> None:
        """Take note of uses, tail first."""
        if not self._keys:
            self._since = self._clock.seconds()
        self._keys.extend(keys)

    def put_if_due(self) -> None:
        """Offer the uses to the catalog if they have waited long enough."""
        if self._keys and self._clock.seconds() - self._since > _WAIT_SECONDS:
            self.put()

    def put(self) -> None:
        """Offer all uses to the catalog."""
        keys, self._keys = self._keys, []
        for start in range(0, len(keys), _KEYS_MAX):
            self._offer(TouchKeys(tuple(keys[start : start + _KEYS_MAX])))
