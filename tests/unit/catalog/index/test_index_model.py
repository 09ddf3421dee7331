"""The index beside a model, in random transactions of several processes."""

import random
from contextlib import suppress

import pytest
from index_lab import IndexLab, colliding_hashes, key_of

from tierstore.catalog.index.cache import IndexBounds
from tierstore.catalog.index.hashes import hash_keys

STEP_COUNT = 250
KEYS = [key_of(number) for number in range(600)]


@pytest.mark.parametrize("hashing", [hash_keys, colliding_hashes])
@pytest.mark.parametrize("seed", range(6))
def test_random_transactions_of_several_processes_are_found_by_all(tmp_path, seed, hashing) -> None:
    """Three caches on one environment; some transactions abort, some readers stay behind.

    The set of keys grows, and shrinks to nothing, so that shards are split and joined.
    """
    chance = random.Random(seed)
    print(f"seed {seed}")
    lab = IndexLab(tmp_path, hashing=hashing, cache_count=3)
    snapshots = []
    try:
        for step in range(STEP_COUNT):
            is_shrinking = step % 100 >= 60
            ops = list(random_ops(chance, lab.living, is_shrinking=is_shrinking))
            lab.change(ops, chance.randrange(3), aborts=chance.random() < 0.15)
            which = chance.randrange(3)
            with lab.read(which) as index:
                lab.assert_finds(index, lab.living, chance.sample(KEYS, 100))
            if chance.random() < 0.2 and len(snapshots) < 4:
                reading = lab.read(chance.randrange(3))
                snapshots.append((reading, reading.__enter__(), dict(lab.living)))
            if snapshots and chance.random() < 0.2:
                reading, index, living = snapshots.pop(chance.randrange(len(snapshots)))
                lab.assert_finds(index, living, chance.sample(KEYS, 200))
                reading.__exit__(None, None, None)
            if step % 10 == 0:
                assert lab.check() == []
    finally:
        for reading, _, _ in snapshots:
            reading.__exit__(None, None, None)
        lab.close()


def random_ops(chance, living, *, is_shrinking):
    now = {key: list(clusters) for key, clusters in living.items()}
    for _ in range(chance.randrange(1, 6)):
        cluster = chance.randrange(1, 12) << 32 | chance.randrange(4)
        if is_shrinking and chance.random() < 0.8:
            keys = [key for key, clusters in now.items() if cluster in clusters]
            for key in keys:
                now[key].remove(cluster)
            yield cluster, keys, False
        else:
            keys = chance.sample(KEYS, chance.randrange(1, 40))
            for key in keys:
                now.setdefault(key, []).append(cluster)
            yield cluster, keys, True


def test_a_transaction_sees_its_own_changes_before_and_after_it_wrote_them(tmp_path) -> None:
    chance = random.Random(5)
    lab = IndexLab(tmp_path)
    for _ in range(60):
        living = {key: list(clusters) for key, clusters in lab.living.items()}
        with lab.write() as index:
            for op in random_ops(chance, lab.living, is_shrinking=chance.random() < 0.5):
                lab.apply(living, index, *op)
                lab.assert_finds(index, living, chance.sample(KEYS, 60))
                if chance.random() < 0.3:
                    index.flush()
                    lab.assert_finds(index, living, chance.sample(KEYS, 60))
            index.flush()
        lab.living = living
    assert lab.check() == []
    lab.close()


