"""No table of the memory tier is so large that rebuilding it would be felt in a step.

Goal: Python copies all entries of a hash table within one insertion, when it grows, and again after
as many came and went as it has places. Method: count the entries of every hash table behind a full
tier, whatever calls have filled it.
"""

import gc
from types import FunctionType, ModuleType

import pytest

from tierstore.config import PrimaryConfig
from tierstore.key import OffloadKey
from tierstore.layout import PAGE_BYTES
from tierstore.testing.spread import spread_hashes
from tierstore.tier.admission.admitted import AdmittedChunks
from tierstore.tier.memory.primary import PrimaryTier
from tierstore.tier.movement_log import MovementLog

CHUNK_COUNT = 60_000
RUN = 500
ENTRIES_MAX = 21_845
"""Python rebuilds as many in less than half a millisecond."""


def tables_of(root):
    """Return the dicts and sets that `root` refers to, however indirectly."""
    seen, waiting, tables = {}, [root], []
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, type | FunctionType | ModuleType):
            continue
        seen[id(found)] = found
        if isinstance(found, dict | set):
            tables.append(found)
        # The garbage collector ignores tables of bytes and numbers.
        waiting += [
            it for it in gc.get_referents(found) if gc.is_tracked(it) or isinstance(it, dict | set)
        ]
    return tables


def most_entries(root):
    return max(map(len, tables_of(root)))


def runs(first, count):
    numbers = range(first, first + count)
    keys = [OffloadKey(b"namespac\0\0\0\0" + it) for it in spread_hashes(numbers)]
    return [keys[start : start + RUN] for start in range(0, count, RUN)]


def store(tier, run):
    assert tier.reserve(0, run) is not None
    tier.commit(run)


def full_tier(eviction):
    config = PrimaryConfig(capacity_bytes=CHUNK_COUNT * PAGE_BYTES, eviction=eviction)
    tier = PrimaryTier(config, [PAGE_BYTES])
    stored = runs(0, CHUNK_COUNT)
    for run in stored:
        store(tier, run)
    return tier, stored


@pytest.mark.parametrize("eviction", ["lru", "arc"])
def test_no_table_grows_with_the_number_of_chunks(eviction):
    tier, stored = full_tier(eviction)
    assert most_entries(tier) <= ENTRIES_MAX  # full
    for run in stored[::2]:
        tier.touch(run)
    for run in runs(CHUNK_COUNT, CHUNK_COUNT):
        store(tier, run)
    assert most_entries(tier) <= ENTRIES_MAX  # with as many ghosts, where there are any
    for run in runs(0, CHUNK_COUNT):
        if tier.are_new(run):
            store(tier, run)
    assert most_entries(tier) <= ENTRIES_MAX  # ghosts came back
    assert len(tier) == CHUNK_COUNT
    assert tier.check() == []


def test_no_table_grows_with_the_number_of_pins():
    tier, stored = full_tier("lru")
    for run in stored:
        tier.pin(run)
        tier.pin(run[::2])
    assert most_entries(tier) <= ENTRIES_MAX
    for run in stored:
        tier.unpin(run)
        tier.unpin(run[::2])
    assert not tier.is_room_held


def test_no_table_grows_with_the_number_of_admitted_chunks():
    admitted = AdmittedChunks()
    for run in runs(0, CHUNK_COUNT):
        admitted.add(run)
    assert most_entries(admitted) <= ENTRIES_MAX


def test_no_table_grows_with_the_number_of_described_chunks():
    log = MovementLog()
    for run in runs(0, CHUNK_COUNT):
        log.arriving(run)
        for key in log.take_undescribed():
            log.describe(key, None)
    assert most_entries(log) <= ENTRIES_MAX


def test_tables_stay_few_when_each_use_leaves_a_few_keys_behind():
    tier, stored = full_tier("lru")
    before = len(tables_of(tier))
    hot = [key for run in stored for key in run]
    expected = []
    for part in range(12):
        left = hot[part::100]
        expected += left
        left_behind = set(left)
        hot = [key for key in hot if key not in left_behind]
        for start in range(0, len(hot), RUN):
            tier.touch(hot[start : start + RUN])
    assert tier.coldest(CHUNK_COUNT) == expected + hot
    assert len(tables_of(tier)) <= 2 * before
    assert tier.check() == []
