"""The search of the native library beside numpy's."""

import random

import numpy as np
import pytest

from tierstore.catalog.index.cache import IndexCache
from tierstore.catalog.index.searching import Quick, address_of
from tierstore.native.library import Loaded, find_library

needs_library = pytest.mark.skipif(find_library().calls is None, reason=find_library().why)


def searches_of(pairs):
    return [
        (address_of(numbers), len(numbers), address_of(queries), len(queries))
        for numbers, queries in pairs
    ]


def random_pair(chance):
    width = chance.choice([8, 1 << 10, (1 << 64) - 1])
    return tuple(
        np.array(sorted(chance.randint(0, width) for _ in range(count)), np.uint64)
        for count in (chance.choice([0, 1, 2, 7, 300]), chance.choice([0, 1, 3, 40]))
    )


@needs_library
def test_it_finds_nothing_where_numpy_finds_nothing():
    chance = random.Random(1)
    answers = []
    for _ in range(500):
        pairs = [random_pair(chance) for _ in range(chance.choice([0, 1, 5]))]
        has_match = any(np.isin(queries, numbers).any() for numbers, queries in pairs)
        answers.append(Quick().finds_none(searches_of(pairs)))
        assert answers[-1] is not has_match
    assert len(set(answers)) == 2


@needs_library
def test_the_first_and_the_last_number_are_found():
    numbers = np.array([0, 5, 5, (1 << 64) - 1], np.uint64)
    for wanted in (0, 5, (1 << 64) - 1):
        assert not Quick().finds_none(searches_of([(numbers, np.array([wanted], np.uint64))]))
    others = np.array([1, 4, 6, (1 << 64) - 2], np.uint64)
    assert Quick().finds_none(searches_of([(numbers, others)]))


def test_without_the_library_nothing_is_certain():
    without = Quick(lambda: Loaded(None, "not there"))
    assert not without.finds_none([])
    assert not without.finds_none(searches_of([(np.zeros(1, np.uint64), np.ones(1, np.uint64))]))
    assert IndexCache(quick=without).quick is without
