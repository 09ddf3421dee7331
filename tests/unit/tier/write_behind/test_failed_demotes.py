"""Which chunks are asked for again, and when."""

import itertools
import tracemalloc

from tierstore import Manifest, make_offload_keys
from tierstore.testing.spread import spread_hashes
from tierstore.tier.write_behind.failed_demotes import FailedDemotes

NAMESPACE = Manifest.simple("failed", chunk_bytes=4096).namespace


def keys(*numbers):
    return make_offload_keys(NAMESPACE, 0, spread_hashes(numbers))


def test_a_chunk_that_always_fails_is_asked_for_again_ever_more_rarely():
    failures = FailedDemotes()
    asked_at = []
    for write in range(1000):
        failures.note_refused(keys(1), "io_error")
        failures.on_written()
        if failures.is_retrying:
            assert failures.take(10) == keys(1)
            asked_at.append(write)
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked_at)]
    assert gaps == [2, 4, 8, 16, 32, 64, 128, 256, 256]


def test_a_chunk_that_was_written_at_last_is_no_reason_to_wait():
    failures = FailedDemotes()
    for _ in range(5):
        failures.note_refused(keys(1), "io_error")
        failures.on_written()
        assert failures.take(1) == keys(1)
        failures.on_recorded(keys(1), ticket=1)


def test_chunks_that_found_no_room_wait_for_a_flush():
    failures = FailedDemotes()
    failures.note_unasked(keys(1), "queue_full")
    failures.note_refused(keys(2, 3), "full")
    assert failures.count_by_reason() == {"queue_full": 1, "full": 2}
    failures.on_written()
    assert failures.take(10) == keys(2, 3)
    assert not failures.is_retrying
    failures.begin_retry()
    assert failures.take(10) == keys(1)
    assert not failures


def test_what_happens_to_some_chunks_is_not_compared_with_all_that_have_failed():
    """Goal: thousands may have failed, and each step has chunks that come and go.

    Method: a table of those that have failed takes far more memory than is allowed.
    """
    failures = FailedDemotes()
    failures.note_refused(keys(*range(100, 20_100)), "io_error")
    failures.note_unasked(keys(3), "queue_full")
    tracemalloc.start()
    try:
        failures.note_unasked(keys(1, 100), "queue_full")
        failures.drop(keys(4, 5))
        assert failures.on_recorded(keys(1, 6), ticket=3) == set()
        failures.forget(keys(7))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 50_000
    assert failures.count_by_reason() == {"io_error": 20_000, "queue_full": 1}


def test_what_left_memory_is_forgotten():
    failures = FailedDemotes()
    failures.note_refused(keys(1, 2), "io_error")
    failures.note_unasked(keys(3), "queue_full")
    failures.begin_retry()
    failures.drop(keys(2, 3, 4))
    assert failures.keys() == keys(1)
    assert failures.take(0) == []
    failures.clear()
    assert not failures
    assert not failures.is_retrying


def test_a_chunk_whose_payload_was_lost_is_asked_for_again_once():
    failures = FailedDemotes()
    failures.note_lost(keys(1, 2), held=set(), ticket=5)
    failures.begin_retry()
    assert set(failures.take(10)) == set(keys(1, 2))
    assert failures.on_recorded(keys(1, 3), ticket=6) == set()
    failures.begin_retry()
    assert failures.take(10) == []


def test_a_chunk_that_was_on_its_way_when_its_payload_was_lost_is_asked_for_again():
    failures = FailedDemotes()
    failures.note_lost(keys(1), held=set(keys(1)), ticket=5)
    assert failures.keys() == []
    assert failures.on_recorded(keys(1), ticket=5) == set(keys(1))
    failures.begin_retry()
    assert failures.take(10) == keys(1)
    assert failures.on_recorded(keys(1), ticket=6) == set()
    assert not failures
