import pytest
from hypothesis import given
from hypothesis import strategies as st
from tier_fakes import FakeRecords, keep, keys, memory

from tierstore.tier.disk.lookup import ASKED_AT_ONCE_MAX
from tierstore.tier.locator import Locator
from tierstore.tier.reservation import ChunkState

ABSENT, ARRIVING = ChunkState.ABSENT, ChunkState.ARRIVING
RECORDED, RESIDENT = ChunkState.RECORDED, ChunkState.RESIDENT


class Tiers:
    """Memory with chunks 1 and 2, chunk 3 on its way; 4 and 5 on the first disk, 5 and 6 below."""

    def __init__(self):
        self.primary = memory(8)
        keep(self.primary, 1, 2)
        self.primary.reserve(0, keys(3))
        self.upper, self.lower = FakeRecords(4, 5), FakeRecords(5, 6)
        self.stale = set()
        self.locator = Locator(self.primary, [self.upper, self.lower], self.stale)


@pytest.fixture
def tiers():
    return Tiers()


def test_each_chunk_is_where_the_first_tier_has_it(tiers):
    states = tiers.locator.states(keys(1, 2, 3, 4, 5, 6, 7))
    assert states == [RESIDENT, RESIDENT, ARRIVING, RECORDED, RECORDED, RECORDED, ABSENT]
    assert tiers.upper.asked == [keys(4, 5, 6, 7)]
    assert tiers.lower.asked == [keys(6, 7)], "only what the upper one has not"


def test_no_tier_is_asked_for_what_is_in_memory(tiers):
    assert tiers.locator.states(keys(1, 3)) == [RESIDENT, ARRIVING]
    assert tiers.upper.asked == tiers.lower.asked == []


def test_a_stale_chunk_has_no_slot_and_is_busy(tiers):
    tiers.stale.update(keys(1))
    assert tiers.locator.states(keys(1, 2)) == [ARRIVING, RESIDENT]
    assert tiers.locator.slots(keys(1)) == [None]
    assert tiers.locator.resident(keys(1, 2)) == keys(2)
    assert tiers.locator.busy(keys(1, 2, 3, 4)) == keys(1, 3)
    assert tiers.locator.is_any_busy(keys(1))
    assert not tiers.locator.is_any_busy(keys(2, 4))


def test_new_chunks_are_named_by_their_first_place_and_not_if_a_transfer_holds_them(tiers):
    asked = keys(7, 1, 3, 7, 4)
    assert tiers.locator.indices_of_new(asked) == {asked[0]: 0, asked[4]: 4}
    tiers.stale.update(keys(7))
    assert tiers.locator.indices_of_new(asked) == {asked[4]: 4}


def test_a_chunk_that_is_still_looked_up_is_arriving_and_no_lower_tier_is_asked_for_it(tiers):
    tiers.upper.arriving = keys(6)
    assert tiers.locator.states_in_step(keys(4, 6, 7)) == [RECORDED, ARRIVING, ABSENT]
    assert tiers.lower.asked == [keys(7)]


def test_a_prefix_in_memory_asks_no_tier(tiers):
    assert tiers.locator.states_of_run(keys(1, 2)) == [RESIDENT, RESIDENT]
    assert tiers.locator.match_prefix(keys(1, 2)) == 2
    assert tiers.upper.asked == []


def test_a_run_that_ends_at_its_first_missing_chunk_asks_for_that_one_alone(tiers):
    assert tiers.locator.states_of_run(keys(1, 2, 7, 4, 5)) == [RESIDENT, RESIDENT, ABSENT]
    assert tiers.upper.asked == tiers.lower.asked == [keys(7)]


def test_a_run_that_ends_among_its_first_chunks_does_not_ask_for_the_rest(tiers):
    numbers = range(1000, 1000 + 2 * ASKED_AT_ONCE_MAX)
    states = tiers.locator.states_of_run(keys(4, *numbers))
    assert states[:2] == [RECORDED, ABSENT]
    asked = [key for wanted in tiers.upper.asked for key in wanted]
    assert len(asked) <= 1 + ASKED_AT_ONCE_MAX


def test_a_run_that_is_recorded_is_asked_for_in_slices_and_each_chunk_once(tiers):
    """Goal: the tiers are asked three times, however long a prefix is recorded."""
    run = keys(*range(1000, 1000 + 3 * ASKED_AT_ONCE_MAX))
    tiers.upper.places = dict.fromkeys(run, b"place")
    states = tiers.locator.states_of_run([*keys(1, 2), *run])
    assert states == [RESIDENT, RESIDENT, *[RECORDED] * len(run)]
    assert [key for wanted in tiers.upper.asked for key in wanted] == run
    assert len(tiers.upper.asked) == 3
    assert tiers.lower.asked == []


WHERE = st.sampled_from(["resident", "arriving", "stale", "upper", "lower", "looked up", "absent"])
STATES = {
    "resident": RESIDENT,
    "upper": RECORDED,
    "lower": RECORDED,
    "arriving": ARRIVING,
    "stale": ARRIVING,
    "looked up": ARRIVING,
    "absent": ABSENT,
}


@given(st.lists(WHERE, min_size=1, max_size=3 * ASKED_AT_ONCE_MAX))
def test_a_run_says_of_each_chunk_up_to_the_first_absent_one_where_it_is(where):
    """Method: a dict as the model, any mixture of places."""
    primary = memory(4 * ASKED_AT_ONCE_MAX)
    stale = set()
    upper, lower = FakeRecords(), FakeRecords()
    locator = Locator(primary, [upper, lower], stale)
    run = keys(*range(len(where)))
    for number, (key, place) in enumerate(zip(run, where, strict=True)):
        if place in {"resident", "stale"}:
            keep(primary, number)
        elif place == "arriving":
            primary.reserve(0, [key])
        elif place == "upper":
            upper.places[key] = b"place"
        elif place == "lower":
            lower.places[key] = b"place"
    stale.update(key for key, place in zip(run, where, strict=True) if place == "stale")
    upper.arriving = {key for key, place in zip(run, where, strict=True) if place == "looked up"}
    expected = [STATES[place] for place in where]
    known_count = expected.index(ABSENT) + 1 if ABSENT in expected else len(expected)
    states = locator.states_of_run(run)
    assert states[:known_count] == expected[:known_count]
    assert locator.states_in_step(run) == expected


def test_a_prefix_reaches_to_the_first_chunk_that_cannot_be_loaded_now(tiers):
    assert tiers.locator.match_prefix(keys(1, 4, 6, 7, 5)) == 3
    assert tiers.locator.match_prefix(keys(1, 3, 4)) == 1, "what is arriving cannot be loaded yet"
    assert tiers.locator.match_prefix(keys(1, 4, 6)) == 3


def test_all_tiers_look_ahead_since_the_first_may_hang(tiers):
    assert len(tiers.locator.look_ahead(keys(1, 3, 5, 7))) == 2
    assert tiers.upper.ahead == tiers.lower.ahead == [keys(5, 7)]


def test_only_tiers_below_the_one_that_failed_look_ahead(tiers):
    assert len(tiers.locator.look_ahead(keys(5), dict.fromkeys(keys(5), 0))) == 1
    assert tiers.upper.ahead == []
    assert tiers.lower.ahead == [keys(5)]
