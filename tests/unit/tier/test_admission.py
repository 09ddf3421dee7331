"""The rules as a table: what each admission asks for at each event in the life of a chunk."""

import pytest

from tierstore.testing.policy_conformance import keys_of
from tierstore.tier.admission import make_admission
from tierstore.tier.admission.second_touch import SecondTouch

CHUNK = keys_of(1)
RULES = ("write_through", "on_evict", "second_touch")
WRITTEN, NOT_WRITTEN = True, False


def arrive(admission):
    return admission.on_resident(CHUNK)


def touch(admission):
    return admission.on_touched(CHUNK)


def offer(admission):
    return admission.on_victims(CHUNK)


def admit(admission):
    admission.on_admitted(CHUNK)
    return ()


def promote(admission):
    admission.on_promoted(CHUNK)
    return ()


def leave(admission):
    admission.on_evicted(CHUNK)
    return ()


def withdraw(admission):
    admission.on_withdrawn(CHUNK)
    return ()


def lose_records(admission):
    admission.on_records_lost(set())
    return ()


def reset(admission):
    admission.reset(set())
    return ()


TABLE = {
    # What happened to the chunk, the last event       write_through  on_evict  second_touch
    (arrive,): (WRITTEN, NOT_WRITTEN, NOT_WRITTEN),
    (arrive, touch): (NOT_WRITTEN, NOT_WRITTEN, WRITTEN),
    (arrive, offer): (NOT_WRITTEN, WRITTEN, NOT_WRITTEN),
    (arrive, admit, touch): (NOT_WRITTEN, NOT_WRITTEN, NOT_WRITTEN),
    (arrive, admit, offer): (NOT_WRITTEN, NOT_WRITTEN, NOT_WRITTEN),
    (arrive, leave, arrive): (WRITTEN, NOT_WRITTEN, WRITTEN),
    (arrive, leave, arrive, leave, arrive): (WRITTEN, NOT_WRITTEN, WRITTEN),
    (arrive, leave, arrive, admit, leave, arrive): (WRITTEN, NOT_WRITTEN, NOT_WRITTEN),
    (arrive, admit, leave, arrive): (WRITTEN, NOT_WRITTEN, NOT_WRITTEN),
    (promote, touch): (NOT_WRITTEN, NOT_WRITTEN, NOT_WRITTEN),
    (promote, offer): (NOT_WRITTEN, NOT_WRITTEN, NOT_WRITTEN),
    (promote, leave, arrive): (WRITTEN, NOT_WRITTEN, NOT_WRITTEN),
    (promote, leave, arrive, touch): (NOT_WRITTEN, NOT_WRITTEN, WRITTEN),
    (promote, withdraw, touch): (NOT_WRITTEN, NOT_WRITTEN, WRITTEN),
    (promote, withdraw, offer): (NOT_WRITTEN, WRITTEN, NOT_WRITTEN),
    (arrive, admit, lose_records, touch): (NOT_WRITTEN, NOT_WRITTEN, WRITTEN),
    (arrive, admit, lose_records, offer): (NOT_WRITTEN, WRITTEN, NOT_WRITTEN),
    (arrive, leave, lose_records, arrive): (WRITTEN, NOT_WRITTEN, WRITTEN),
    (arrive, leave, reset, arrive): (WRITTEN, NOT_WRITTEN, NOT_WRITTEN),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "events", TABLE, ids=["-".join(event.__name__ for event in events) for events in TABLE]
)
def test_a_chunk_is_written_at_the_event_that_the_rule_names(rule, events):
    admission = make_admission(rule)
    *before, last = events
    for event in before:
        event(admission)
    is_written = TABLE[events][RULES.index(rule)]
    assert list(last(admission)) == (CHUNK if is_written else [])


@pytest.mark.parametrize(
    ("rule", "lost_count"), list(zip(RULES, (0, 1, 0), strict=True)), ids=RULES
)
def test_only_a_chunk_that_should_have_gone_down_counts_as_lost_when_it_leaves(rule, lost_count):
    admission = make_admission(rule)
    arrive(admission)
    assert admission.on_evicted(CHUNK) == lost_count


def test_the_chunks_that_were_used_once_longest_ago_are_forgotten():
    admission = SecondTouch(once_used_max=2)
    admission.on_resident(keys_of(1, 2, 3))
    admission.on_evicted(keys_of(3, 2))
    admission.on_evicted(keys_of(1))
    assert admission.on_resident(keys_of(1, 2, 3)) == keys_of(1, 2)
