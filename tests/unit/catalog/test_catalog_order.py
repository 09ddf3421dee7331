"""Groups of records of one cluster: what the order of eviction is made of."""

import numpy as np
import pytest
from catalog_harness import MIB, Harness

from tierstore.catalog.index.cache import IndexCache
from tierstore.catalog.index.index import Index
from tierstore.catalog.messages import Evict, ForgetNamespace, RemoveKeys, TouchKeys
from tierstore.catalog.pages.cluster_row import ClusterRow, indices_of, names_of
from tierstore.catalog.rows import wide_key
from tierstore.codec.record import PLACE_DTYPE
from tierstore.errors import CatalogDamagedError

CLUSTER_RECORDS = 16
"""Fewer than a cluster may have: a request of so many has one cluster."""


@pytest.fixture
def harness(tmp_path):
    harness = Harness(tmp_path, capacity=32 * MIB, chunk=4096)
    yield harness
    harness.catalog.close()


def touch(harness, *numbers):
    harness.writer.handle([TouchKeys(tuple(harness.keys(*numbers)))])


def rows(harness, name):
    database = getattr(harness.catalog._databases, name)
    with harness.catalog._env.read() as txn, txn.cursor(db=database) as cursor:
        return dict(cursor)


def cluster_of(harness, number):
    """Return the key of the cluster that a record lies in: the last one before its place."""
    (place,) = np.frombuffer(*harness.catalog.locate(harness.keys(number)), PLACE_DTYPE)
    own = wide_key(int(place["segment"]) << 32 | int(place["header_page"]))
    return max(key for key in rows(harness, "clusters") if key <= own)


def change_cluster(harness, number, change):
    """Change the cluster row that a record lies in."""
    clusters = harness.catalog._databases.clusters
    key = cluster_of(harness, number)
    with harness.catalog._env.write() as txn:
        row = ClusterRow.unpack(txn.get(key, db=clusters))
        change(row)
        txn.put(key, row.pack(), db=clusters)


def test_a_use_of_a_whole_cluster_changes_one_row_of_the_order_and_none_of_a_record(harness):
    for first in range(0, 3 * CLUSTER_RECORDS, CLUSTER_RECORDS):
        harness.store(*range(first, first + CLUSTER_RECORDS))
    names = ("log", "shards", "order", "clusters")
    log, shards, order, clusters = (rows(harness, name) for name in names)
    assert len(order) == len(clusters) == 3
    touch(harness, *reversed(range(CLUSTER_RECORDS)))
    assert (rows(harness, "log"), rows(harness, "shards")) == (log, shards)
    assert len(rows(harness, "order").items() - order.items()) == 1
    assert len(rows(harness, "order")) == 3
    assert len(rows(harness, "clusters").items() - clusters.items()) == 1
    assert harness.order()[-CLUSTER_RECORDS:] == [*reversed(range(CLUSTER_RECORDS))]
    assert harness.catalog.check() == []


def test_records_of_one_cluster_that_are_used_apart_are_ordered_apart(harness):
    harness.store(*range(8))
    touch(harness, 5, 2, 7)
    assert harness.order() == [6, 4, 3, 1, 0, 5, 2, 7]
    assert len(rows(harness, "order")) == 3
    touch(harness, 2)
    assert harness.order() == [6, 4, 3, 1, 0, 5, 7, 2]
    harness.reopen()
    assert harness.order() == [6, 4, 3, 1, 0, 5, 7, 2]
    touch(harness, *reversed(range(8)))
    assert harness.order() == [7, 6, 5, 4, 3, 2, 1, 0]
    assert len(rows(harness, "order")) == 1
    assert harness.catalog.check() == []


def test_a_pin_in_the_middle_of_a_cluster_keeps_one_record(harness):
    harness.store(*range(8))
    harness.pins.update(harness.keys(5))
    pages = harness.catalog.geometry.stride_pages(harness.chunk)
    harness.writer.handle([Evict(3 * pages)])
    assert harness.order() == [5, 3, 2, 1, 0], "7, 6 and 4 went"
    harness.writer.handle([Evict(8 * pages)])
    assert harness.order() == [5]
    assert harness.catalog.check() == []
    harness.pins.clear()
    harness.writer.handle([Evict(pages)])
    assert rows(harness, "order") == rows(harness, "clusters") == {}
    assert harness.catalog.check() == []


def test_a_removed_record_leaves_its_group(harness):
    harness.store(*range(4))
    harness.writer.handle([RemoveKeys(tuple(harness.keys(2)))])
    assert harness.order() == [3, 1, 0]
    assert harness.catalog.check() == []
    harness.store(2)
    assert harness.order() == [3, 1, 0, 2]
    assert harness.catalog.check() == []


def lose_a_bit(row):
    ((sequence, bits),) = row.groups.items()
    row.groups[sequence] = bits & ~1


def age(row):
    row.groups = {sequence - 1: bits for sequence, bits in row.groups.items()}


def rename_a_key(row):
    first, *others = row.keys()
    row.names = names_of([first[:-1] + bytes([first[-1] ^ 1]), *others])


def empty_keys(row):
    row.names = bytes(row.record_count)


@pytest.mark.parametrize("change", [lose_a_bit, age, rename_a_key, empty_keys])
def test_a_cluster_that_contradicts_its_records_or_the_order_is_found(harness, change):
    harness.store(*range(4))
    change_cluster(harness, 0, change)
    assert harness.catalog.check() != []


def double_order_row(txn, databases):
    (row,) = txn.cursor(db=databases.order)
    txn.put(wide_key(int.from_bytes(row[0], "big") - 1), row[1], db=databases.order)


