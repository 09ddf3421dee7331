"""Payload is removed, moved, replaced or cut off under a store whose catalog stays.

What is in memory can be written again, so a flush that ends well has written it again. And only
what is gone: segments that others have evicted are no loss.
"""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from store_kit import MIB, Chunks, config_of

from tierstore.errors import BackendError

CHUNKS = Chunks(65_536)
STORED, LATER = range(24), range(100, 116)

BACKENDS = pytest.mark.parametrize("backend", ["file", "lmdb"])
CASCADES = pytest.mark.parametrize("cascade", ["write_through", "on_evict", "second_touch"])


def put_twice(store, numbers):
    """Store chunks; `second_touch` wants to see them used."""
    for _ in range(2):
        CHUNKS.put(store, numbers)


def remove_rank(tier):
    shutil.rmtree(tier / "rank0")


def move_rank(tier):
    (tier / "rank0").rename(tier.parent / "away")


def replace_rank(tier):
    move_rank(tier)
    (tier / "rank0").mkdir(mode=0o700)


def segments(tier):
    found = sorted((tier / "rank0").glob("*.seg"))
    assert found
    return found


def remove_segments(tier):
    for segment in segments(tier):
        segment.unlink()


def move_segment(tier):
    segments(tier)[0].rename(tier.parent / "away.seg")


def replace_segment(tier):
    """As large as before, and empty."""
    segment = segments(tier)[0]
    size_bytes = segment.stat().st_size
    segment.rename(tier.parent / "away.seg")
    descriptor = os.open(segment, os.O_CREAT | os.O_RDWR, 0o600)
    os.ftruncate(descriptor, size_bytes)
    os.close(descriptor)


def cut_segment(tier):
    os.truncate(segments(tier)[0], 4096)


def remove_payload(tier):
    shutil.rmtree(tier / "rank0" / "payload")


def remove_database(tier):
    (tier / "rank0" / "payload" / "data.mdb").unlink()


LOSSES = [
    *((backend, lose) for backend in ("file", "lmdb") for lose in (remove_rank, move_rank)),
    *((backend, replace_rank) for backend in ("file", "lmdb")),
    *(("file", lose) for lose in (remove_segments, move_segment, replace_segment, cut_segment)),
    *(("lmdb", lose) for lose in (remove_payload, remove_database)),
]


def each_of(losses):
    names = [f"{backend}-{lose.__name__}" for backend, lose in losses]
    return pytest.mark.parametrize(("backend", "lose"), losses, ids=names)


EACH_LOSS = each_of(LOSSES)
VANISHED = each_of([loss for loss in LOSSES if loss[1] not in (replace_segment, cut_segment)])


@CASCADES
@EACH_LOSS
def test_a_flush_that_ends_well_has_written_again_what_was_lost(tmp_path, backend, lose, cascade):
    config = config_of(tmp_path / "tier", backend=backend, cascade=cascade)
    with CHUNKS.open(config) as store:
        put_twice(store, STORED)
        store.flush()
        lose(tmp_path / "tier")
        store.flush()
        assert store.check() == []
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, STORED) == list(STORED)
        assert store.check() == []


@EACH_LOSS
def test_nor_do_new_chunks_hide_the_loss_of_old_ones(tmp_path, backend, lose):
    config = config_of(tmp_path / "tier", backend=backend)
    with CHUNKS.open(config) as store:
        CHUNKS.put(store, STORED)
        store.flush()
        lose(tmp_path / "tier")
        for number in LATER:  # and the writes find the files gone before the flush does
            CHUNKS.put(store, [number])
        store.flush()
        assert store.check() == []
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, [*STORED, *LATER]) == [*STORED, *LATER]


@EACH_LOSS
def test_chunks_that_came_from_the_tier_are_written_again_as_well(tmp_path, backend, lose):
    config = config_of(tmp_path / "tier", backend=backend)
    with CHUNKS.open(config) as store:
        CHUNKS.put(store, STORED)
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, STORED) == list(STORED)
        lose(tmp_path / "tier")
        store.flush()
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, STORED) == list(STORED)


