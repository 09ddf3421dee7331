"""Damage on disk is a miss with a counted reason: never wrong bytes, never an exception."""

import random
import shutil

import pytest
from store_kit import Chunks, config_of, misses

from tierstore import Manifest, TierStore
from tierstore.errors import ManifestError

NUMBERS = range(100)


@pytest.fixture
def chunks():
    return Chunks(65_536)


@pytest.fixture
def config(tmp_path):
    return config_of(tmp_path / "tier")


@pytest.fixture
def stored(chunks, config):
    with chunks.open(config) as store:
        assert chunks.put(store, NUMBERS) == len(NUMBERS)
    return config


def segment_files(tmp_path):
    files = sorted((tmp_path / "tier" / "rank0").glob("*.seg"))
    assert len(files) >= 2, "the test needs several segments"
    return files


def flip_bit(path, offset, bit=0):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


def test_one_flipped_bit_costs_the_record_that_it_hit_and_no_other(tmp_path, chunks, stored):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    path = segment_files(tmp_path)[0]
    page_count = path.stat().st_size // 4096
    damaged = 0
    for _ in range(12):
        flip_bit(
            path, dice.randrange(1, page_count) * 4096 + dice.randrange(4096), dice.randrange(8)
        )
        with chunks.open(stored) as store:
            found = chunks.found(store, NUMBERS)
            counted = misses(store)
            lost = set(NUMBERS) - set(found)
            # A bit behind the last extent of the segment is nobody's.
            assert len(lost) == sum(counted.values()) <= 1, (lost, counted)
            assert set(counted) <= {"corrupt"}
            damaged += len(lost)
            assert store.check() == []
            assert chunks.put(store, sorted(lost)) == len(lost)
    assert damaged >= 6, "hardly a flip hit a record: the test tests nothing"
    with chunks.open(stored) as store:
        assert chunks.found(store, NUMBERS) == list(NUMBERS)


def test_a_flipped_bit_in_a_header_page_is_a_counted_miss(tmp_path, chunks, stored):
    flip_bit(segment_files(tmp_path)[0], 20)
    with chunks.open(stored) as store:
        assert len(chunks.found(store, NUMBERS)) == len(NUMBERS) - 1
        assert misses(store) == {"corrupt": 1}


@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_a_truncated_segment_loses_its_tail_only(tmp_path, chunks, stored, keep):
    path = segment_files(tmp_path)[0]
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * keep))
    with chunks.open(stored) as store:
        found = chunks.found(store, NUMBERS)
        assert 0 < len(found) < len(NUMBERS)
        assert misses(store) == {"absent": len(NUMBERS) - len(found)}
        assert store.check() == []
        assert chunks.put(store, NUMBERS) == len(NUMBERS)
    with chunks.open(stored) as store:
        assert chunks.found(store, NUMBERS) == list(NUMBERS)


def test_a_removed_segment_is_a_counted_miss(tmp_path, chunks, stored):
    segment_files(tmp_path)[0].unlink()
    with chunks.open(stored) as store:
        found = chunks.found(store, NUMBERS)
        assert 0 < len(found) < len(NUMBERS)
        assert misses(store) == {"absent": len(NUMBERS) - len(found)}


def test_swapped_segments_serve_no_wrong_byte(tmp_path, chunks, stored):
    first, second = segment_files(tmp_path)[:2]
    shutil.move(first, tmp_path / "aside")
    shutil.move(second, first)
    shutil.move(tmp_path / "aside", second)
    with chunks.open(stored) as store:
        found = chunks.found(store, NUMBERS)
        assert len(found) < len(NUMBERS)
        assert sum(misses(store).values()) == len(NUMBERS) - len(found)


def test_all_payload_removed_under_a_running_store_is_a_miss_and_then_stored_again(
    tmp_path, chunks, stored
):
    with chunks.open(stored | {"primary": {"capacity": "1MiB"}}) as store:
        assert chunks.found(store, range(8)) == list(range(8))
        shutil.rmtree(tmp_path / "tier" / "rank0")
        # Descriptors that are open still read the removed files: right bytes, or a miss.
        chunks.found(store, NUMBERS)
        assert chunks.put(store, range(200, 240)) == 40
        store.flush()
        assert store.check() == []
    with chunks.open(stored) as store:
        assert set(misses(store)) <= {"absent", "io_error"}
        chunks.found(store, [*NUMBERS, *range(200, 240)])
        assert chunks.put(store, NUMBERS) == len(NUMBERS)
    with chunks.open(stored) as store:
        assert chunks.found(store, NUMBERS) == list(NUMBERS)


def test_damaged_lmdb_payload_is_a_counted_miss(tmp_path, chunks):
    config = config_of(tmp_path / "tier", backend="lmdb")
    with chunks.open(config) as store:
        chunks.put(store, NUMBERS)
    data = tmp_path / "tier" / "rank0" / "payload" / "data.mdb"
    content = data.read_bytes()
    # Find a chunk's bytes in the file, and spoil one of them.
    needle = chunks.array([5])[0].tobytes()[1000:1064]
    assert content.count(needle) >= 1
    position = content.find(needle)
    while position >= 0:
        flip_bit(data, position)
        position = content.find(needle, position + 1)
    with chunks.open(config) as store:
        assert chunks.found(store, NUMBERS) == [n for n in NUMBERS if n != 5]
        assert misses(store) == {"corrupt": 1}


def test_another_models_manifest_hits_nothing_and_disturbs_nothing(chunks, stored):
    other = Chunks(65_536, model="another-model")
    with other.open(stored) as store:
        assert other.found(store, NUMBERS) == []
        assert store.stats().counters['cold_starts_total{tier="disk"}'] == 1
        assert other.put(store, range(10)) == 10
        with pytest.raises(ValueError, match="namespace"):
            store.match_prefix(chunks.keys(NUMBERS))
    for known in (chunks, other):
        with known.open(stored) as store:
            assert 'cold_starts_total{tier="disk"}' not in store.stats().counters
    with chunks.open(stored) as store:
        assert chunks.found(store, NUMBERS) == list(NUMBERS)


def test_a_manifest_that_only_shares_the_checksum_is_refused_in_words(tmp_path, chunks, stored):
    forged = Manifest.simple("forged", 65_536)
    vars(forged)["namespace"] = chunks.manifest.namespace
    with pytest.raises(ManifestError, match="model"):
        TierStore.open(stored, forged)
