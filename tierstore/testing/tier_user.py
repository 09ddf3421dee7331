"""The user of a tier in its conformance suite: asks as write-behind does, and notes answers."""

import time
from collections.abc import Callable, Collection, Iterable, Sequence

from tierstore.key import OffloadKey, make_offload_keys
from tierstore.manifest import Manifest
from tierstore.testing.spread import spread_hashes
from tierstore.tier.reservation import ChunkState
from tierstore.tier.secondary import SecondaryTier
from tierstore.tier_events import Committed, Evicted, Freed, Placed, Refused, SecondaryEvent

__all__ = ["CHUNK_BYTES", "TierUser"]

CHUNK_BYTES = 64 << 10
_SECONDS_MAX = 120.0
"""What has not happened by then never will: far more than any machine takes."""
_PAUSE_SECONDS = 0.01
_STORED_MAX = 400
_BATCH = 8


class TierUser:
    """One thread that stores and looks up numbered chunks of one model."""

    def __init__(self, tier: SecondaryTier, manifest: Manifest) -> None:
        """Use an open tier."""
        self.tier = tier
        self.manifest = manifest
        self.events: list[SecondaryEvent] = []
        """All of them, in order."""
        self._ticket = 0
        self._next_number = 1000

    def keys(self, numbers: Iterable[int]) -> list[OffloadKey]:
        """Return one key per number, of the manifest in use."""
        return make_offload_keys(self.manifest.namespace, 0, spread_hashes(numbers))

    def new_numbers(self, count: int) -> range:
        """Return numbers of chunks that were not used before."""
        first, self._next_number = self._next_number, self._next_number + count
        return range(first, first + count)

    def poll(self) -> None:
        """Take the answers, and give back what is freed."""
        for event in self.tier.poll():
            self.events.append(event)
            if isinstance(event, Freed):
                self.tier.released(event.release_id)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Poll until a condition holds."""
        until = time.monotonic() + _SECONDS_MAX
        while not condition():
            assert time.monotonic() < until, f"never happened: {what}"
            self.tier.wait(_PAUSE_SECONDS)
            self.poll()

    def settle(self) -> None:
        """Poll until the tier has done all that it was asked for."""
        self.until(self.tier.is_settled, "the tier settles")

    def request(self, numbers: Iterable[int]) -> int:
        """Ask for places, tail first; return the ticket."""
        self._ticket += 1
        self.tier.request_places(self._ticket, self.keys(numbers)[::-1], CHUNK_BYTES)
        return self._ticket

    def answers(self, ticket: int) -> list[Placed | Refused]:
        """Return what a request was answered until now."""
        found = (event for event in self.events if isinstance(event, Placed | Refused))
        return [event for event in found if event.ticket == ticket]

    def committed_count(self, ticket: int) -> int:
        """Return how often a commit was answered until now."""
        return sum(isinstance(e, Committed) and e.ticket == ticket for e in self.events)

    def answer(self, ticket: int) -> Placed | Refused:
        """Wait for the answer to a request."""
        self.until(lambda: bool(self.answers(ticket)), f"ticket {ticket} is answered")
        return self.answers(ticket)[0]

    def placed(self, numbers: Iterable[int]) -> Placed:
        """Ask for places and wait for them."""
        answer = self.answer(self.request(numbers))
        assert isinstance(answer, Placed), f"refused: {answer}"
        assert len(answer.keys) == len(answer.places)
        return answer

    def commit(self, placed: Placed, failed: Collection[int] = ()) -> None:
        """Publish records, if there are any, and wait until that was carried out."""
        if placed.keys:
            self.tier.commit(placed.ticket, failed)
            self.until(lambda: self.committed_count(placed.ticket) > 0, "the commit is answered")

    def store(self, numbers: Iterable[int], failed: Collection[int] = ()) -> Placed:
        """Record chunks but for those that `failed`, by index of the keys that were placed."""
        placed = self.placed(numbers)
        self.commit(placed, failed)
        return placed

    def fill(self, condition: Callable[[], bool]) -> list[int]:
        """Store new chunks until a condition holds; return their numbers."""
        stored: list[int] = []
        while not condition():
            assert len(stored) < _STORED_MAX, "the tier never makes room"
            numbers = self.new_numbers(_BATCH)
            self.store(numbers)
            stored += numbers
        return stored

    def found(self, numbers: Sequence[int]) -> list[int]:
        """Return the chunks that are recorded, as `states` says in the end and `locate` agrees."""
        keys = self.keys(numbers)
        states: list[ChunkState] = []

        def is_known() -> bool:
            states[:] = self.tier.states(keys)
            return ChunkState.ARRIVING not in states

        self.until(is_known, "every key is known to be recorded or absent")
        places = self.tier.locate(keys)
        assert set(states) <= {ChunkState.ABSENT, ChunkState.RECORDED}
        recorded = [n for n, s in zip(numbers, states, strict=True) if s is ChunkState.RECORDED]
        located = [n for n, place in zip(numbers, places, strict=True) if place is not None]
        assert recorded == located
        return recorded

    def evicted(self) -> set[OffloadKey]:
        """Return the keys that the tier has told to be evicted."""
        return {key for e in self.events if isinstance(e, Evicted) for key in e.keys}
