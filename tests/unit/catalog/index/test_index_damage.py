"""Damaged rows are told, and never taken for others."""

import struct
from contextlib import suppress

import pytest
from index_lab import IndexLab, key_of
from xxhash import xxh3_64_intdigest

from tierstore.catalog.index.head import HEAD_KEY
from tierstore.errors import CatalogDamagedError

KEYS = [key_of(number) for number in range(200)]


@pytest.fixture
def lab(tmp_path):
    lab = IndexLab(tmp_path)
    for first in range(0, 200, 10):
        lab.change([(first, KEYS[first : first + 10], True)])
    lab.change([(0, KEYS[:5], False)])
    assert all(lab.row_counts())
    yield lab
    lab.close()


def rows_of(lab, database):
    with lab.env.read() as txn, txn.cursor(db=database) as cursor:
        return {bytes(key): bytes(value) for key, value in cursor}


def use(lab):
    with lab.env.read() as txn:
        index = lab.index_of(txn, lab.new_cache())
        index.find(KEYS)
    return lab.check()


@pytest.mark.parametrize("name", ["shards", "log"])
def test_every_changed_byte_is_told(lab, name) -> None:
    database = getattr(lab, name)
    for key, value in rows_of(lab, database).items():
        for at in range(0, len(value), max(len(value) // 40, 1)):
            changed = bytearray(value)
            changed[at] ^= 1 << at % 8
            assert_told(lab, database, key, bytes(changed))
        for changed in (b"", value[:-1], value[:-8], value[:7], value + b"\0", value + value):
            assert_told(lab, database, key, changed)
        assert_told(lab, database, key, None)
    assert use(lab) == []


def assert_told(lab, database, key, value):
    class Undone(Exception):  # noqa: N818 - it ends a transaction
        pass

    with suppress(Undone), lab.env.write() as txn:
        if value is None:
            txn.delete(key, db=database)
        else:
            txn.put(key, value, db=database)
        with pytest.raises(CatalogDamagedError):
            lab.index_of(txn, lab.new_cache()).find(KEYS)
        raise Undone


def with_checksum(content):
    return content + struct.pack("<Q", xxh3_64_intdigest(content))


@pytest.mark.parametrize(
    ("at", "layout", "value"),
    [
        (8, "<Q", 0),  # the first number
        (8, "<Q", 1 << 40),
        (16, "<Q", 0),  # the next number
        (16, "<Q", (1 << 64) - 1),
        (32, "<Q", (1 << 64) - 1),  # what is owed
        (40, "<I", 5),  # the start of the first shard
        (40 + 4, "<I", (1 << 32) - 1),  # its count
        (40 + 8, "<Q", 1 << 50),  # what is merged
        (40 + 16, "<Q", 0),  # its version
        (40 + 24, "<I", 0),  # the start of the second one
        (40 + 24, "<I", 1 << 17),
    ],
)
def test_a_head_that_contradicts_itself_is_told(lab, at, layout, value) -> None:
    row = bytearray(rows_of(lab, lab.shards)[HEAD_KEY][:-8])
    struct.pack_into(layout, row, at, value)
    assert_told(lab, lab.shards, HEAD_KEY, with_checksum(bytes(row)))


def test_a_row_of_the_log_with_impossible_counts_is_told(lab) -> None:
    key, value = max(rows_of(lab, lab.log).items())
    for at, number in ((16, 1 << 31), (20, 1 << 31), (24 + 8, (1 << 32) - 1), (24 + 12, 2)):
        row = bytearray(value[:-8])
        struct.pack_into("<I", row, at, number)
        assert_told(lab, lab.log, key, with_checksum(bytes(row)))


def test_rows_of_the_log_that_do_not_follow_each_other_are_told(lab) -> None:
    keys = sorted(rows_of(lab, lab.log))
    for key in (keys[1], keys[-1]):
        row = bytearray(rows_of(lab, lab.log)[key][:-8])
        row[8] ^= 1
        assert_told(lab, lab.log, key, with_checksum(bytes(row)))


def test_shards_that_changed_places_are_told(lab) -> None:
    first, second = [key for key in sorted(rows_of(lab, lab.shards)) if key != HEAD_KEY][:2]
    assert_told(lab, lab.shards, first, rows_of(lab, lab.shards)[second])


def test_the_check_tells_what_is_lost_what_is_too_much_and_what_nobody_names(lab) -> None:
    living = lab.living
    lab.living = {**living, key_of(999): [77]}
    assert lab.check() == ["1 records are not in the index"]
    lab.living = {key: clusters for key, clusters in living.items() if key not in KEYS[50:60]}
    assert lab.check() == ["10 entries of the index name no record"]
    lab.living = living
    with lab.env.write() as txn:
        txn.put(b"\xff\xfe", b"x", db=lab.shards)
        txn.put(b"\xff" * 8, b"x", db=lab.log)
    assert lab.check() == [
        "there are shards of the index that its head does not name",
        "there are rows in the log of the index that its head does not name",
    ]


def test_an_index_without_its_head_is_told(lab) -> None:
    with lab.env.write() as txn:
        txn.delete(HEAD_KEY, db=lab.shards)
    with pytest.raises(CatalogDamagedError, match="head of the index is missing"):
        lab.check()


def test_nothing_is_found_in_an_index_that_was_never_written(tmp_path) -> None:
    lab = IndexLab(tmp_path)
    with lab.read() as index:
        assert index.find(KEYS[:2]) == [(), ()]
        assert index.find([]) == []
        assert index.added_since(index.log_number, KEYS[:2]) == [(), ()]
    assert lab.check() == []
    lab.close()
