"""Lookups of a catalog that a step does not wait for."""

import threading

import pytest
from waiting import within_seconds

from tierstore.key import Namespace, make_offload_keys
from tierstore.testing.spread import spread_hashes
from tierstore.tier.disk.catalog_reads import CatalogReads
from tierstore.tier.disk.lookup import Lookups
from tierstore.tier.reservation import ChunkState
from tierstore.tier.secondary import ASKED_AT_ONCE_MAX
from tierstore.transfer import Place

ABSENT, ARRIVING, RECORDED = ChunkState.ABSENT, ChunkState.ARRIVING, ChunkState.RECORDED
MANY = 3 * ASKED_AT_ONCE_MAX


class Records:
    """A catalog: the even keys are recorded; notes who asked for what, and can be held up."""

    def __init__(self):
        self.keys = make_offload_keys(Namespace(b"n" * 8), 0, spread_hashes(range(4096)))
        self.recorded = set(self.keys[::2])
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.askers = []

    def locate(self, keys):
        self.askers += [threading.current_thread()] * len(keys)
        assert threading.current_thread() is not threading.main_thread()
        assert self.may_go_on.wait(300)
        return [Place(key) if key in self.recorded else None for key in keys]

    def states(self, count):
        return [RECORDED, ABSENT] * (count // 2)


@pytest.fixture
def records():
    return Records()


@pytest.fixture
def reads(records):
    made = CatalogReads("test")
    made.open()
    yield made
    records.may_go_on.set()
    assert made.close(300)


@pytest.fixture
def lookups(records, reads):
    return Lookups(records.locate, reads, places_seconds_max=300)


@pytest.fixture
def finish(reads):
    """Return what lets the thread answer all it was asked."""
    return lambda: reads.wait(reads.ask(list), 300)


def test_the_answer_about_a_few_keys_is_waited_for(records, lookups):
    keys = records.keys[:ASKED_AT_ONCE_MAX]
    assert within_seconds(lambda: ARRIVING not in lookups.states(keys))
    assert lookups.states(keys) == records.states(ASKED_AT_ONCE_MAX)


def test_many_keys_are_looked_up_by_the_thread_and_once(records, lookups, finish):
    keys = records.keys[:MANY]
    records.may_go_on.clear()
    assert lookups.states(keys) == [ARRIVING] * MANY
    assert lookups.states(keys) == [ARRIVING] * MANY
    records.may_go_on.set()
    finish()
    assert lookups.states(keys) == records.states(MANY)
    assert len(records.askers) == MANY
    assert threading.main_thread() not in records.askers


def test_places_come_from_the_answers_and_the_others_from_the_catalog(records, lookups, finish):
    lookups.states(records.keys[:MANY])
    finish()
    records.askers.clear()
    places = lookups.places(records.keys[: MANY + 4])
    assert [place is not None for place in places] == [True, False] * (MANY // 2 + 2)
    assert len(records.askers) == 4


def test_an_answer_about_a_key_that_was_recorded_since_is_dropped(records, lookups, finish):
    lookups.states(records.keys[:MANY])
    finish()
    records.recorded.add(records.keys[1])
    assert lookups.places(records.keys[1:2]) == [None]
    lookups.forget(records.keys[1:2])
    assert lookups.places(records.keys[1:2]) == [Place(records.keys[1])]


@pytest.mark.parametrize("is_answered", [True, False], ids=["answered", "on_its_way"])
def test_a_reset_drops_what_was_asked_before_it(records, lookups, finish, is_answered):
    keys = records.keys[:MANY]
    records.may_go_on.clear()
    lookups.states(keys)
    if is_answered:
        records.may_go_on.set()
        finish()
        assert lookups.states(keys) == records.states(MANY)
    lookups.reset()
    records.may_go_on.set()
    finish()
    records.recorded.clear()
    assert lookups.places(keys) == [None] * MANY


def test_answers_are_not_kept_for_ever(records, lookups, finish):
    keys = records.keys[:MANY]
    lookups.states(keys)
    finish()
    assert lookups.states(keys) == records.states(MANY)
    records.recorded.clear()
    step_count = 0
    while RECORDED in {*lookups.states(keys[:ASKED_AT_ONCE_MAX])}:
        lookups.end_step()
        step_count += 1
        assert step_count <= 64
    assert step_count >= 32


def test_what_is_asked_beyond_the_limit_is_asked_again_and_not_queued(
    records, lookups, finish, monkeypatch
):
    monkeypatch.setattr("tierstore.tier.disk.lookup._QUEUED_KEYS_MAX", 2 * MANY)
    records.may_go_on.clear()
    for first in range(0, 4 * MANY, MANY):
        assert lookups.states(records.keys[first : first + MANY]) == [ARRIVING] * MANY
    records.may_go_on.set()
    finish()
    assert len(records.askers) == 2 * MANY


def test_a_lookup_that_hangs_makes_all_absent_until_it_has_ended(records, lookups):
    records.may_go_on.clear()
    keys = records.keys[:MANY]
    # A step asks again, and waits no longer than it may in all.
    while ARRIVING in lookups.states(keys):
        lookups.end_step()
    assert not lookups.is_stuck, "a step has no more patience, its tier has"
    assert lookups.states(keys[:2]) == [ABSENT] * 2
    assert lookups.states(keys) == [ABSENT] * MANY
    asked_count = len(records.askers)
    assert lookups.states(records.keys[MANY : 2 * MANY]) == [ABSENT] * MANY
    records.may_go_on.set()
    assert within_seconds(lambda: lookups.states(keys) == records.states(MANY))
    assert len(records.askers) <= asked_count + MANY, "what hung was asked for again"


def test_places_are_waited_for_once_for_as_long_as_said(records, reads):
    lookups = Lookups(records.locate, reads, places_seconds_max=0.2)
    records.may_go_on.clear()
    keys = records.keys[:4]
    assert lookups.places(keys) == [None] * 4
    assert lookups.is_stuck
    asked_count = len(records.askers)
    for _ in range(100):
        assert lookups.places(keys) == [None] * 4
    assert len(records.askers) == asked_count
    records.may_go_on.set()
    assert within_seconds(lambda: lookups.places(keys) == [keys[0], None, keys[2], None])


def test_a_lookup_that_makes_progress_does_not_hang_however_long_it_takes(reads):
    last = threading.Event()

    def count():
        return len(list(reads.progressing(iter(last.is_set, True))))

    reading = reads.ask(count)
    assert not reads.wait(reading, 0.5)
    assert not reads.is_stuck(0.05)
    last.set()
    assert reads.wait(reading, 300)
    assert reading.answer() > 0


def test_places_that_were_looked_up_ahead_are_known_once(lookups, records):
    keys = records.keys[:MANY]
    lookups.look_ahead(keys)()
    places = lookups.places(keys)
    assert len(records.askers) == MANY, "they were looked up once"
    assert [place is not None for place in places] == [True, False] * (MANY // 2)
    records.recorded = set(keys)
    assert None not in lookups.places(keys), "an answer may be out of date the second time"


def test_a_lookup_ahead_that_was_waited_for_too_long_is_not_waited_for_again(records, reads):
    """The thread goes on with something else all the while, so that it is not stuck."""
    lookups = Lookups(records.locate, reads, places_seconds_max=0.5)
    last = threading.Event()
    busy = reads.ask(lambda: [*reads.progressing(iter(lambda: last.wait(0.01), True))])
    wait = lookups.look_ahead(records.keys[:2])
    wait()
    assert not busy.is_done
    assert lookups.places(records.keys[:2]) == [None, None]
    last.set()
    wait()
    assert lookups.places(records.keys[:2]) == [Place(records.keys[0]), None]
    assert len(records.askers) == 2, "they were looked up once"


def test_a_record_that_another_caller_has_begun_to_look_up_is_looked_up(records, lookups):
    """It has left memory since this caller looked ahead, and nobody has waited for it yet."""
    keys = records.keys[:2]
    hidden = []
    lookups.on_hidden = lambda keys, _: hidden.extend(keys)
    records.may_go_on.clear()
    wait = lookups.look_ahead(keys)
    going_on = threading.Timer(0.2, records.may_go_on.set)
    going_on.start()
    assert lookups.places(keys) == [Place(keys[0]), None]
    assert hidden == []
    wait()
    assert lookups.places(keys) == [Place(keys[0]), None]
    going_on.join()


def test_each_of_those_who_look_a_record_up_ahead_finds_it(records, lookups):
    """Two were answered, and a third one waits for the same record."""
    hidden = []
    lookups.on_hidden = lambda keys, _: hidden.extend(keys)
    key = records.keys[0]
    for _ in range(2):
        lookups.look_ahead([key])()
    records.may_go_on.clear()
    wait = lookups.look_ahead([key])
    assert [lookups.places([key]) for _ in range(2)] == [[Place(key)]] * 2
    assert hidden == []
    records.may_go_on.set()
    wait()
    assert lookups.places([key]) == [Place(key)]
    assert len(records.askers) == 3


def test_what_is_evicted_or_reset_meanwhile_is_not_found_ahead(lookups, records):
    keys = records.keys[:2]
    lookups.look_ahead(keys)()
    lookups.places(keys[1:])
    records.recorded = set()
    lookups.forget(keys)
    assert lookups.places(keys) == [None, None]
    records.recorded = set(keys)
    lookups.look_ahead(keys)()
    lookups.reset()
    records.recorded = set()
    assert lookups.places(keys) == [None, None]
