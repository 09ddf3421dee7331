"""Making way in a tier that has room, but not in one piece."""

from tierstore.tier.secondary import SecondaryTier

__all__ = ["Crowding"]

# An `lmdb` tier stores a payload as one value, in adjacent pages. Values of single pages lost: no
# pieces, but 64 writes for a chunk of 256 KiB. Refusing unequal chunk sizes lost: engines could not
# share a path.
_ROUNDS_MAX = 8
"""A tier without room in one piece evicts this often for what it could not write, each time twice
as much; then the chunks wait for the next flush."""

_CALLS_MAX = 256
"""After so many steps the release of evicted bytes is no longer waited for."""


class Crowding:
    """How far one tier has gone in evicting for chunks that found no room in one piece."""

    def __init__(self, secondary: SecondaryTier) -> None:
        self._secondary = secondary
        self._round_count = 0
        self._call_count = 0
        """0: nothing waits for room in one piece."""

    def end(self) -> None:
        """Take note that a write found room, or that all is tried again: rounds start over."""
        self._round_count = 0

    def make_way(self, chunk_count: int, chunk_bytes: int) -> bool:
        """Evict for so many chunks; False: that was tried often enough.

        Writes that fail while a round is under way began before it. They show nothing new:
        evicting for each of them would double the amount until the tier is empty.
        """
        if self._call_count:
            return True
        if self._round_count == _ROUNDS_MAX:
            return False
        self._round_count += 1
        self._call_count = 1
        self._secondary.make_way(chunk_count << self._round_count, chunk_bytes)
        return True

    def is_making_way(self, *, is_releasing: bool) -> bool:
        """Return whether evicted bytes are still being given back; asked once per step."""
        if not self._call_count:
            return False
        self._call_count += 1
        is_over = self._secondary.is_settled() and not is_releasing
        if is_over or self._call_count > _CALLS_MAX:
            self._call_count = 0
        return self._call_count > 0
