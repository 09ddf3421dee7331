"""Chunks in memory that a tier should have by its rule and does not have."""

import itertools
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet

from tierstore.key import OffloadKey

__all__ = ["FailedDemotes"]

_WRITES_UNTIL_RETRY_MAX = 1 << 8
_PAYLOAD_LOST = "payload_lost"


class FailedDemotes:
    """Remembers chunks whose demote failed, with the reason, and when to ask for them again.

    All of them are asked for again at each flush, and when the tier was out of use and is back.
    Those that a device or a catalog refused are also when a write succeeds: it may be back. A chunk
    may fail for ever where others succeed, so the number of writes in between doubles.

    Holds what is resident at most: the owner calls `forget` for chunks that left memory.
    """

    # Looking up all chunks in memory at each flush lost: 1.5 us each, and a chunk that was evicted
    # from disk would be written again at every flush.

    def __init__(self) -> None:
        self._refused: dict[OffloadKey, str] = {}
        self._unasked: dict[OffloadKey, str] = {}
        """The write queue was full, or the catalog was lost: they wait for the next flush, since
        newer chunks have the room of the queue."""
        self._retrying: dict[OffloadKey, str] = {}
        """To be asked for again, each with the reason of its last failure."""
        self._asked: set[OffloadKey] = set()
        """Taken, and not known yet to have failed again."""
        self._writes_until_retry = 1
        self._backoff = 1
        self._lost: set[OffloadKey] = set()
        """Those of which demotes up to this ticket may have been written into what is gone."""
        self._lost_ticket = 0

    def __bool__(self) -> bool:
        return bool(self._refused or self._unasked or self._retrying)

    def keys(self) -> list[OffloadKey]:
        """Return the chunks that are not in the tier."""
        return [*self._refused, *self._unasked, *self._retrying]

    @property
    def is_retrying(self) -> bool:
        """Whether `take` has something to give."""
        return bool(self._retrying)

    def note_refused(self, keys: Collection[OffloadKey], reason: str) -> int:
        """Remember resident chunks that the device or the catalog refused.

        Returns how many of them had not failed before.
        """
        self._refused.update(dict.fromkeys(keys, reason))
        known_count = len(self._asked)
        self._asked.difference_update(keys)
        return len(keys) - (known_count - len(self._asked))

    def note_unasked(self, keys: Collection[OffloadKey], reason: str) -> None:
        """Remember resident chunks that found no room in the write queue, or lost their record."""
        refused, retrying = self._refused, self._retrying
        unasked = [key for key in keys if key not in refused and key not in retrying]
        self._unasked.update(dict.fromkeys(unasked, reason))

    def note_lost(
        self,
        keys: Collection[OffloadKey],
        *,
        held: AbstractSet[OffloadKey],
        ticket: int,
    ) -> None:
        """Remember resident chunks whose payload may be gone.

        Those that are `held` by demotes up to `ticket` may have been written there: they are asked
        for again once they are recorded.
        """
        self._lost.update(key for key in keys if key in held)
        self._lost_ticket = ticket
        self.note_unasked([key for key in keys if key not in held], _PAYLOAD_LOST)

    def forget(self, keys: Collection[OffloadKey]) -> None:
        """Take note of chunks that left memory."""
        self.drop(keys)
        if self._lost:
            self._lost.difference_update(keys)

    def drop(self, keys: Collection[OffloadKey]) -> None:
        """Take note of chunks that are asked for now by another call."""
        # Others may have failed for hours (the queue was full once), so this is asked of all
        # chunks that come and go.
        for known in (self._refused, self._unasked, self._retrying):
            if known:
                deque(map(known.pop, keys, itertools.repeat(None)), maxlen=0)

    def on_recorded(self, keys: Collection[OffloadKey], ticket: int) -> set[OffloadKey]:
        """Take note of chunks that have a record now; return those that need another one."""
        if not (self or self._lost or self._asked):
            return set()
        again: set[OffloadKey] = set()
        if self._lost:
            if ticket <= self._lost_ticket:
                again = self._lost.intersection(keys)
                self.note_unasked(again, _PAYLOAD_LOST)
                keys = [key for key in keys if key not in again]
            self._lost.difference_update(keys)
        self.drop(keys)
        if self._asked:
            self._asked.difference_update(keys)
            if not self._asked and not self._refused:
                self._writes_until_retry = self._backoff = 1
        return again

    def clear(self) -> None:
        """Forget all."""
        self.drop(self.keys())
        self._asked.clear()
        self._lost.clear()

    def on_written(self) -> None:
        """Take note of a write that succeeded."""
        if self._refused and not self._retrying:
            self._writes_until_retry -= 1
            if self._writes_until_retry <= 0:
                self._backoff = min(2 * self._backoff, _WRITES_UNTIL_RETRY_MAX)
                self._writes_until_retry = self._backoff
                self._retrying, self._refused = self._refused, {}

    def begin_retry(self) -> None:
        """Ask again for all of them."""
        self._retrying.update(self._refused)
        self._retrying.update(self._unasked)
        self._refused.clear()
        self._unasked.clear()

    def begin_trial(self, count: int) -> None:
        """Ask again for up to `count` of them, the oldest first."""
        for known in (self._refused, self._unasked):
            for key in list(itertools.islice(known, max(0, count - len(self._retrying)))):
                self._retrying[key] = known.pop(key)

    def retry_unasked(self) -> None:
        """Ask for those that found no room in the write queue: it was full of what hung."""
        self._retrying.update(self._unasked)
        self._unasked.clear()

    def retry(self, keys: Iterable[OffloadKey]) -> None:
        """Ask again for chunks that were refused."""
        self._retrying.update((key, self._refused.pop(key)) for key in keys if key in self._refused)

    def take(self, count: int) -> Sequence[OffloadKey]:
        """Return up to `count` chunks to ask for again; the caller notes what fails of them."""
        chosen = list(itertools.islice(self._retrying, max(0, count)))
        for key in chosen:
            del self._retrying[key]
        self._asked.update(chosen)
        return chosen

    def count_by_reason(self) -> Counter[str]:
        """Count the chunks that are not in the tier."""
        parts = (self._refused, self._unasked, self._retrying)
        return Counter(itertools.chain.from_iterable(part.values() for part in parts))
