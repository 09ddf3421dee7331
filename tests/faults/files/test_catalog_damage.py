"""A damaged catalog starts anew: the bytes that no row names come back, within the capacity."""

import pytest
from store_kit import MIB, Chunks, config_of, du, misses

from tierstore.catalog.pages.state import find_state, write_state
from tierstore.catalog.rows import Databases
from tierstore.device.directory import Directory
from tierstore.lmdb_env.env import LmdbEnv
from tierstore.lmdb_env.seal import seal

NUMBERS = range(500)
NEW = range(1000, 1500)
FEW = range(2000, 2100)
DISCARDED = 'discarded_catalogs_total{tier="disk"}'


@pytest.fixture
def chunks():
    return Chunks(65_536)


@pytest.fixture(params=["file", "lmdb"])
def stored(tmp_path, chunks, request):
    """A tier of 24 MiB, full; closed in order."""
    config = config_of(tmp_path / "tier", backend=request.param, primary="2MiB", capacity="24MiB")
    with chunks.open(config) as store:
        chunks.put(store, NUMBERS)
    return config


def flip(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def damage_every_page(path, at):
    for page in range(2, path.stat().st_size // 4096):
        flip(path, page * 4096 + at)


def test_a_damaged_catalog_starts_anew_and_fills_its_capacity_again(tmp_path, chunks, stored):
    path = tmp_path / "tier"
    damage_every_page(path / "catalog" / "data.mdb", 0)
    with chunks.open(stored) as store:
        assert store.stats().counters[DISCARDED] == 1
        assert chunks.found(store, NUMBERS) == []
        for start in range(0, len(NEW), 20):
            chunks.put(store, NEW[start : start + 20])
            store.flush()
            assert du(path) <= 24 * MIB
        assert store.check() == []
        kept = store.stats().secondary["disk"].payload_bytes
    assert kept >= 0.6 * 24 * MIB, "the bytes of the lost records did not come back"
    with chunks.open(stored) as store:
        assert DISCARDED not in store.stats().counters
        assert len(chunks.found(store, NEW)) * chunks.chunk_bytes >= kept
        assert du(path) <= 24 * MIB


def test_a_flipped_bit_that_only_free_pages_hold_costs_nothing(tmp_path, chunks, stored):
    data = tmp_path / "tier" / "catalog" / "data.mdb"
    content = data.read_bytes()
    with chunks.open(stored) as store:
        found = chunks.found(store, NUMBERS)
    # Values in the unused part of a leaf, or in a free page: no tree leads there.
    changed = 0
    for page in range(2, len(content) // 4096):
        head = data.read_bytes()[page * 4096 : page * 4096 + 16]
        lower, upper = int.from_bytes(head[12:14], "little"), int.from_bytes(head[14:16], "little")
        if head[10] == 2 and upper - lower > 64:
            flip(data, page * 4096 + lower + 32)
            changed += 1
    assert changed
    with chunks.open(stored) as store:
        assert DISCARDED not in store.stats().counters
        assert chunks.found(store, NUMBERS) == found
        assert store.check() == []


@pytest.fixture(params=["file", "lmdb"])
def roomy(tmp_path, chunks, request):
    """A tier with room, that holds a few chunks; closed in order."""
    config = config_of(tmp_path / "tier", backend=request.param, primary="2MiB", capacity="24MiB")
    with chunks.open(config) as store:
        chunks.put(store, FEW[:20])
    return config


def damage_count_of_owners(directory, count_at):
    """Make a count enormous that the library keeps of the database of owners.

    Nobody has the path open, so that it is empty, and has no page that would contradict.
    """
    data = directory / "data.mdb"
    content = bytearray(data.read_bytes())
    rows = [at for at in range(len(content)) if content.startswith(b"owners", at)]
    assert rows
    for row in rows:  # that in use, and older ones in pages that are free
        content[row + len(b"owners") + count_at + 7] ^= 0x80
    data.write_bytes(content)


def is_in_use(roomy, chunks):
    """Return whether a tier stores what it is given, and finds it again."""
    for numbers in (NEW[:20], NEW[20:40]):
        with chunks.open(roomy) as store:
            chunks.put(store, numbers)
            store.flush()
            assert store.check() == []
    with chunks.open(roomy) as store:
        return chunks.found(store, NEW[:40]) == list(NEW[:40])


@pytest.mark.parametrize("count_at", range(8, 40, 8))
def test_a_damaged_page_count_of_an_empty_database_leaves_the_tier_in_use(
    tmp_path, chunks, roomy, count_at
):
    damage_count_of_owners(tmp_path / "tier" / "catalog", count_at)
    assert is_in_use(roomy, chunks)


@pytest.mark.parametrize("count_at", [8, 16, 24])
def test_a_damaged_page_count_that_was_sealed_leaves_the_tier_in_use(
    tmp_path, chunks, roomy, count_at
):
    """Who opened it before this was looked for has closed it in order."""
    path = tmp_path / "tier" / "catalog"
    damage_count_of_owners(path, count_at)
    with Directory.open(path) as directory:
        seal(directory)
    assert is_in_use(roomy, chunks)


def test_rows_that_contradict_each_other_start_anew(tmp_path, chunks, stored):
    # Nothing is wrong with the structure of the file, and it was sealed afterwards.
    env = LmdbEnv.open(tmp_path / "tier" / "catalog", map_bytes=1 << 24, sealed=True)
    databases = Databases(env)
    with env.write() as txn:
        state = find_state(txn, databases)
        state.charged_pages -= 1000
        write_state(txn, databases, state)
    env.close()
    with chunks.open(stored) as store:
        assert store.stats().counters[DISCARDED] == 1
        assert chunks.found(store, NUMBERS) == []
        assert chunks.put(store, FEW) == len(FEW)
        assert store.check() == []


def test_damage_that_comes_to_light_later_is_mended_at_the_next_opening(tmp_path, chunks, stored):
    env = LmdbEnv.open(tmp_path / "tier" / "catalog", map_bytes=1 << 24, sealed=True)
    databases = Databases(env)
    with env.write() as txn, txn.cursor(db=databases.order) as cursor:
        assert cursor.first()
        cursor.delete()
    env.close()
    with chunks.open(stored) as store:
        found = chunks.found(store, NUMBERS)
        assert found
        assert store.check() != []
        assert chunks.found(store, NUMBERS) == found, "what is recorded is served still"
        assert DISCARDED not in store.stats().counters
    with chunks.open(stored) as store:
        assert store.stats().counters[DISCARDED] == 1
        assert chunks.put(store, FEW) == len(FEW)
        assert store.check() == []
    with chunks.open(stored) as store:
        assert chunks.found(store, FEW) == list(FEW)


def test_a_damaged_payload_environment_is_a_counted_miss(tmp_path, chunks):
    config = config_of(tmp_path / "tier", backend="lmdb")
    with chunks.open(config) as store:
        chunks.put(store, FEW)
    data = tmp_path / "tier" / "rank0" / "payload" / "data.mdb"
    damage_every_page(data, 10)
    with chunks.open(config) as store:
        assert chunks.found(store, FEW) == []
        assert misses(store) == {"absent": len(FEW)}
        assert store.check() == []
        assert chunks.put(store, FEW) == len(FEW)
    with chunks.open(config) as store:
        assert chunks.found(store, FEW) == list(FEW)


def test_a_cluster_row_of_a_wrong_length_hides_its_records_alone(tmp_path, chunks):
    config = config_of(tmp_path / "tier")
    parts = [FEW[:40], FEW[40:60], FEW[60:]]
    with chunks.open(config) as store:
        for part in parts:
            chunks.put(store, part)
            store.flush()
    env = LmdbEnv.open(tmp_path / "tier" / "catalog", map_bytes=1 << 24, sealed=True)
    with env.write(Databases(env).clusters) as txn:
        rows = list(txn.cursor())
        named = [key for key, row in rows if chunks.keys(parts[1])[0] in row]
        for key in named:
            txn.put(key, txn.get(key)[:-1])
    env.close()
    assert 0 < len(named) < len(rows)
    with chunks.open(config) as store:
        found = chunks.found(store, FEW)
        assert not set(found) & {parts[1][0]}
        assert len(found) > len(FEW) // 2
        assert DISCARDED not in store.stats().counters
    with chunks.open(config) as store:
        assert store.stats().counters[DISCARDED] == 1
        assert chunks.put(store, FEW) == len(FEW)
        assert store.check() == []


def test_a_removed_catalog_gives_its_bytes_back(tmp_path, chunks, stored):
    for name in ("data.mdb", "lock.mdb", "seal.bin"):
        (tmp_path / "tier" / "catalog" / name).unlink()
    with chunks.open(stored) as store:
        chunks.put(store, NEW)
        assert store.check() == []
        assert DISCARDED not in store.stats().counters
    assert du(tmp_path / "tier") <= 24 * MIB
    with chunks.open(stored) as store:
        assert len(chunks.found(store, NEW)) > 0.6 * 24 * MIB / chunks.chunk_bytes
