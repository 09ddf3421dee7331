"""A reset costs segments, not records; what it leaves behind goes later."""

import struct

import numpy as np
import pytest
from catalog_harness import MIB, Harness
from counted_writes import CountedWrites

from tierstore.catalog.garbage import SWEEP_ROWS_MAX
from tierstore.catalog.messages import (
    CommitTicket,
    ForgetNamespace,
    ReleaseDone,
    RequestPlaces,
    SweepGarbage,
)
from tierstore.catalog.pages.cluster_row import CLUSTER_RECORDS_MAX
from tierstore.tier_events import Committed, Placed

PAGE, BRANCH, LEAF = 4096, 1, 2
KEY_BYTES = {"clusters": 8}


def reset(harness):
    harness.writer.handle([ForgetNamespace(harness.manifest.namespace)])


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_a_reset_is_one_transaction_and_gives_whole_segments_back(tmp_path, backend):
    harness = Harness(tmp_path, backend=backend, capacity=384 * MIB, chunk=4096)
    for first in range(0, 40_000, 500):
        assert isinstance(harness.store(*range(first, first + 500)), Placed)
    assert harness.catalog.stats().record_count == 40_000
    harness.take()
    assert harness.unreleased == []
    segment_count = harness.row_count("segments")
    writes = CountedWrites(harness.catalog._env)
    reset(harness)
    assert writes.count == 1
    assert harness.writer.forgotten_count == 1
    harness.take()
    (freed,) = harness.unreleased
    assert freed.runs == ()
    assert len(freed.empty_segments) == segment_count
    assert not any(harness.located(*range(0, 40_000, 7)))
    stats = harness.catalog.stats()
    assert (stats.record_count, stats.payload_bytes, stats.evicted_count) == (0, 0, 0)
    assert harness.catalog.check() == []
    assert isinstance(harness.store(*range(500)), Placed), "usable at once"
    assert harness.located(*range(500)) == [True] * 500
    harness.release()
    assert harness.row_count("segments") == 1
    assert harness.name_count() == 40_500
    assert harness.catalog.check() == []
    assert harness.sweep() >= 40_000 // (SWEEP_ROWS_MAX + CLUSTER_RECORDS_MAX)
    assert harness.name_count() == 500
    assert harness.row_count("order") == harness.row_count("clusters") == -(-500 // 128)
    assert harness.row_count("floors") == 0
    assert harness.located(*range(500)) == [True] * 500
    assert harness.catalog.check() == []
    harness.catalog.close()


def test_a_sweep_that_a_restart_interrupts_begins_again(harness):
    harness.store(*range(8))
    reset(harness)
    assert harness.writer.has_garbage
    harness.reopen()
    assert harness.writer.has_garbage
    assert harness.name_count() == 8
    harness.sweep()
    assert harness.name_count() == harness.row_count("clusters") == 0
    harness.reopen()
    assert not harness.writer.has_garbage


def test_a_sweep_gives_way_to_everything_else(harness):
    harness.store(*range(8))
    reset(harness)
    keys = tuple(harness.keys(20))
    harness.writer.handle([SweepGarbage(), RequestPlaces(90, keys, harness.chunk)])
    assert harness.name_count() == 8
    assert [event.ticket for event in harness.take()] == [90]


def test_eviction_meets_garbage_and_counts_it_not(tmp_path):
    harness = Harness(tmp_path, capacity=8 * MIB, chunk=4096)
    for first in range(0, 1000, 100):
        harness.store(*range(first, first + 100))
    reset(harness)
    harness.take()
    harness.release()
    first = 10_000
    while harness.catalog.stats().evicted_count == 0:
        assert isinstance(harness.store(*range(first, first + 100)), Placed)
        assert harness.catalog.check() == []
        first += 100
    assert first - 10_000 > 1200, "evicted before the tier was full"
    assert harness.name_count() == harness.catalog.stats().record_count
    harness.catalog.close()


def test_what_another_process_writes_through_a_reset_is_never_found(tmp_path):
    """Goal: its segment goes when its last write has ended, and it opens another one."""
    one, other = Harness(tmp_path, capacity=32 * MIB), Harness(tmp_path, capacity=32 * MIB)
    other.store(*range(8))
    other.writer.handle([RequestPlaces(70, tuple(other.keys(20, 21)), other.chunk)])
    other.writer.handle([RequestPlaces(71, tuple(other.keys(22)), other.chunk)])
    (placed, _) = other.take()
    segment = int.from_bytes(placed.places[0][:4], "little")
    reset(one)
    one.take()
    assert all(segment not in freed.empty_segments for freed in one.unreleased)
    assert other.located(*range(8)) == [False] * 8
    other.writer.handle([CommitTicket(70, frozenset({1}))])
    assert Committed(70) in other.writer.events
    other.take()
    assert other.unreleased == []
    assert other.catalog.check() == []
    other.writer.handle([CommitTicket(71, frozenset())])
    other.take()
    (freed,) = other.unreleased
    assert (freed.runs, freed.empty_segments) == ((), (segment,))
    other.writer.handle([ReleaseDone(freed.release_id)])
    other.unreleased.clear()
    assert one.located(20, 21, 22) == [False] * 3
    answer = other.store(20, 30)
    assert int.from_bytes(answer.places[0][:4], "little") > segment
    assert one.located(20, 30) == [True, True]
    assert one.catalog.check() == []
    one.sweep()
    assert one.catalog.check() == []
    one.catalog.close()
    other.catalog.close()


def test_a_reset_leaves_other_namespaces_alone(tmp_path):
    one = Harness(tmp_path, capacity=32 * MIB)
    other = Harness(tmp_path, capacity=32 * MIB, chunk=40_000, model="other")
    one.store(*range(8))
    other.store(*range(8))
    reset(one)
    assert one.located(*range(8)) == [False] * 8
    assert other.located(*range(8)) == [True] * 8
    one.sweep()
    assert other.located(*range(8)) == [True] * 8
    assert other.catalog.check() == []
    one.catalog.close()
    other.catalog.close()


def test_segments_are_of_one_namespace(tmp_path):
    harness = Harness(tmp_path)
    first = harness.store(1)
    harness.manifest = harness.manifest.in_epoch("e")
    second = harness.store(1)
    segments = {int(np.frombuffer(answer.places[0][:4], "<u4")[0]) for answer in (first, second)}
    assert len(segments) == 2
    harness.catalog.close()


def damage_a_key(path, kind, length, start):
    """Begin the middle one of the keys of a length on all pages of a kind with other bytes."""
    content = bytearray(path.read_bytes())
    places = []
    for page in range(2 * PAGE, len(content), PAGE):
        flags, lower = struct.unpack_from("<HH", content, page + 10)
        if flags != kind:
            continue
        for at in struct.unpack_from(f"<{(lower - 16) // 2}H", content, page + 16):
            (size,) = struct.unpack_from("<H", content, page + at + 6)
            # Not those of the order, which has keys of this length, too, and counts from one.
            if size == length and content[page + at + 8 : page + at + 11] != bytes(3):
                places.append(page + at + 8)
    keys = sorted(bytes(content[at : at + length]) for at in places)
    key = keys[len(keys) // 2]
    for at in places:
        if content[at : at + length] == key:
            content[at : at + len(start)] = start
    path.write_bytes(content)


@pytest.mark.parametrize("start", [bytes(4), b"\xff" * 4])
@pytest.mark.parametrize("kind", [LEAF, BRANCH])
@pytest.mark.parametrize("database", KEY_BYTES)
def test_garbage_whose_keys_are_damaged_does_not_stay(tmp_path, database, kind, start):
    """Goal: a search that a key leads astray finds no garbage, and nobody would remove it."""
    harness = Harness(tmp_path, capacity=32 * MIB, chunk=4096)
    for number in range(400):  # a cluster for each
        harness.store(number)
    reset(harness)
    harness.take()
    harness.release()
    harness.catalog.close()
    damage_a_key(tmp_path / "catalog" / "data.mdb", kind, KEY_BYTES[database], start)
    harness.open()
    harness.sweep()
    assert harness.catalog.check() == []
    assert isinstance(harness.store(500), Placed)
    counts = [harness.row_count(name) for name in ("order", "clusters")]
    assert counts == [1, 1]
    harness.catalog.close()


def test_a_floor_whose_number_is_damaged_hides_nothing_that_comes(harness):
    harness.store(*range(8))
    reset(harness)
    harness.take()
    harness.release()
    with harness.catalog._env.read(harness.catalog._databases.floors) as txn:
        namespace = harness.manifest.namespace
        row = namespace + txn.get(namespace)
    harness.catalog.close()
    path = harness.config.path / "catalog" / "data.mdb"
    content = path.read_bytes()
    assert row in content
    path.write_bytes(content.replace(row, row[:-1] + b"\xff"))
    harness.open()
    harness.store(500)
    assert harness.located(500) == [True]
    harness.sweep()
    assert harness.located(500) == [True]
    assert harness.catalog.check() == []
