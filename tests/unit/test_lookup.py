"""Lookups of a catalog that a step does not wait for."""

import threading

import pytest

from tierstore.key import Namespace, make_offload_keys
from tierstore.testing.spread import spread_hashes
from tierstore.tier.lookup import ASKED_AT_ONCE_MAX, Lookups
from tierstore.tier.reservation import ChunkState
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
        if threading.current_thread() is not threading.main_thread():
            assert self.may_go_on.wait(30)
        return [Place(key) if key in self.recorded else None for key in keys]

    def states(self, count):
        return [RECORDED, ABSENT] * (count // 2)


@pytest.fixture
def records():
    return Records()


@pytest.fixture
def lookups(records):
    made = Lookups(records.locate, "test")
    made.open()
    yield made
    records.may_go_on.set()
    assert made.close(30)


def finish(lookups):
    """Let the thread answer what it was asked, and end."""
    assert lookups.close(30)


def test_a_few_keys_are_looked_up_at_once(records, lookups):
    keys = records.keys[:ASKED_AT_ONCE_MAX]
    assert lookups.states(keys) == records.states(ASKED_AT_ONCE_MAX)
    assert set(records.askers) == {threading.main_thread()}


def test_many_keys_are_looked_up_by_the_thread_and_once(records, lookups):
    keys = records.keys[:MANY]
    records.may_go_on.clear()
    assert lookups.states(keys) == [ARRIVING] * MANY
    assert lookups.states(keys) == [ARRIVING] * MANY
    records.may_go_on.set()
    finish(lookups)
    assert lookups.states(keys) == records.states(MANY)
    assert len(records.askers) == MANY
    assert threading.main_thread() not in records.askers


def test_places_come_from_the_answers_and_the_others_from_the_catalog(records, lookups):
    lookups.states(records.keys[:MANY])
    finish(lookups)
    records.askers.clear()
    places = lookups.places(records.keys[: MANY + 4])
    assert [place is not None for place in places] == [True, False] * (MANY // 2 + 2)
    assert len(records.askers) == 4


def test_an_answer_about_a_key_that_was_recorded_since_is_dropped(records, lookups):
    lookups.states(records.keys[:MANY])
    finish(lookups)
    records.recorded.add(records.keys[1])
    assert lookups.states(records.keys[1:2]) == [ABSENT]
    lookups.forget(records.keys[1:2])
    assert lookups.states(records.keys[1:2]) == [RECORDED]


@pytest.mark.parametrize("is_answered", [True, False], ids=["answered", "on_its_way"])
def test_a_reset_drops_what_was_asked_before_it(records, lookups, is_answered):
    keys = records.keys[:MANY]
    records.may_go_on.clear()
    lookups.states(keys)
    if is_answered:
        records.may_go_on.set()
        finish(lookups)
        assert lookups.states(keys) == records.states(MANY)
    lookups.reset()
    records.may_go_on.set()
    finish(lookups)
    records.recorded.clear()
    assert lookups.places(keys) == [None] * MANY


def test_answers_are_not_kept_for_ever(records, lookups):
    keys = records.keys[:MANY]
    lookups.states(keys)
    finish(lookups)
    assert lookups.states(keys) == records.states(MANY)
    records.recorded.clear()
    step_count = 0
    while RECORDED in {*lookups.states(keys[:ASKED_AT_ONCE_MAX])}:
        lookups.end_step()
        step_count += 1
        assert step_count <= 64
    assert step_count >= 32


def test_what_is_asked_beyond_the_limit_is_asked_again_and_not_queued(
    records, lookups, monkeypatch
):
    monkeypatch.setattr("tierstore.tier.lookup._QUEUED_KEYS_MAX", 2 * MANY)
    records.may_go_on.clear()
    for first in range(0, 4 * MANY, MANY):
        assert lookups.states(records.keys[first : first + MANY]) == [ARRIVING] * MANY
    records.may_go_on.set()
    finish(lookups)
    assert len(records.askers) == 2 * MANY


def test_a_thread_that_gets_no_turn_is_not_waited_for(records, lookups):
    keys = records.keys[:MANY]
    records.may_go_on.clear()
    step_count = 0
    while ARRIVING in lookups.states(keys):
        lookups.end_step()
        step_count += 1
        assert step_count <= 8
    assert lookups.states(keys) == records.states(MANY)
    assert threading.main_thread() in records.askers
