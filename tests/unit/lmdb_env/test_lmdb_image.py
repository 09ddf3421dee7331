"""The verifier of LMDB data files: silent about all that the library writes, loud about damage."""

import os
import random
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmdb_images import PAGE, Image, open_env, verdict, write_image

from tierstore.lmdb_env.image import image_bytes
from tierstore.lmdb_env.page import DB_DTYPE, META_DTYPE

BRANCH, LEAF, OVERFLOW = 1, 2, 4
SIZES = st.sampled_from([0, 3, 60, 700, 2000, 5000, 40_000])
STEPS = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 2), SIZES), max_size=120)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=6), st.integers(0, 1 << 32))
def test_nothing_that_the_library_writes_is_damage(tmp_path_factory, transactions, seed):
    path = tmp_path_factory.mktemp("env")
    dice = random.Random(seed)
    env = open_env(path)
    databases = [None, env.open_db(b"first"), env.open_db(b"second")]
    assert verdict(path) == ""
    for steps in transactions:
        with env.begin(write=True) as txn:
            for number, database, size in steps:
                # Keys of the main database must not be the names of others.
                key = number.to_bytes(3, "big") * (1 + number % 50)
                if dice.random() < 0.6:
                    txn.put(key, dice.randbytes(size), db=databases[database])
                else:
                    txn.delete(key, db=databases[database])
        assert verdict(path) == ""
    env.close()
    assert verdict(path) == ""
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    path = tmp_path_factory.mktemp("image")
    write_image(path)
    return path


def meta_at(image, field):
    return image.current * PAGE + META_DTYPE.fields[field][1]


def db_at(field):
    return DB_DTYPE.fields[field][1]


