import pytest

from tierstore.layout import PAGE_BYTES
from tierstore.tier.memory.slabs import SlabSlots, UniformSlots


def test_uniform_slots_are_multiples_of_the_slot_size():
    slots = UniformSlots(10 * 3 * PAGE_BYTES + PAGE_BYTES, 3 * PAGE_BYTES)
    assert slots.free_count(0) == 10
    assert slots.take(0, 10) == list(range(0, 30, 3))
    slots.give([9, 3])
    assert sorted(slots.take(0, 2)) == [3, 9]
    assert slots.free_count(0) == 0


def test_free_and_fresh_slots_are_taken_together():
    slots = UniformSlots(4 * PAGE_BYTES, PAGE_BYTES)
    slots.give(slots.take(0, 2))
    assert sorted(slots.take(0, 4)) == [0, 1, 2, 3]
    assert slots.take(0, 0) == []


def test_slab_belongs_to_one_class_until_its_last_slot_is_given_back():
    slots = SlabSlots(4 * 4 * PAGE_BYTES, [PAGE_BYTES, 4 * PAGE_BYTES])
    small = slots.take(0, 5)
    assert slots.free_count(1) == 2
    slots.give(small[:1])
    assert slots.free_count(1) == 2
    slots.give(small[1:])
    assert slots.free_count(1) == 4
    assert slots.take(1, 4) == [0, 4, 8, 12] or slots.free_count(1) == 0


def test_few_victims_are_taken_in_vain():
    slots = SlabSlots(4 * 4 * PAGE_BYTES, [PAGE_BYTES, 4 * PAGE_BYTES])
    slabs = [slots.take(0, 4) for _ in range(4)]
    order = [*(slab[0] for slab in slabs), *(slab[1] for slab in slabs), *slabs[3][2:]]
    assert slots.choose(1, 1, order) == [0, 1, 3, 7, 8, 9]


def test_victims_of_another_class_count_only_with_their_whole_slab():
    slots = SlabSlots(2 * 4 * PAGE_BYTES, [PAGE_BYTES, 4 * PAGE_BYTES])
    first, second = slots.take(0, 4), slots.take(0, 4)
    order = [second[0], *first, *second[1:]]
    assert slots.choose(1, 1, order) == [0, 1, 2, 3, 4]
    assert slots.choose(1, 2, order) == list(range(8))
    assert slots.choose(1, 1, first[:3]) is None


@pytest.mark.parametrize(
    ("page_counts", "waste_max"), [([1, 2, 16], 0.0), ([3, 16], 0.05), ([5, 7], 0.05)]
)
def test_slabs_of_a_large_pool_waste_little(page_counts, waste_max):
    pool_pages = 100_000
    slots = SlabSlots(pool_pages * PAGE_BYTES, [pages * PAGE_BYTES for pages in page_counts])
    for class_idx, pages in enumerate(page_counts):
        assert slots.free_count(class_idx) * pages >= pool_pages * (1 - waste_max) - 16 * 8