def test_what_was_added_since_a_row_is_told_or_not_known_any_more(tmp_path) -> None:
    chance = random.Random(7)
    lab = IndexLab(tmp_path, cache_count=2)
    history = []
    known_count = 0
    for step in range(150):
        with lab.read(step % 2) as index:
            history.append((index.log_number, {k: list(v) for k, v in lab.living.items()}))
        added = [(cluster, keys, True) for cluster, keys in fresh_ops(chance, step)]
        lab.change(added, step % 2)
        number, living = chance.choice(history[-8:])
        with lab.read(step % 2) as index:
            keys = chance.sample(KEYS, 100)
            answers = index.added_since(number, keys)
        if answers is not None:
            known_count += 1
            for key, found in zip(keys, answers, strict=True):
                new = lab.living.get(key, [])[len(living.get(key, [])) :]
                assert found == tuple(reversed(new))
    assert known_count > 20
    with lab.read() as index:
        assert index.added_since(0, KEYS[:3]) is None
        assert index.added_since(index.log_number + 1, KEYS[:3]) is None
    lab.close()


def fresh_ops(chance, step):
    yield step << 32 | 1, chance.sample(KEYS, chance.randrange(1, 20))


def test_candidates_come_with_the_youngest_first(tmp_path) -> None:
    lab = IndexLab(tmp_path)
    for cluster in (9, 3, 7, 8, 1, 2):
        lab.change([(cluster, KEYS[:40], True)])
    lab.change([(7, KEYS[:20], False)])
    with lab.read() as index:
        found = index.find(KEYS[:41])
    assert found == [(2, 1, 8, 3, 9)] * 20 + [(2, 1, 8, 7, 3, 9)] * 20 + [()]
    lab.close()


def test_a_place_that_is_used_again_in_one_transaction_is_found(tmp_path) -> None:
    lab = IndexLab(tmp_path)
    lab.change([(5, KEYS[:10], True)])
    lab.change([(5, KEYS[:10], False), (5, KEYS[:10], True)])
    lab.change([(6, KEYS[:10], True), (6, KEYS[:10], False)])
    with lab.read() as index:
        assert index.find(KEYS[:10]) == [(5,)] * 10
    assert lab.check() == []
    lab.close()


def test_it_grows_to_a_million_records_and_shrinks_to_nothing(tmp_path) -> None:
    lab = IndexLab(tmp_path, bounds=IndexBounds())
    count, at_once = 1 << 20, 1 << 15
    for first in range(0, count, at_once):
        with lab.write() as index:
            for cluster in range(first, first + at_once, 128):
                index.add(cluster, [key_of(number) for number in range(cluster, cluster + 128)])
            index.flush()
    numbers = random.Random(1).sample(range(count), 5000)
    with lab.read() as index:
        found = index.find([key_of(number) for number in numbers])
        assert found == [(number & ~127,) for number in numbers]
        assert not any(index.find([key_of(count + number) for number in numbers]))
    shard_count, log_count = lab.row_counts()
    assert 64 < shard_count < 256
    assert log_count <= 8
    for first in range(0, count, at_once):
        with lab.write() as index:
            for cluster in range(first, first + at_once, 128):
                index.remove(cluster, [key_of(number) for number in range(cluster, cluster + 128)])
            index.flush()
    for _ in range(40):
        lab.change([(1, KEYS[:500], True)])
        lab.change([(1, KEYS[:500], False)])
    assert lab.row_counts()[0] < 32
    assert lab.check() == []
    lab.close()


@pytest.mark.parametrize("later_count", [1, 2, 3])
def test_what_a_transaction_read_of_itself_is_forgotten_when_it_aborts(
    tmp_path, later_count
) -> None:
    """Another index of the same transaction reads what the first one wrote."""
    lab = IndexLab(tmp_path, cache_count=2)
    lab.change([(1, KEYS[:8], True)])
    with suppress(ZeroDivisionError), lab.env.write() as txn:
        first = lab.index_of(txn, lab.caches[0])
        first.add(2, KEYS[10:20])
        first.flush()
        assert lab.index_of(txn, lab.caches[0]).find(KEYS[10:20]) == [(2,)] * 10
        _ = 1 // 0
    for number in range(later_count):
        lab.change([(3 + number, KEYS[10 + number : 15 + number], True)], 1)
    with lab.read() as index:
        lab.assert_finds(index, lab.living, KEYS[:30])
    lab.close()
