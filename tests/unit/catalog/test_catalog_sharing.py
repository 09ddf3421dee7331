"""Several owners on one path: unequal chunks, unequal capacities, many of them, and dead ones."""

import dataclasses
import logging

import pytest
from catalog_harness import MIB, Harness

from tierstore.catalog.catalog import Catalog
from tierstore.catalog.messages import Evict, Leave
from tierstore.config import SecondaryConfig
from tierstore.errors import CatalogError, ConfigError
from tierstore.manifest import Manifest
from tierstore.tier_events import Placed


def share(first, **options):
    """Open the path of a harness once more, on the same disk."""
    second = Harness(first.config.path, **options)
    second.disk = first.disk
    return second


def test_large_chunks_of_another_model_evict_nothing_while_there_is_room(tmp_path):
    small = Harness(tmp_path, capacity=192 * MIB, chunk=4096)
    for first in range(0, 6000, 200):
        assert isinstance(small.store(*range(first, first + 200)), Placed)
    large = share(small, capacity=192 * MIB, chunk=16 * MIB, model="large")
    for number in range(2):
        assert isinstance(large.store(number), Placed)
    assert all(small.located(*range(6000)))
    assert large.located(0, 1) == [True, True]
    assert small.catalog.stats().evicted_count == 0
    assert small.catalog.check() == []
    small.catalog.close()
    large.catalog.close()


def test_two_models_of_unequal_chunks_share_a_full_tier(tmp_path):
    small = Harness(tmp_path, capacity=48 * MIB, chunk=4096)
    large = share(small, capacity=48 * MIB, chunk=2 * MIB, model="large")
    for round_number in range(40):
        first = round_number * 200
        assert isinstance(small.store(*range(first, first + 200)), Placed)
        assert isinstance(large.store(round_number), Placed)
        large.check_capacity()
    assert small.catalog.check() == []
    assert all(small.located(*range(7800, 8000)))
    assert large.located(38, 39) == [True, True]
    stats = small.catalog.stats()
    assert stats.charged_bytes <= 48 * MIB
    assert stats.payload_bytes >= 0.7 * 48 * MIB
    small.catalog.close()
    large.catalog.close()


def leave(harness):
    harness.writer.handle([Leave()])
    harness.catalog.close()


def test_the_smallest_capacity_holds_as_long_as_its_owner_lives(tmp_path, caplog):
    large = Harness(tmp_path, capacity=48 * MIB)
    small = share(large, capacity=16 * MIB)
    (message,) = [m for m in caplog.messages if "different capacities" in m]
    assert str(16 * MIB) in message
    assert str(48 * MIB) in message
    number = 0
    for number in range(0, 600, 8):
        assert isinstance(large.store(*range(number, number + 8)), Placed)
        stats = large.catalog.stats()
        assert stats.charged_bytes <= 16 * MIB
    assert all(small.located(*range(number, number + 8)))
    kept = stats.record_count
    leave(small)
    for number in range(1000, 1600, 8):
        assert isinstance(large.store(*range(number, number + 8)), Placed)
    assert large.catalog.stats().record_count > 2 * kept
    assert large.catalog.check() == []
    large.catalog.close()


def test_the_capacity_of_a_killed_owner_holds_until_somebody_looks(tmp_path, caplog):
    large = Harness(tmp_path, capacity=48 * MIB)
    small = share(large, capacity=16 * MIB)
    assert large.catalog.budget().capacity_bytes == 16 * MIB
    small.catalog.close()  # without leaving
    large.clock.now += 60
    large.writer.handle([Evict()])
    assert large.catalog.budget().capacity_bytes == 48 * MIB
    assert caplog.record_tuples[0][1] == logging.WARNING
    large.catalog.close()


def test_an_lmdb_tier_is_not_shared_by_unequal_capacities(tmp_path):
    first = Harness(tmp_path, backend="lmdb", capacity=48 * MIB)
    with pytest.raises(ConfigError, match="the same capacity"):
        Harness(tmp_path, backend="lmdb", capacity=16 * MIB)
    leave(first)
    Harness(tmp_path, backend="lmdb", capacity=16 * MIB).catalog.close()


