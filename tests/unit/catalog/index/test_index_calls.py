"""How often the library is called, as each call gives the interpreter away."""

import pytest
from index_lab import CountedCalls, IndexLab, key_of

from tierstore.catalog.index.cache import IndexBounds
from tierstore.catalog.index.index import Index

CLUSTER = 128


def keys_of(cluster):
    return [key_of(number) for number in range(cluster * CLUSTER, (cluster + 1) * CLUSTER)]


@pytest.fixture
def lab(tmp_path):
    lab = IndexLab(tmp_path, bounds=IndexBounds(), cache_count=2)
    for first in range(0, 512, 64):
        lab.change([(cluster, keys_of(cluster), True) for cluster in range(first, first + 64)])
    yield lab
    lab.close()


def test_a_thousand_keys_are_found_by_as_few_calls_as_one(lab) -> None:
    many = [key for cluster in range(0, 512, 16) for key in keys_of(cluster)]
    with lab.read() as index:
        index.find(many)
    for keys in (many[:1], many, [b"absent" + key for key in many]):
        with lab.env.read() as raw:
            txn = CountedCalls(raw)
            Index(txn, lab, lab.caches[0]).find(keys)
        assert txn.calls == {"get": 1}


def test_what_another_process_changed_is_read_by_row_and_by_shard(lab) -> None:
    keys = keys_of(3)
    with lab.read(1) as index:
        index.find(keys)
    for cluster in range(1000, 1003):
        lab.change([(cluster, keys_of(cluster), True)])
    with lab.env.read() as raw:
        txn = CountedCalls(raw)
        index = Index(txn, lab, lab.caches[1])
        assert index.added_since(index.log_number - 3, keys_of(1001)) == [(1001,)] * CLUSTER
        assert txn.calls == {"get": 4}  # the head, and three rows
        assert index.find(keys_of(1001)) == [(1001,)] * CLUSTER
        assert txn.calls["get"] <= 4 + lab.row_counts()[0]


def test_a_write_transaction_writes_a_row_the_head_and_a_few_shards(lab) -> None:
    counts = []
    for step in range(60):
        with lab.env.write() as raw:
            txn = CountedCalls(raw)
            index = Index(txn, lab, lab.caches[0])
            for cluster in range(8):
                index.remove(step * 8 + cluster, keys_of(step * 8 + cluster))
                index.add(2000 + step * 8 + cluster, keys_of(2000 + step * 8 + cluster))
            assert txn.calls == {}
            index.flush()
        counts.append(sum(txn.calls.values()))
    assert max(counts) <= 16
    assert sum(counts) / len(counts) <= 8


def test_what_changes_nothing_calls_nothing(lab) -> None:
    with lab.env.write() as raw:
        txn = CountedCalls(raw)
        index = Index(txn, lab, lab.caches[0])
        index.add(1, [])
        index.remove(2, [])
        index.flush()
    assert txn.calls == {}


def test_the_log_stays_short_however_small_transactions_are(tmp_path) -> None:
    bounds = IndexBounds(shard_entries_max=64, log_ops_min=256, row_ops_min=8)
    lab = IndexLab(tmp_path, bounds=bounds)
    longest = 0
    for number in range(600):
        lab.change([(number, [key_of(number)], True)])
        longest = max(longest, lab.row_counts()[1])
    assert 16 <= longest <= 2 * 256 // 8
    assert lab.check() == []
    lab.close()


def test_shards_in_memory_are_bounded_and_found_all_the_same(lab) -> None:
    cache = lab.caches[0] = lab.new_cache(bytes_max=300_000)
    for cluster in range(0, 512, 7):
        with lab.read() as index:
            assert index.find(keys_of(cluster)) == [(cluster,)] * CLUSTER
        assert cache.size_bytes <= 300_000
    assert cache.size_bytes > 0


def test_a_snapshot_older_than_the_log_in_memory_reads_its_own(lab) -> None:
    reading = lab.env.read()
    index = Index(reading.__enter__(), lab, lab.caches[0])
    for step in range(40):
        clusters = range(step * 12, step * 12 + 12)
        lab.change([(cluster, keys_of(cluster), False) for cluster in clusters])
        lab.change([(9000 + cluster, keys_of(cluster), True) for cluster in clusters])
        with lab.read() as newer:
            assert newer.find(keys_of(step * 12)) == [(9000 + step * 12,)] * CLUSTER
    for cluster in range(0, 512, 5):
        assert index.find(keys_of(cluster)) == [(cluster,)] * CLUSTER
    reading.__exit__(None, None, None)
    with lab.read() as newer:
        assert newer.find(keys_of(1)) == [(9001,)] * CLUSTER