DAMAGE = {
    "magic of a meta page": (lambda i: (16, 0, 4), "page 0: meta page"),
    "format of a meta page": (lambda i: (PAGE + 20, 3, 4), "page 1: meta page"),
    "page size": (lambda i: (meta_at(i, "free"), 8192, 4), "meta page"),
    "parity of a transaction": (
        lambda i: (meta_at(i, "transaction"), int(i.meta["transaction"]) + 1, 8),
        "meta page",
    ),
    "number of a transaction that nobody can reach": (
        lambda i: (meta_at(i, "transaction") + 7, 251, 1),
        "meta page",
    ),
    "last page": (lambda i: (meta_at(i, "last_page"), 1 << 40, 8), "last page"),
    "last page a little later": (
        lambda i: (meta_at(i, "last_page"), int(i.meta["last_page"]) + 1, 8),
        "without a purpose",
    ),
    "last page before pages in use": (lambda i: (meta_at(i, "last_page"), 3, 8), "beyond"),
    "flags of the free list": (
        lambda i: (meta_at(i, "free") + db_at("flags"), 12, 2),
        "database free: flags",
    ),
    "root": (lambda i: (meta_at(i, "main") + db_at("root"), 1, 8), "beyond the last page"),
    "depth": (lambda i: (meta_at(i, "main") + db_at("depth"), 2, 2), "page header"),
    "no depth": (lambda i: (meta_at(i, "main") + db_at("depth"), 0, 2), "depth"),
    "entries": (lambda i: (i.row_at + db_at("entries"), 1 << 20, 8), "entries is 1048576"),
    "branches": (lambda i: (i.rows_at + db_at("branch_pages"), 7, 8), "branch_pages is 7"),
    "flags of a database": (lambda i: (i.row_at + db_at("flags"), 4, 2), "large: flags"),
    "two trees share pages": (
        lambda i: (i.row_at + db_at("root"), i.main_page, 8),
        "two purposes",
    ),
    "number of a page": (lambda i: (i.leaf * PAGE, i.leaf + 1, 8), "page header"),
    "a dirty page": (lambda i: (i.leaf * PAGE + 10, LEAF | 16, 2), "page header"),
    "a leaf that says it is a branch": (lambda i: (i.leaf * PAGE + 10, BRANCH, 2), "page header"),
    "lower": (lambda i: (i.leaf * PAGE + 12, 14, 2), "page header"),
    "upper": (lambda i: (i.leaf * PAGE + 14, 4098, 2), "page header"),
    "upper a little lower": (
        lambda i: (i.leaf * PAGE + 14, int(i.u32(i.leaf * PAGE + 12) >> 16) - 2, 2),
        "space of its nodes",
    ),
    "offset of a node": (lambda i: (i.leaf * PAGE + 16, 4094, 2), "node offset"),
    "two nodes in one place": (
        lambda i: (i.leaf * PAGE + 16, int(i.u32(i.leaf * PAGE + 16) >> 16), 2),
        "node",
    ),
    "another node in the place of the lowest": (
        lambda i: (
            i.leaf * PAGE + 16 + 2 * i.offsets.index(min(i.offsets)),
            max(i.offsets),
            2,
        ),
        "space of its nodes",
    ),
    "size of a node": (lambda i: (i.node, 38, 2), "space of its nodes"),
    "huge node": (lambda i: (i.node + 2, 1, 2), "node"),
    "flags of a node": (lambda i: (i.node + 4, 4, 2), "node"),
    "named database in a named one": (lambda i: (i.node + 4, 2, 2), "database"),
    "key without bytes, value larger": (lambda i: (i.node, 48, 8), "node"),
    "odd lower": (lambda i: (i.leaf * PAGE + 12, int(i.u32(i.leaf * PAGE + 12)) + 1, 4), "header"),
    "odd offset": (
        lambda i: (i.leaf * PAGE + 16, int(i.u32(i.leaf * PAGE + 16)) + 1, 4),
        "node offset",
    ),
    "child": (lambda i: (i.first_child, 1 << 30, 4), "beyond the last page"),
    "high bits of a child": (lambda i: (i.first_child + 4, 1, 2), "beyond the last page"),
    "a child twice": (lambda i: (i.first_child, i.next_leaf, 4), "two purposes"),
    "page of an overflow run": (lambda i: (i.big_node + 16, i.run + 1, 8), "overflow run"),
    "number of an overflow run": (lambda i: (i.run * PAGE, 0, 8), "head of an overflow run"),
    "flags of an overflow run": (lambda i: (i.run * PAGE + 10, 20, 2), "head of an overflow run"),
    "overflow run too short": (lambda i: (i.run * PAGE + 12, 2, 4), "head of an overflow run"),
    "overflow run over others": (lambda i: (i.run * PAGE + 12, 6, 4), "two purposes"),
    "overflow run beyond the end": (lambda i: (i.run * PAGE + 12, 1 << 31, 4), "head of an"),
    "bytes of an overflow value": (lambda i: (i.big_node, 20_000, 4), "head of an overflow run"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_named(tmp_path, image, name):
    where, words = DAMAGE[name]
    copy = Image(image, tmp_path)
    assert verdict(tmp_path) == ""
    assert words in copy.verdict_after(*where(copy))


@pytest.mark.parametrize("change", ["beyond", "used", "order", "count", "fewer", "transaction"])
def test_damage_of_the_list_of_free_pages_is_found(tmp_path, image, change):
    copy = Image(image, tmp_path)
    leaf = copy.free_leaf * PAGE
    node = leaf + int(copy.u32(leaf + 16) & 0xFFFF)
    assert copy.u32(node) >= 24, "the list has two pages at least"
    key, count, first = node + 8, node + 16, node + 24
    at, value, width = {
        "beyond": (first, 1 << 40, 8),
        "used": (first, copy.main_page, 8),
        "order": (first, copy.u64(first + 8) | copy.u64(first) << 64, 16),
        "count": (count, copy.u64(count) + 1, 8),
        "fewer": (count, copy.u64(count) - 1, 8),
        "transaction": (key, 1 << 50, 8),
    }[change]
    assert copy.verdict_after(at, value, width) != ""


@pytest.mark.parametrize("at", [0, 1, 7])
@pytest.mark.parametrize("bit", [0x01, 0x80])
def test_damage_of_a_branch_of_the_list_of_free_pages_is_found(tmp_path, at, bit):
    """By the branches the library searches for what it frees and takes; it would fail for good."""
    env = open_env(tmp_path)
    reader = env.begin()  # nothing that is freed is used again
    for number in range(300):
        with env.begin(write=True) as txn:
            txn.put(b"%d" % number, bytes(600))
    reader.abort()
    env.close()
    assert verdict(tmp_path) == ""
    data = tmp_path / "data.mdb"
    content = bytearray(data.read_bytes())
    metas = [np.frombuffer(content, META_DTYPE, 1, start)[0] for start in (0, PAGE)]
    free = max(metas, key=lambda meta: int(meta["transaction"]))["free"]
    assert free["depth"] > 1, "the list has a branch"
    root = int(free["root"]) * PAGE
    second = root + int.from_bytes(content[root + 18 : root + 20], "little")
    content[second + 8 + at] ^= bit
    data.write_bytes(content)
    assert "free list" in verdict(tmp_path)


@pytest.mark.parametrize("field", [name for name in DB_DTYPE.names if name != "pad"])
def test_damage_of_the_row_of_an_empty_database_is_found(tmp_path, field):
    """What the library counts of a tree is believed, also of one without pages."""
    env = open_env(tmp_path)
    env.open_db(b"empty")
    env.close()
    data = tmp_path / "data.mdb"
    content = data.read_bytes()
    row_at = content.rindex(b"empty") + len(b"empty")
    at = row_at + db_at(field)
    for byte in range(at, at + DB_DTYPE.fields[field][0].itemsize):
        for bit in range(8):
            changed = bytearray(content)
            changed[byte] ^= 1 << bit
            data.write_bytes(changed)
            assert "empty" in verdict(tmp_path), (byte - at, bit)
    data.write_bytes(content)
    assert verdict(tmp_path) == ""


def test_a_truncated_file_is_damaged(tmp_path, image):
    copy = Image(image, tmp_path)
    last = max(copy.run, copy.leaf, copy.main_page)
    os.truncate(tmp_path / "data.mdb", last * PAGE)
    assert "beyond the end of the file" in verdict(tmp_path)


@pytest.mark.parametrize("bytes_max", [1000, 5 * PAGE])
def test_a_read_that_stops_early_is_no_damage(monkeypatch, image, bytes_max):
    """A kernel may return less than it is asked for, anywhere, and nothing at all once."""
    reads = []
    read, read_into = os.pread, os.preadv

    def stops(fd, buffers, offset):
        reads.append(offset)
        if len(reads) % 3 == 0:
            return 0
        return read_into(fd, [buffers[0][:bytes_max]], offset)

    monkeypatch.setattr(os, "pread", lambda fd, size, at: read(fd, min(size, bytes_max), at))
    monkeypatch.setattr(os, "preadv", stops)
    assert verdict(image) == ""
    assert len(reads) >= 3


def test_a_read_that_always_stops_early_says_nothing_of_the_file(monkeypatch, image):
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(OSError, match="stop before the end"):
        verdict(image)


@pytest.mark.parametrize("number", [0, 1])
def test_only_the_younger_meta_page_says_how_large_a_file_is(tmp_path, image, number):
    copy = Image(image, tmp_path)
    size_bytes = (int(copy.meta["last_page"]) + 1) * PAGE
    older = (1 - copy.current) * PAGE + META_DTYPE.fields["last_page"][1]
    assert copy.verdict_after(older + number, 0x80, 1) == ""
    with (tmp_path / "data.mdb").open("rb") as file:
        assert image_bytes(file.fileno()) == size_bytes


def test_bits_that_only_data_and_free_pages_hold_are_not_structure(tmp_path, image):
    copy = Image(image, tmp_path)
    value = copy.node + 8 + 8
    assert copy.verdict_after(value, 0, 1) == ""
    assert copy.verdict_after((copy.run + 1) * PAGE, 0, 8) == ""


def test_an_empty_file_is_a_new_one_and_one_of_another_format_is_damage(tmp_path):
    (tmp_path / "data.mdb").write_bytes(b"")
    assert verdict(tmp_path) == ""
    (tmp_path / "data.mdb").write_bytes(b"x" * 65_536)
    assert verdict(tmp_path) != ""


@pytest.mark.parametrize("seed", range(4))
def test_no_bit_that_flips_makes_the_verifier_fail(tmp_path, image, seed):
    dice = random.Random(seed)
    content = bytearray((image / "data.mdb").read_bytes())
    found = 0
    for _ in range(150):
        page = dice.randrange(len(content) // PAGE)
        at, bit = page * PAGE + dice.randrange(dice.choice([24, 64, PAGE])), dice.randrange(8)
        content[at] ^= 1 << bit
        (tmp_path / "data.mdb").write_bytes(content)
        found += verdict(tmp_path) != ""
        content[at] ^= 1 << bit
    assert 10 < found < 140
