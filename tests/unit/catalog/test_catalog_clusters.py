"""Clusters: how a request's records become rows, and how few of them a lookup reads."""

from contextlib import contextmanager

import numpy as np
import pytest
from catalog_harness import MIB, Harness

from tierstore.catalog.messages import Evict, RemoveKeys
from tierstore.catalog.pages.cluster_row import ClusterRow, indices_of, names_of
from tierstore.catalog.pages.extents import adjacent
from tierstore.codec.record import PLACE_DTYPE


class CountedGets:
    """A read transaction that counts what it is asked for."""

    def __init__(self, txn):
        self.count = 0
        self._txn = txn

    def get(self, *args, **named):
        self.count += 1
        return self._txn.get(*args, **named)

    def __getattr__(self, name):
        return getattr(self._txn, name)


def located(harness, *numbers):
    """Return the places of records, and how many rows were asked for."""
    env = harness.catalog._env
    read, counted = env.read, []

    @contextmanager
    def counting(*args):
        with read(*args) as txn:
            counted.append(CountedGets(txn))
            yield counted[-1]

    env.read = counting
    try:
        places = harness.catalog.locate(harness.keys(*numbers))
    finally:
        del env.read
    return places, sum(txn.count for txn in counted)


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_a_request_of_128_chunks_is_one_row_and_is_found_by_a_few(tmp_path, backend):
    harness = Harness(tmp_path, backend=backend, capacity=64 * MIB, chunk=4096)
    placed = harness.store(*range(128))
    assert harness.row_count("clusters") == harness.row_count("order") == 1
    places, count = located(harness, *range(128))
    assert tuple(places) == placed.places
    assert count <= 4
    assert harness.catalog.check() == []
    harness.catalog.close()


def test_a_long_request_is_rows_of_128_records(tmp_path):
    harness = Harness(tmp_path, capacity=64 * MIB, chunk=4096)
    placed = harness.store(*range(300))
    assert harness.row_count("clusters") == 3
    places, count = located(harness, *range(300))
    assert tuple(places) == placed.places
    assert count <= 6
    harness.catalog.close()


def test_the_end_of_a_segment_divides_a_request_and_every_record_is_found(tmp_path):
    harness = Harness(tmp_path, capacity=32 * MIB, chunk=4096)
    answers = {}
    for first in range(0, 2100, 100):
        placed = harness.store(*range(first, first + 100))
        answers.update(zip(range(first, first + 100), placed.places, strict=True))
    assert harness.row_count("clusters") > 21
    places, _ = located(harness, *answers)
    assert places == list(answers.values())
    assert harness.catalog.check() == []
    harness.catalog.close()


def test_failed_and_removed_records_of_a_cluster_leave_the_others(tmp_path):
    harness = Harness(tmp_path, capacity=64 * MIB, chunk=4096)
    failed = {0, *range(32, 64), 100}
    harness.store(*range(128), failed=failed)
    assert [n for n, is_there in enumerate(harness.located(*range(128))) if not is_there] == (
        sorted(failed)
    )
    assert harness.catalog.check() == []
    harness.writer.handle([RemoveKeys(tuple(harness.keys(*range(64, 96), 127)))])
    harness.take()
    harness.release()
    gone = failed | {*range(64, 96), 127}
    assert [n for n, is_there in enumerate(harness.located(*range(128))) if not is_there] == (
        sorted(gone)
    )
    assert harness.catalog.check() == []
    harness.store(*sorted(gone))
    assert all(harness.located(*range(128)))
    assert harness.row_count("clusters") == 2
    assert harness.catalog.check() == []
    harness.writer.handle([Evict(1 << 20)])
    harness.take()
    harness.release()
    assert harness.row_count("clusters") == 0
    segments = harness.disk.segments
    assert not any(page in segments.get(segment, ()) for segment, page in harness.disk.written)
    harness.catalog.close()


def row_of(count, extent_records, stride):
    names = names_of([b"%020d" % index for index in range(count)])
    return ClusterRow(count, stride, 4096, 64, extent_records, {1: (1 << count) - 1}, names)


@pytest.mark.parametrize("header_pages", [0, 1])
@pytest.mark.parametrize(
    ("count", "extent_records", "stride"), [(128, 32, 3), (7, 2, 5), (5, 9, 1)]
)
def test_page_runs_are_the_pages_of_places(count, extent_records, stride, header_pages):
    """Goal: what dies frees its pages, and the header of its extent with the last of it."""
    row, cluster = row_of(count, extent_records, stride), 3 << 32 | 50
    dice = np.random.default_rng(count)
    places = row.places(cluster, range(count), header_pages)
    fields = [np.frombuffer(place, PLACE_DTYPE)[0] for place in places]
    living, freed = set(range(count)), set()
    while living:
        dying = {index for index in living if dice.random() < 0.4}
        living -= dying
        runs = row.page_runs(
            cluster,
            sum(1 << index for index in dying),
            sum(1 << index for index in living),
            header_pages,
        )
        for segment, first, length in runs:
            assert segment == 3
            pages = set(range(first, first + length))
            assert not pages & freed, "a page was freed twice"
            freed |= pages
        held = set()
        for index in living:
            page = int(fields[index]["header_page"])
            held |= set(range(page, page + header_pages))
            first = page + header_pages + int(fields[index]["index"]) * stride
            held |= set(range(first, first + stride))
        assert freed == set(range(50, 50 + row.page_count(header_pages))) - held


def test_only_whole_extents_are_followed_by_others_in_a_cluster():
    assert adjacent([], 1) == []
    assert adjacent([(1, 0, 2, 32), (1, 65, 2, 32), (1, 130, 2, 5)], 1) == [3]
    assert adjacent([(1, 0, 2, 32), (1, 65, 2, 5), (1, 76, 2, 5)], 1) == [2, 1]
    assert adjacent([(1, 0, 2, 5), (2, 0, 2, 32), (2, 65, 2, 32)], 1) == [1, 2]
    assert adjacent([(1, 0, 2, 5), (1, 11, 2, 32)], 1) == [1, 1]
    extents = [(1, 65 * number, 2, 32) for number in range(6)]
    assert adjacent(extents, 1) == [4, 2]


def test_indices_of_a_wide_group_begin_with_the_highest():
    assert indices_of(1 << 127 | 1 << 64 | 1) == [127, 64, 0]
