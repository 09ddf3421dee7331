import pytest

from tierstore.config import PrimaryConfig
from tierstore.errors import ConfigError
from tierstore.key import OffloadKey
from tierstore.layout import PAGE_BYTES
from tierstore.testing.spread import spread_hash
from tierstore.tier.memory.primary import PrimaryTier


def keys_of(*numbers):
    return [OffloadKey(spread_hash(number)) for number in numbers]


def open_tier(slot_count, slot_bytes=(PAGE_BYTES,), eviction="lru"):
    capacity_bytes = slot_count * max(slot_bytes)
    return PrimaryTier(PrimaryConfig(capacity_bytes=capacity_bytes, eviction=eviction), slot_bytes)


def store(tier, *numbers, group_idx=0):
    reservation = tier.reserve(group_idx, keys_of(*numbers))
    tier.commit(keys_of(*numbers))
    return reservation


def test_capacity_below_the_largest_slot_is_a_config_error():
    config = PrimaryConfig(capacity_bytes=4 * PAGE_BYTES - 1)
    with pytest.raises(ConfigError, match=r"primary\.capacity.*16384 bytes"):
        PrimaryTier(config, [PAGE_BYTES, 4 * PAGE_BYTES])


def test_slot_size_must_be_whole_pages():
    with pytest.raises(ValueError, match="multiples of 4096"):
        PrimaryTier(PrimaryConfig(capacity_bytes=1 << 20), [PAGE_BYTES + 1])


def test_uncached_group_has_no_slots():
    tier = open_tier(4, (PAGE_BYTES, 0))
    with pytest.raises(ValueError, match="group 1 is not cached"):
        tier.reserve(1, keys_of(1))


def test_engine_without_a_cached_group_has_an_empty_tier():
    tier = PrimaryTier(PrimaryConfig(capacity_bytes=1 << 20), [0, 0])
    assert tier.locate(keys_of(1)) == [None]
    assert tier.check() == []


def test_tail_of_a_prefix_is_evicted_before_its_head():
    tier = open_tier(4)
    store(tier, 3, 2, 1, 0)
    tier.touch(keys_of(3, 2, 1, 0))
    assert store(tier, 9, 8).evicted == keys_of(3, 2)


def test_pinned_chunk_survives_eviction_until_its_last_unpin():
    tier = open_tier(2)
    store(tier, 1, 2)
    tier.pin(keys_of(1))
    tier.pin(keys_of(1))
    tier.unpin(keys_of(1))
    assert store(tier, 3).evicted == keys_of(2)
    tier.unpin(keys_of(1))
    assert store(tier, 4).evicted == keys_of(1)


@pytest.mark.parametrize("eviction", ["lru", "arc"])
def test_reservation_that_pins_forbid_evicts_nothing(eviction):
    tier = open_tier(4, eviction=eviction)
    store(tier, 1, 2, 3, 4)
    tier.pin(keys_of(2, 3))
    assert tier.reserve(0, keys_of(5, 6, 7)) is None
    assert None not in tier.locate(keys_of(1, 2, 3, 4))
    assert tier.coldest(4) == keys_of(1, 2, 3, 4)


def test_arriving_chunk_is_neither_found_nor_evicted():
    tier = open_tier(2)
    tier.reserve(0, keys_of(1, 2))
    assert tier.locate(keys_of(1)) == [None]
    assert tier.reserve(0, keys_of(3)) is None
    tier.abort(keys_of(1))
    assert tier.reserve(0, keys_of(3)).evicted == []


@pytest.mark.parametrize("eviction", ["lru", "arc"])
def test_idle_class_gives_its_slabs_to_a_busy_one(eviction):
    small, large = PAGE_BYTES, 4 * PAGE_BYTES
    tier = open_tier(8, (small, large), eviction)
    store(tier, *range(32))
    for number in range(100, 120):
        store(tier, number, group_idx=1)
    assert tier.locate(keys_of(*range(32))) == [None] * 32
    assert sum(slot is not None for slot in tier.locate(keys_of(*range(100, 120)))) == 8
    assert tier.check() == []


def test_arc_remembers_no_more_than_the_pool_holds():
    tier = open_tier(4, eviction="arc")
    store(tier, 0, 1, 2, 3)
    tier.touch(keys_of(3))
    for number in range(10, 20):
        store(tier, number)
    assert store(tier, 0).evicted == keys_of(17)
    assert tier.coldest(4)[-1] == keys_of(3)[0], "what left long ago came back as a stranger"
