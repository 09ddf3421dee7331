"""The catalog against a model, on a disk that is only counted."""

import pytest
from catalog_harness import MIB, Harness
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tierstore.catalog.messages import (
    CommitTicket,
    Evict,
    ForgetNamespace,
    RemoveKeys,
    RequestPlaces,
    SweepGarbage,
    TouchKeys,
)
from tierstore.tier_events import Placed, Refused


def test_a_committed_record_is_located_and_a_reserved_one_is_not(harness):
    harness.writer.handle([RequestPlaces(1, tuple(harness.keys(1, 2)), harness.chunk)])
    assert harness.located(1, 2) == [False, False]
    harness.writer.handle([CommitTicket(1, frozenset({1}))])
    assert harness.located(1, 2, 3) == [True, False, False]
    assert harness.catalog.check() == []


def test_keys_that_are_recorded_or_being_written_are_left_out(harness):
    harness.store(1)
    harness.writer.handle([RequestPlaces(11, tuple(harness.keys(1, 2)), harness.chunk)])
    harness.writer.handle([RequestPlaces(12, tuple(harness.keys(2, 3, 3)), harness.chunk)])
    first, second = harness.take()
    assert first.keys == tuple(harness.keys(2))
    assert second.keys == tuple(harness.keys(3))


def test_a_key_whose_write_failed_is_placed_again_once_in_the_same_transaction(harness):
    harness.writer.handle([RequestPlaces(1, tuple(harness.keys(1, 2)), harness.chunk)])
    harness.take()
    again = RequestPlaces(2, tuple(harness.keys(1, 2)), harness.chunk)
    third = RequestPlaces(3, tuple(harness.keys(2, 3)), harness.chunk)
    harness.writer.handle([CommitTicket(1, frozenset({0, 1})), again, third])
    first, second = harness.take()
    assert first.keys == tuple(harness.keys(1, 2))
    assert second.keys == tuple(harness.keys(3))


