"""Batches that no planner makes: both paths see the same, and nothing outside of the slots."""

import random

import numpy as np
import pytest
from campaign import run_campaign
from native_batches import HostileBatches
from native_library import interpreted, native
from opened_backend import opened

from tierstore.backend.protocol import RecordIo
from tierstore.backend.record_batch import RecordBatch
from tierstore.backend.segments.extent import plan_reads, split_extents
from tierstore.codec.record import PLACE_DTYPE
from tierstore.layout import PAGE_BYTES
from tierstore.testing.extents import Extent, write_extent


def places_of(*rows):
    return np.array(list(rows), PLACE_DTYPE)


def test_an_index_does_not_continue_the_last_of_all_numbers():
    places = places_of((0, 9, 2**32 - 1, 1, 10, 40), (0, 9, 0, 1, 10, 40), (0, 9, 1, 1, 10, 40))
    assert split_extents(places) == [(0, 1), (1, 3)]


def test_the_payloads_behind_the_last_of_all_header_pages_are_not_at_the_beginning():
    places = places_of((0, 2**32 - 1, 0, 1, 10, 40), (0, 2**32 - 1, 9, 3, 10, 40))
    (part,) = plan_reads(places, np.arange(2), 64)
    assert [run.first_page for run in part.runs] == [2**32 - 1, 2**32 + 27]
    assert part.end_pages.tolist() == [2**32 + 1, 2**32 + 30]


@pytest.mark.parametrize("first", [0, 1000, None])
def test_both_paths_make_the_same_of_hostile_batches(tmp_path, first):
    """Some batches that are always the same, and some that never were."""
    first = random.randrange(1 << 32) if first is None else first
    print(f"seeds from {first}")
    batches = HostileBatches(tmp_path)
    found = [batches.run(seed) for seed in range(first, first + 40)]
    assert [one for one in found if one["problems"]] == []
    assert sum((one["counts"] for one in found), start=found[0]["counts"])["layout"] > 0


def test_hostile_batches_make_the_library_do_nothing_undefined():
    found = run_campaign("batches-undefined", range(60))
    assert found.failures == []
    assert found.counts["tries"] == 60


@pytest.mark.parametrize("library", [native, interpreted])
@pytest.mark.parametrize("is_pool", [True, False])
def test_memory_that_may_not_be_written_is_not_read_into(tmp_path, library, is_pool):
    """An immutable object of Python's own may lie there, which others share."""
    backend = opened(tmp_path, library=library, mode="buffered")
    extent = Extent(2, 5000)
    write_extent(backend, extent)
    content = bytes(4 * PAGE_BYTES)
    records = [
        RecordIo(key, place, memoryview(content)[start : start + 2 * PAGE_BYTES])
        for key, place, start in zip(extent.keys, extent.places, (0, 2 * PAGE_BYTES), strict=True)
    ]
    if is_pool:
        offsets = np.array([0, 2 * PAGE_BYTES])
        records = RecordBatch.in_pool(
            extent.keys, extent.places, memoryview(content), offsets, 2 * PAGE_BYTES
        )
    with pytest.raises(BufferError):
        backend.read(records)
    assert not any(content)
    assert extent.served(backend) == [None, None]
    backend.close()