@pytest.mark.parametrize("capacity_mib", [16, 64])
@pytest.mark.parametrize("owner_count", [36, 64])
def test_many_owners_on_a_small_path_each_keep_and_find(tmp_path, owner_count, capacity_mib):
    capacity = capacity_mib * MIB
    harnesses = [Harness(tmp_path, capacity=capacity)]
    for _ in range(owner_count - 1):
        harnesses.append(share(harnesses[0], capacity=capacity))
    for round_number in range(3):
        for index, harness in enumerate(harnesses):
            number = 1000 * index + 2 * round_number
            assert isinstance(harness.store(number, number + 1), Placed)
            assert harness.located(number, number + 1) == [True, True]
    last = [
        harness.located(1000 * index + 4, 1000 * index + 5)
        for index, harness in enumerate(harnesses)
    ]
    kept = sum(map(sum, last))
    if capacity_mib == 64:
        assert harnesses[0].catalog.stats().evicted_count == 0
    assert kept == 2 * owner_count
    assert harnesses[0].catalog.check() == []
    for harness in harnesses:
        leave(harness)


def test_stored_again_is_used(harness):
    for first in range(0, 40, 8):
        harness.store(*range(first, first + 8))
    harness.store(2, 3, 4)
    assert harness.order()[-3:] == [4, 3, 2]
    number = 1000
    while harness.located(10, 11) == [True, True]:
        harness.store(*range(number, number + 8))
        number += 8
    assert harness.located(2, 3, 4) == [True, True, True], "hot, and evicted before cold ones"


def test_what_is_stored_again_is_not_evicted_for_what_comes_with_it(harness):
    """Goal: the oldest records, stored again as the head of a longer prefix, stay in place."""
    first = 0
    while not harness.catalog.stats().evicted_count:
        harness.store(*range(first, first + 8))
        first += 8
    oldest = harness.order()[:8][::-1]
    before = harness.catalog.locate(harness.keys(*oldest))
    answer = harness.store(*oldest, *range(10_000, 10_032))
    assert len(answer.keys) == 32
    assert harness.catalog.locate(harness.keys(*oldest)) == before
    assert all(harness.located(*range(10_000, 10_032)))
    assert harness.catalog.check() == []


def manifest_of(number, *, facts_bytes=8000):
    """Return a manifest of about so many bytes."""
    facts = {"padding": f"{number:04}" + "x" * facts_bytes}
    plain = Manifest.simple(f"model {number}", 65_536)
    return dataclasses.replace(plain, extra=tuple(facts.items()))


def test_manifests_are_forgotten_with_their_last_owner_and_record(tmp_path):
    for number in range(97):
        config = SecondaryConfig(name="t", backend="file", path=tmp_path, capacity_bytes=8 * MIB)
        Catalog.open(config, manifest_of(number), rank_count=1).close()
    harness = Harness(tmp_path)
    assert harness.row_count("namespaces") == 1
    assert isinstance(harness.store(*range(32)), Placed)
    harness.catalog.close()


def test_five_hundred_models_one_after_another_each_keep_and_find(tmp_path):
    disk = None
    for number in range(500):
        harness = Harness(tmp_path, manifest=manifest_of(number), disk=disk)
        harness.take()
        harness.release()
        disk = harness.disk
        assert isinstance(harness.store(*range(4)), Placed), f"model {number}"
        assert harness.located(*range(4)) == [True] * 4
        if number % 50 == 0:
            assert harness.catalog.check() == []
        assert harness.row_count("namespaces") <= 60
        stats = harness.catalog.stats()
        assert stats.charged_bytes <= 8 * MIB
        leave(harness)
    assert stats.record_count >= 40, "manifests took the place of records"


def test_manifests_of_models_that_left_cost_a_running_one_no_more_than_their_records(tmp_path):
    """Goal: manifests that fill the catalog go with their records, not at the next opening."""
    for number in range(40):
        harness = Harness(tmp_path, manifest=manifest_of(number))
        assert isinstance(harness.store(number), Placed)
        leave(harness)
    harness = Harness(tmp_path, manifest=manifest_of(1000), chunk=4096)
    for first in range(0, 400, 4):
        assert isinstance(harness.store(*range(first, first + 4)), Placed)
    assert harness.located(*range(400)) == [True] * 400
    assert harness.catalog.stats().evicted_count < 40
    assert harness.catalog.check() == []


def test_a_catalog_of_version_1_is_refused_by_name_and_kept(tmp_path):
    harness = Harness(tmp_path)
    harness.store(1)
    with harness.catalog._env.write() as txn:
        row = txn.get(b"state", db=harness.catalog._databases.state)
        version_1 = (1).to_bytes(8, "little") + row[8:-8]
        txn.put(b"state", version_1, db=harness.catalog._databases.state)
    harness.catalog.close()
    for _ in range(2):
        with pytest.raises(CatalogError, match=r"version 1, .* remove the directory"):
            Harness(tmp_path)
    assert (tmp_path / "catalog" / "data.mdb").stat().st_size > 4 * 4096
