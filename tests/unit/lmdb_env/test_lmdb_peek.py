"""A row that is read without the library: what the library would read, or nothing."""

import os
import random

import pytest
from lmdb_images import open_env

from tierstore.lmdb_env.peek import peek_row
from tierstore.testing.spread import spread_hashes

KEYS = spread_hashes(range(3000))
"""So many that their tree has branches."""


@pytest.fixture
def data(tmp_path):
    env = open_env(tmp_path)
    databases = [env.open_db(name) for name in (b"few", b"many", b"none")]
    with env.begin(write=True) as txn:
        txn.put(b"key", b"value", db=databases[0])
        for key in KEYS:
            txn.put(key, key[::-1], db=databases[1])
        assert txn.stat(db=databases[1])["depth"] > 1
    env.close()
    return tmp_path / "data.mdb"


def peek(data, database, key):
    descriptor = os.open(data, os.O_RDONLY)
    try:
        return peek_row(descriptor, database, key)
    finally:
        os.close(descriptor)


def test_a_row_is_found_and_what_is_not_there_is_not(data):
    assert peek(data, b"few", b"key") == b"value"
    assert [peek(data, b"many", key) for key in KEYS[::50]] == [key[::-1] for key in KEYS[::50]]
    assert peek(data, b"few", KEYS[0]) is None
    assert peek(data, b"none", b"key") is None
    assert peek(data, b"another", b"key") is None
    data.write_bytes(b"")
    assert peek(data, b"few", b"key") is None


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_file_has_no_row_or_another_value(data, seed):
    """Method: bits flip in any page, often in the meta pages; each file has one more."""
    dice = random.Random(seed)
    content = bytearray(data.read_bytes())
    for _ in range(100):
        end = dice.choice([256, 4096 + 256, len(content)])
        content[dice.randrange(end)] ^= 1 << dice.randrange(8)
        data.write_bytes(content)
        for database, key in ((b"few", b"key"), (b"many", KEYS[1])):
            assert isinstance(peek(data, database, key), bytes | None)