@pytest.mark.parametrize("backend", ["file", "lmdb"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("chunk_kib", [16, 64, 1024])
def test_three_times_the_capacity_never_exceeds_it_and_fills_it(
    tmp_path, backend, ranks, chunk_kib
):
    chunk = chunk_kib << 10
    capacity = 64 * MIB
    harness = Harness(tmp_path, backend=backend, capacity=capacity, chunk=chunk, ranks=ranks)
    per_request = min(32, max(1, (2 << 20) // chunk))
    total = 3 * capacity // (chunk * ranks)
    for first in range(0, total, per_request):
        answer = harness.store(*range(first, first + per_request))
        assert isinstance(answer, Placed)
    assert harness.catalog.check() == []
    stats = harness.catalog.stats()
    assert stats.charged_bytes <= capacity
    share = stats.payload_bytes * ranks / capacity
    # A large value of LMDB begins with 16 bytes of its own, so 16 KiB take five pages.
    assert share >= (0.70 if backend == "lmdb" and chunk_kib == 16 else 0.75)
    kept = harness.order()
    assert max(kept) == total - 1 or max(kept) >= total - per_request
    assert min(kept) > 0
    harness.catalog.close()


def test_a_prefix_loses_its_tail_first_and_the_order_survives_a_restart(harness):
    harness.store(1, 2, 3)
    harness.store(4, 5)
    assert harness.order() == [3, 2, 1, 5, 4]
    harness.writer.handle([TouchKeys(tuple(harness.keys(3, 2)))])
    harness.reopen()
    assert harness.order() == [1, 5, 4, 3, 2]
    assert harness.catalog.check() == []


def test_a_pinned_record_survives_eviction(harness):
    harness.store(1, 2)
    harness.pins.update(harness.keys(1))
    for first in range(10, 400, 10):
        harness.store(*range(first, first + 10))
    assert harness.located(1, 2) == [True, False]
    assert harness.catalog.check() == []


def test_pages_of_victims_are_used_only_after_their_release(harness):
    count = 0
    while not harness.writer.waiting:
        count += 1
        keys = tuple(harness.keys(*range(count * 8, count * 8 + 8)))
        harness.writer.handle([RequestPlaces(count, keys, harness.chunk)])
        harness.writer.handle([CommitTicket(count, frozenset())])
    placed = [event.ticket for event in harness.take() if isinstance(event, Placed)]
    assert placed == list(range(1, count))
    assert harness.unreleased
    harness.release()
    assert [event.ticket for event in harness.later] == [count]


def test_a_request_larger_than_the_tier_is_refused(harness):
    answer = harness.store(*range(1000))
    assert isinstance(answer, Refused)
    assert isinstance(harness.store(1), Placed)


def test_forgetting_a_namespace_dooms_what_is_being_written(harness):
    harness.store(1, 2)
    harness.writer.handle([RequestPlaces(50, tuple(harness.keys(3)), harness.chunk)])
    harness.writer.handle([ForgetNamespace(harness.manifest.namespace)])
    harness.writer.handle([CommitTicket(50, frozenset())])
    assert harness.located(1, 2, 3) == [False] * 3
    assert harness.catalog.check() == []
    assert harness.catalog.stats().payload_bytes == 0


def test_removed_records_are_gone_and_their_pages_released(harness):
    harness.store(*range(8))
    harness.writer.handle([RemoveKeys(tuple(harness.keys(1, 2, 99)))])
    harness.take()
    assert [(run.page_count) for run in harness.unreleased[-1].runs] == [32]
    assert harness.located(0, 1, 2, 3) == [True, False, False, True]
    assert harness.catalog.check() == []


def die_while_writing(harness, numbers):
    """Have another owner ask for places of keys of its own, if for any, and end."""
    dead = Harness(harness.config.path, backend=harness.config.backend, capacity=4 * MIB)
    if numbers:
        keys = dead.keys(*(1000 + number for number in numbers))
        dead.writer.handle([RequestPlaces(1, tuple(keys), dead.chunk)])
    dead.catalog.close()  # without leaving, as if it was killed


def upkeep(harness, name, numbers, listed):
    """Do what changes no record but for evictions. `listed` segments may be gone by now."""
    if name == "sweep":
        harness.writer.handle([SweepGarbage()])
    elif name == "unreferenced":
        die_while_writing(harness, numbers)
        harness.writer.release_unreferenced(listed)
    else:
        harness.reopen()


def use(model, numbers):
    """Make recorded numbers the youngest."""
    for number in numbers:
        if number in model:
            model[number] = model.pop(number)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.lists(st.integers(0, 200), min_size=1, max_size=12)),
        st.tuples(st.just("touch"), st.lists(st.integers(0, 200), min_size=1, max_size=6)),
        st.tuples(st.just("remove"), st.lists(st.integers(0, 200), min_size=1, max_size=3)),
        st.tuples(st.just("fail"), st.lists(st.integers(0, 200), min_size=1, max_size=40)),
        st.tuples(st.just("unreferenced"), st.lists(st.integers(0, 200), max_size=6)),
        st.tuples(st.just("reopen"), st.just([])),
        st.tuples(st.just("reset"), st.just([])),
        st.tuples(st.just("sweep"), st.just([])),
    ),
    max_size=40,
)


@pytest.mark.parametrize("backend", ["file", "lmdb"])
@settings(max_examples=30, deadline=None)
@given(steps=STEPS)
@example(
    steps=[
        ("store", [0, *range(31, 37), 2]),
        ("store", [*range(23, 31)]),
        ("store", [11, *range(18, 23), *range(37, 41)]),
        ("fail", [*range(1, 11), *range(12, 18)]),  # evicts its own key 2, then stores it anew
    ]
)
@example(
    steps=[
        ("store", [*range(12)]),
        ("reset", []),
        ("store", [*range(4)]),  # over garbage under the same keys
        ("sweep", []),
        ("store", [*range(20, 32)]),
        ("reset", []),
        ("store", [*range(20, 32)]),
        ("store", [*range(40, 52)]),
        ("store", [*range(60, 72)]),
        ("store", [*range(80, 92)]),  # evicts, and meets garbage
        ("reopen", []),
        ("sweep", []),
        ("sweep", []),
    ]
)
@example(
    steps=[
        ("store", [*range(12)]),
        ("reset", []),
        ("unreferenced", [*range(20, 26)]),  # what the reset has left is garbage, and listed
        ("sweep", []),
        ("store", [*range(40, 52)]),
    ]
)
@example(
    steps=[
        ("store", [*range(20)]),
        ("unreferenced", [*range(6)]),
        ("store", [*range(20, 36)]),
        ("unreferenced", [0]),  # releases what the owner before it was writing, and dies, too
        ("store", [40]),
    ]
)
def test_the_catalog_agrees_with_a_model(tmp_path_factory, backend, steps):
    """Goal: records and their order equal a dict's, whatever happens; capacity holds throughout.

    Method: the model appends, moves and removes; what the catalog evicted is a prefix of it.
    """
    harness = Harness(tmp_path_factory.mktemp("model"), backend=backend, capacity=4 * MIB)
    model = {}
    listed = {}
    for name, drawn in steps:
        listed_before, listed = listed, harness.listed()
        numbers = list(dict.fromkeys(drawn))
        failed = range(0, len(numbers), 2) if name == "fail" else range(0)
        if name in ("store", "fail"):
            answer = harness.store(*numbers, failed=failed)
            if isinstance(answer, Placed):
                stored = [
                    harness.numbers[key]
                    for i, key in enumerate(answer.keys)
                    if i not in set(failed)
                ]
                # Placed keys had no record: a request that waits may evict what it names itself.
                for key in answer.keys:
                    model.pop(harness.numbers[key], None)
                use(model, reversed(numbers))  # storing what is recorded is a use of it
                model.update(dict.fromkeys(reversed(stored)))
        elif name == "touch":
            harness.writer.handle([TouchKeys(tuple(harness.keys(*numbers)))])
            use(model, numbers)
        elif name == "remove":
            harness.writer.handle([RemoveKeys(tuple(harness.keys(*numbers)))])
            for number in numbers:
                model.pop(number, None)
        elif name == "reset":
            harness.writer.handle([ForgetNamespace(harness.manifest.namespace)])
            model.clear()
        else:
            upkeep(harness, name, numbers, listed_before)
        harness.writer.handle([Evict()])
        harness.take()
        harness.release()
        harness.check_capacity()
        order = harness.order()
        expected = list(model)
        assert order == expected[len(expected) - len(order) :]
        model = dict.fromkeys(order)
        assert harness.catalog.check() == []
    harness.catalog.close()