@BACKENDS
def test_a_loss_again_and_again_is_mended_each_time(tmp_path, backend):
    tier = tmp_path / "tier"
    config = config_of(tier, backend=backend)
    with CHUNKS.open(config) as store:
        CHUNKS.put(store, STORED)
        for _ in range(5):
            store.flush()
            remove_rank(tier)
        store.flush()
        assert store.check() == []
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, STORED) == list(STORED)


def test_what_another_one_has_evicted_is_not_written_again(tmp_path):
    """Its segments go, and no record with them."""
    config = config_of(tmp_path / "tier", primary="32MiB", capacity=f"{24 * MIB}B")
    with CHUNKS.open(config) as store, CHUNKS.open(config) as other:
        CHUNKS.put(store, STORED)
        store.flush()
        known = set(segments(tmp_path / "tier"))
        for first in range(1000, 1600, 64):
            CHUNKS.put(other, range(first, first + 64))
            other.flush()
        assert not known <= set(segments(tmp_path / "tier")), "nothing was evicted"
        written = store.stats().counters
        store.flush()
        assert store.stats().counters == written
        assert store.check() == other.check() == []


@EACH_LOSS
def test_two_stores_on_one_path_do_not_undo_each_other_for_ever(tmp_path, backend, lose):
    config = config_of(tmp_path / "tier", backend=backend)
    with CHUNKS.open(config) as store, CHUNKS.open(config) as other:
        CHUNKS.put(store, STORED)
        CHUNKS.put(other, LATER)
        for one in (store, other):
            one.flush()
        lose(tmp_path / "tier")
        for one in (store, other):
            with suppress(BackendError):  # a database that the other one still has open is not made
                one.flush()
        for one in (store, other):
            one.flush()
        written = [one.stats().counters for one in (store, other)]
        for one in (store, other):
            one.flush()
        assert [one.stats().counters for one in (store, other)] == written
        assert store.check() == other.check() == []
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, [*STORED, *LATER]) == [*STORED, *LATER]


@BACKENDS
def test_chunks_that_had_left_memory_are_stored_anew_when_they_come_again(tmp_path, backend):
    """Their records lead to nothing: no reason not to store them."""
    config = config_of(tmp_path / "tier", backend=backend, primary="2MiB")
    many = range(64)
    with CHUNKS.open(config) as store:
        CHUNKS.put(store, many)
        store.flush()
        remove_rank(tmp_path / "tier")
        store.flush()
        for first in many[::16]:
            CHUNKS.put(store, range(first, first + 16))
            store.flush()
        assert store.check() == []
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, many) == list(many)


def demoted(store):
    counters = store.stats().counters
    return sum(count for name, count in counters.items() if name.startswith("demoted_chunks"))


@BACKENDS
def test_no_flush_ends_before_another_one_has_written_what_was_lost(tmp_path, backend):
    config = config_of(tmp_path / "tier", backend=backend)
    with CHUNKS.open(config) as store, ThreadPoolExecutor(4) as threads:
        CHUNKS.put(store, STORED)
        store.flush()

        def demoted_after_flush(_):
            store.flush()
            return demoted(store)

        for _ in range(20):
            before = demoted(store)
            remove_rank(tmp_path / "tier")
            assert min(threads.map(demoted_after_flush, range(4))) >= before + len(STORED)
        assert store.check() == []


@EACH_LOSS
def test_chunks_that_were_stored_before_are_looked_for_when_they_are_stored_again(
    tmp_path, backend, lose
):
    """The store has neither written nor read them, and relies on their records."""
    config = config_of(tmp_path / "tier", backend=backend)
    with CHUNKS.open(config) as store:
        CHUNKS.put(store, STORED)
    with CHUNKS.open(config) as store:
        CHUNKS.put(store, STORED)
        store.flush()
        lose(tmp_path / "tier")
        store.flush()
        assert store.check() == []
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, STORED) == list(STORED)


# A file that was replaced or cut off meanwhile is compared with nothing: a miss when it is read.
@VANISHED
def test_what_vanished_while_nobody_had_it_open_is_written_again_when_it_is_stored_again(
    tmp_path, backend, lose
):
    config = config_of(tmp_path / "tier", backend=backend)
    with CHUNKS.open(config) as store:
        CHUNKS.put(store, STORED)
    lose(tmp_path / "tier")
    with CHUNKS.open(config) as store:
        CHUNKS.put(store, STORED)
        store.flush()
        assert store.check() == []
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, STORED) == list(STORED)
