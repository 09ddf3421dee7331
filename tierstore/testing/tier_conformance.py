"""What every secondary tier has to do, wherever its records lie: a suite to inherit from.

class TestMyTier(TierConformance):
    def make(self, directory, manifest):
        return MyTier(...)

    @contextmanager
    def held(self, tier):
        ...  # whatever the tier asks, its device or its network, answers nothing meanwhile
        yield
"""

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tierstore.key import OffloadKey
from tierstore.manifest import Manifest
from tierstore.testing.tier_user import CHUNK_BYTES, TierUser
from tierstore.tier.reservation import ChunkState
from tierstore.tier.secondary import ASKED_AT_ONCE_MAX, SecondaryTier
from tierstore.tier_events import Committed, Placed, Refused

__all__ = ["CAPACITY_BYTES", "MANIFEST", "TierConformance"]

MANIFEST = Manifest.simple("conforms", CHUNK_BYTES)
CAPACITY_BYTES = 8 << 20
"""Of the tiers of this suite, or about as much: 48 chunks fit, 400 do not."""

_FEW = range(8)
_MANY = range(3 * ASKED_AT_ONCE_MAX)
_FAR_TOO_MANY = range(10_000)
_BATCH = 8


class TierConformance(ABC):
    """Inherit, name the class `Test...`, implement `make` and `held`; pytest does the rest."""

    orders_by_use = True
    """Whether a record that is used outlives others; else the store has an order of its own."""
    keeps_pinned = True
    """Whether pinned records are not evicted; else their reads may find them absent."""
    tells_of_evictions = True
    """Whether `Evicted` names all records that went to make room."""

    @abstractmethod
    def make(self, directory: Path, manifest: Manifest) -> SecondaryTier:
        """Return a tier of `CAPACITY_BYTES` with the records of earlier ones, not yet open."""

    @abstractmethod
    def held(self, tier: SecondaryTier) -> AbstractContextManager[None]:
        """Let nothing that the tier asks be answered during a block of code."""

    @contextmanager
    def opened(self) -> Iterator[TierUser]:
        """Open an empty tier for a block of code."""
        with tempfile.TemporaryDirectory() as name:
            tier = self.make(Path(name), MANIFEST)
            try:
                tier.begin()
                tier.wait_open(60)
                user = TierUser(tier, MANIFEST)
                user.until(lambda: tier.is_open, "the tier opens")
                yield user
            finally:
                tier.close(60)

    def test_an_open_tier_has_nothing_to_complain_of(self) -> None:
        """It is in reach, sound, and stays the same tier while it is used."""
        with self.opened() as user:
            change_count, owner = user.tier.change_count, user.tier.owner
            user.store(_FEW)
            user.settle()
            tier = user.tier
            assert (tier.is_open, tier.is_stuck, tier.is_lost) == (True, False, False)
            assert user.tier.complaint == ""
            assert (user.tier.change_count, user.tier.owner) == (change_count, owner)
            assert not user.tier.has_messages()

    def test_absence_is_normal(self) -> None:
        """What was never stored is absent, and advice about it changes nothing."""
        with self.opened() as user:
            keys = user.keys(_MANY)
            assert user.found(_MANY) == []
            user.tier.touch(keys)
            user.tier.remove(keys)
            user.tier.pin(keys)
            user.tier.unpin(keys)
            user.settle()
            assert user.found(_MANY) == []
            assert user.events == []
            assert user.tier.check() == []

    def test_places_and_commit_make_keys_found(self) -> None:
        """Nothing is found before its commit, all of it afterwards."""
        with self.opened() as user:
            placed = user.placed(_MANY)
            assert set(placed.keys) == set(user.keys(_MANY))
            assert len(set(placed.places)) == len(placed.places), "two records share a place"
            assert user.found(_MANY) == []
            user.commit(placed)
            assert user.found(_MANY) == list(_MANY)
            assert user.found(_FEW) == list(_FEW)

    def test_a_place_is_the_same_each_time(self) -> None:
        """The data plane reads where it has written."""
        with self.opened() as user:
            placed = user.store(_FEW)
            user.found(_FEW)
            assert user.tier.locate(placed.keys) == list(placed.places)

    def test_failed_writes_are_not_found(self) -> None:
        """They may be written again, under another ticket."""
        with self.opened() as user:
            user.store(_FEW, failed={1, 3})  # of keys that come tail first
            assert user.found(_FEW) == [0, 1, 2, 3, 5, 7]
            user.store(_FEW)
            assert user.found(_FEW) == list(_FEW)
            assert user.tier.check() == []

    def test_a_ticket_of_which_all_writes_failed_leaves_nothing(self) -> None:
        """Its commit is answered as any other."""
        with self.opened() as user:
            user.store(_FEW, failed=set(_FEW))
            assert user.found(_FEW) == []
            assert user.tier.check() == []

    def test_a_request_that_is_too_large_is_refused(self) -> None:
        """It harms no other: the tier goes on."""
        with self.opened() as user:
            assert isinstance(user.answer(user.request(_FAR_TOO_MANY)), Refused)
            user.store(_FEW)
            assert user.found(_FEW) == list(_FEW)
            assert user.tier.check() == []

    def test_keys_that_are_recorded_twice_are_found_once(self) -> None:
        """A tier that knows them leaves them out, in order; one that does not writes them again."""
        with self.opened() as user:
            user.store(_FEW)
            again = user.placed(_MANY)
            asked = user.keys(_MANY)[::-1]
            assert [key for key in asked if key in set(again.keys)] == list(again.keys)
            assert set(user.keys(_MANY[len(_FEW) :])) <= set(again.keys)
            user.commit(again)
            assert user.found(_MANY) == list(_MANY)
            user.settle()
            assert user.tier.stats().record_count == len(_MANY)
            assert user.tier.check() == []

    def test_removed_records_are_not_found(self) -> None:
        """And can be recorded again."""
        with self.opened() as user:
            user.store(_FEW)
            user.tier.remove(user.keys([2, 5]))
            user.settle()
            assert user.found(_FEW) == [0, 1, 3, 4, 6, 7]
            user.store([2, 5])
            assert user.found(_FEW) == list(_FEW)
            assert user.tier.check() == []

    def test_a_reset_hides_all_records_at_once_and_forever(self) -> None:
        """What was placed before it, or waits for places, is not found even if it is committed."""
        with self.opened() as user:
            user.store(_FEW)
            assert user.found(_FEW) == list(_FEW)
            placed = user.placed([100, 101])
            waiting = user.request([102, 103])
            user.tier.reset(MANIFEST)
            before = [*_FEW, 100, 101, 102, 103]
            assert ChunkState.RECORDED not in user.tier.states(user.keys(before))
            assert user.tier.locate(user.keys(before)) == [None] * len(before)
            user.commit(placed)
            answer = user.answer(waiting)
            if isinstance(answer, Placed):
                user.commit(answer)
            user.settle()
            assert user.found(before) == []
            user.store([1, 100])
            assert user.found(before) == [1, 100]
            assert user.tier.check() == []

    def test_after_a_reset_the_records_are_those_of_its_manifest(self) -> None:
        """Those of the epoch before are not found by their own keys either."""
        with self.opened() as user:
            user.store(_FEW)
            epoch = MANIFEST.in_epoch("next")
            user.tier.reset(epoch)
            later = TierUser(user.tier, epoch)
            later.settle()
            assert later.found(_FEW) == []
            later.store(_FEW)
            assert later.found(_FEW) == list(_FEW)
            assert user.found(_FEW) == []

    def test_each_request_and_each_commit_is_answered_once_and_in_order(self) -> None:
        """A ticket is placed, then committed; requests are answered as they were asked."""
        with self.opened() as user:
            tickets = [user.request([number]) for number in _MANY]
            for ticket in tickets:
                placed = user.answer(ticket)
                assert isinstance(placed, Placed)
                user.tier.commit(ticket)
            user.until(lambda: all(map(user.committed_count, tickets)), "all are committed")
            user.settle()
            placed_tickets = [e.ticket for e in user.events if isinstance(e, Placed)]
            committed = [e.ticket for e in user.events if isinstance(e, Committed)]
            assert placed_tickets == tickets
            assert committed == tickets
            for ticket in tickets:
                first, last = user.answer(ticket), Committed(ticket)
                assert user.events.index(first) < user.events.index(last)

    def test_a_full_tier_makes_room(self) -> None:
        """The first records go; those that went are told, and are not found."""
        with self.opened() as user:
            user.store(_FEW)
            stored = [*_FEW, *user.fill(lambda: user.found(_FEW) == [])]
            found = user.found(stored)
            assert stored[-1] in found
            gone = set(user.keys(stored)) - set(user.keys(found))
            if self.tells_of_evictions:
                assert user.evicted() == gone
            stats = user.tier.stats()
            assert stats.charged_bytes <= stats.capacity_bytes
            assert user.tier.check() == []

    def test_a_touch_changes_the_order_of_eviction_if_the_tier_has_one(self) -> None:
        """Records that are used outlive those stored beside them."""
        with self.opened() as user:
            for first in range(0, 32, _BATCH):
                user.store(range(first, first + _BATCH))
            user.tier.touch(user.keys(_FEW)[::-1])
            user.settle()
            user.fill(lambda: user.found(range(_BATCH, 2 * _BATCH)) == [])
            if self.orders_by_use:
                assert user.found(_FEW) == list(_FEW)

    def test_a_pinned_record_stays_if_the_tier_heeds_pins(self) -> None:
        """Until it is unpinned as often."""
        with self.opened() as user:
            keys = user.keys(_FEW)
            user.store(_FEW)
            user.store(range(_BATCH, 2 * _BATCH))
            user.tier.pin(keys)
            user.tier.pin(keys)
            user.tier.unpin(keys)
            user.fill(lambda: user.found(range(_BATCH, 2 * _BATCH)) == [])
            if self.keeps_pinned:
                assert user.found(_FEW) == list(_FEW)
            user.tier.unpin(keys)
            user.fill(lambda: user.found(_FEW) == [])

    def test_way_is_made_although_there_is_room(self) -> None:
        """The next request finds it."""
        with self.opened() as user:
            user.store(_FEW)
            user.tier.make_way(2, CHUNK_BYTES)
            user.store(_MANY[len(_FEW) :])
            assert user.found(_MANY[len(_FEW) :]) == list(_MANY[len(_FEW) :])
            assert user.tier.check() == []

    def test_what_is_looked_up_ahead_is_located_then(self) -> None:
        """Any thread may wait for it; None says that there is nothing to wait for."""
        with self.opened() as user:
            user.store(_MANY)
            wait = user.tier.look_ahead(user.keys(_MANY))
            if wait is not None:
                wait()
            assert None not in user.tier.locate(user.keys(_MANY))

    def test_no_call_of_a_step_waits_for_a_tier_that_does_not_answer(self) -> None:
        """Nothing wrong is said meanwhile; afterwards everything is as if it had been quick.

        Method: nothing is answered until all calls have returned, so one that waits never does.
        """
        with self.opened() as user:
            user.store(_FEW)
            hidden: set[OffloadKey] = set()
            user.tier.tell_of_hidden(lambda keys, _: hidden.update(keys))
            with self.held(user.tier):
                self._assert_unanswered(user, hidden)
                ticket = user.request(range(100, 108))
                user.tier.touch(user.keys(_FEW))
                user.poll()
                assert user.answers(ticket) == []
                assert not user.tier.is_settled()
                assert user.tier.has_messages()
                assert not user.tier.wait(0)
                assert user.tier.is_open
            user.until(lambda: user.found(_FEW) == list(_FEW), "what is recorded is found again")
            assert isinstance(user.answer(ticket), Placed | Refused)

    def test_a_tier_that_does_not_answer_closes_in_bounded_time(self) -> None:
        """Its threads are left to themselves; closing again does nothing."""
        with self.opened() as user:
            user.store(_FEW)
            with self.held(user.tier):
                user.request([100])
                user.tier.states(user.keys(_MANY))
                user.tier.close(0.2)
                user.tier.close(0.2)

    def test_a_closed_tier_has_finished_what_was_asked_before(self) -> None:
        """Closing is idempotent."""
        with self.opened() as user:
            placed = user.placed(_FEW)
            user.tier.commit(placed.ticket)
            user.tier.close(60)
            user.tier.close(60)

    def test_statistics_count_what_is_recorded(self) -> None:
        """Records and their payload; reset and removed ones are gone."""
        with self.opened() as user:
            empty = user.tier.stats()
            assert (empty.record_count, empty.payload_bytes, empty.is_open) == (0, 0, True)
            user.store(_FEW)
            user.tier.remove(user.keys([0]))
            user.settle()
            stats = user.tier.stats()
            assert stats.record_count == len(_FEW) - 1
            assert stats.payload_bytes == (len(_FEW) - 1) * CHUNK_BYTES
            assert 0 < stats.payload_bytes <= stats.charged_bytes <= stats.capacity_bytes
            user.tier.reset(MANIFEST)
            user.until(lambda: user.tier.stats().record_count == 0, "the records are not counted")

    def test_a_flush_of_a_sound_tier_finds_nothing_lost(self) -> None:
        """What was committed before it is durable, as far as the tier can tell."""
        with self.opened() as user:
            user.store(_FEW)
            user.tier.sync()
            user.tier.sync(lambda _: frozenset())
            assert not user.tier.take_lost()
            assert user.found(_FEW) == list(_FEW)

    @staticmethod
    def _assert_unanswered(user: TierUser, hidden: set[OffloadKey]) -> None:
        """Ask for what is recorded and what is not, often enough to be called stuck."""
        for numbers in (_FEW, _MANY):
            keys = user.keys(numbers)
            states = user.tier.states(keys)
            user.tier.locate(keys)
            recorded = set(user.keys(_FEW))
            for key, state in zip(keys, states, strict=True):
                if key in recorded:
                    is_told = state is not ChunkState.ABSENT or key in hidden
                    assert is_told, "a recorded key is absent, and no listener was told"
                else:
                    assert state is not ChunkState.RECORDED, "a key is recorded that is not"