def lose_order_row(txn, databases):
    ((sequence, _),) = txn.cursor(db=databases.order)
    txn.delete(sequence, db=databases.order)


def misname_order_row(txn, databases):
    ((sequence, cluster),) = txn.cursor(db=databases.order)
    txn.put(sequence, wide_key(int.from_bytes(cluster, "big") + 1), db=databases.order)


def change_index(txn, databases, change):
    index = Index(txn, databases, IndexCache())
    ((cluster, value),) = txn.cursor(db=databases.clusters)
    change(index, int.from_bytes(cluster, "big"), ClusterRow.unpack(value).keys()[:1])
    index.flush()


def lose_record(txn, databases):
    change_index(txn, databases, Index.remove)


def misname_cluster(txn, databases):
    def change(index, cluster, keys):
        index.remove(cluster, keys)
        index.add(cluster + 1, keys)

    change_index(txn, databases, change)


def name_twice(txn, databases):
    change_index(txn, databases, Index.add)


def copy_record(txn, databases):
    """Let a second cluster have a living record of a key."""
    ((key, value),) = txn.cursor(db=databases.clusters)
    ((sequence, _),) = txn.cursor(db=databases.order)
    row, number = ClusterRow.unpack(value), int.from_bytes(key, "big") + 1000
    row.groups = {int.from_bytes(sequence, "big") - 1: row.live_bits}
    txn.put(wide_key(number), row.pack(), db=databases.clusters)
    txn.put(wide_key(*row.groups), wide_key(number), db=databases.order)
    index = Index(txn, databases, IndexCache())
    index.add(number, row.keys())
    index.flush()


def lengthen_cluster_key(txn, databases):
    ((key, value),) = txn.cursor(db=databases.clusters)
    txn.delete(key, db=databases.clusters)
    txn.put(key + b"x", value, db=databases.clusters)


@pytest.mark.parametrize(
    "change",
    [
        double_order_row,
        lose_order_row,
        misname_order_row,
        lose_record,
        misname_cluster,
        name_twice,
        copy_record,
        lengthen_cluster_key,
    ],
)
def test_rows_that_do_not_name_each_other_are_found(harness, change):
    """Goal: groups and order, and keys in extents and records, are one to one."""
    harness.store(*range(4))
    catalog = harness.catalog
    with catalog._env.write() as txn:
        change(txn, catalog._databases)
    try:
        problems = catalog.check()
    except CatalogDamagedError as error:
        problems = [str(error)]
    assert problems != []


@pytest.mark.parametrize("number", [0, 1999])
def test_a_contradiction_in_one_of_many_steps_is_found(tmp_path, number):
    harness = Harness(tmp_path, capacity=32 * MIB, chunk=4096)
    harness.store(*range(2000))
    assert len(rows(harness, "clusters")) >= 16
    assert harness.catalog.check() == []
    change_cluster(harness, number, rename_a_key)
    assert any("not in the index" in problem for problem in harness.catalog.check())
    harness.catalog.close()


def test_clusters_of_a_forgotten_namespace_are_verified_before_they_are_swept(harness):
    """Goal: their keys name nothing any more; their groups are still rows of the order."""
    harness.store(*range(40))
    harness.writer.handle([ForgetNamespace(harness.manifest.namespace)])
    assert rows(harness, "clusters") != {}
    assert harness.catalog.check() == []
    database = harness.catalog._databases.order
    with harness.catalog._env.write() as txn:
        txn.delete(next(iter(txn.cursor(db=database)))[0], db=database)
    assert harness.catalog.check() != []


@pytest.mark.parametrize("change", [age, empty_keys])
def test_an_eviction_that_meets_such_a_cluster_changes_nothing(harness, change):
    harness.store(*range(4))
    change_cluster(harness, 0, change)
    before = {name: rows(harness, name) for name in ("log", "order", "clusters")}
    harness.writer.handle([Evict(1)])
    assert harness.writer.failure_count == 1
    assert {name: rows(harness, name) for name in before} == before


def test_a_group_begins_with_its_oldest_record():
    assert indices_of(0b1011) == [3, 1, 0]


KEYS = [b"k" * 44, b"l" * 44, b"m" * 60]


def row_of(keys, groups):
    return ClusterRow(len(keys), 1, 4096, 64, len(keys), groups, names_of(keys))


@pytest.mark.parametrize(
    "groups",
    [{}, {1: 0}, {1: 0b11, 2: 0b10}, {1: 0b1000}, dict.fromkeys(range(4), 1)],
    ids=["none", "empty", "shared", "beyond", "too many"],
)
def test_groups_that_contradict_each_other_are_damage(groups):
    row = row_of(KEYS, groups)
    with pytest.raises(CatalogDamagedError):
        ClusterRow.unpack(row.pack())


def test_a_cluster_row_with_an_empty_key_is_damage():
    for keys in ([b""] * 3, [b"k" * 44, b"", b"l" * 44]):
        row = row_of(keys, {7: 0b001})
        with pytest.raises(CatalogDamagedError):
            ClusterRow.unpack(row.pack())


def test_a_cluster_row_that_is_cut_or_has_a_rest_is_damage():
    row = row_of(KEYS, {7: 0b101, 9: 0b010})
    packed = row.pack()
    assert ClusterRow.unpack(packed) == row
    for length in range(len(packed)):
        with pytest.raises(CatalogDamagedError):
            ClusterRow.unpack(packed[:length])
    with pytest.raises(CatalogDamagedError):
        ClusterRow.unpack(packed + b"x")
