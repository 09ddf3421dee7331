import mmap

import numpy as np
import pytest

from tierstore.backend.protocol import RecordIo
from tierstore.backend.record_batch import RecordBatch
from tierstore.codec.record import PLACE_DTYPE
from tierstore.executor.job import RecordSpan
from tierstore.key import Namespace, make_offload_keys
from tierstore.layout import PAGE_BYTES
from tierstore.testing.spread import spread_hash, spread_hashes
from tierstore.transfer import Place, Promote

KEYS = make_offload_keys(Namespace(b"batches_"), 0, spread_hashes(range(5)))
PLACES = [Place(spread_hash(("place", i))[:24]) for i in range(5)]
SLOT_BYTES = 2 * PAGE_BYTES


def pool_of(page_count=32):
    return memoryview(mmap.mmap(-1, page_count * PAGE_BYTES))


def batch_in(pool, pages=(4, 0, 20, 2, 10), places=None):
    offsets = np.array(pages) * PAGE_BYTES
    places = PLACES[: len(pages)] if places is None else places
    return RecordBatch.in_pool(KEYS[: len(pages)], places, pool, offsets, SLOT_BYTES)


def memory_of(pool):
    return np.frombuffer(pool, np.uint8).ctypes.data


def test_a_batch_is_a_sequence_of_records_and_their_arrays():
    pool = pool_of()
    pool[0:3] = b"abc"
    batch = batch_in(pool)
    assert [record.key for record in batch] == list(batch.keys) == KEYS
    assert [record.place for record in batch] == PLACES
    assert [len(record.slot) for record in batch] == batch.slot_bytes.tolist() == [SLOT_BYTES] * 5
    assert bytes(batch[1].slot[:3]) == b"abc"
    pages = (batch.addresses - memory_of(pool)) // PAGE_BYTES
    assert pages.tolist() == [4, 0, 20, 2, 10]
    assert batch[-1].key == KEYS[-1]
    with pytest.raises(IndexError):
        _ = batch[5]


def test_slices_of_a_batch_are_batches_with_the_same_slots():
    batch = batch_in(pool_of())
    for chosen in (slice(1, 3), slice(None, None, -1), slice(5, 9)):
        part = batch[chosen]
        assert isinstance(part, RecordBatch)
        assert [record.key for record in part] == KEYS[chosen]
        assert [record.place for record in part] == PLACES[chosen]
        assert part.addresses.tolist() == batch.addresses[chosen].tolist()


def test_a_batch_of_single_records_is_the_same_as_one_in_a_pool():
    pool = pool_of()
    batch = batch_in(pool)
    again = RecordBatch.of([RecordIo(r.key, r.place, r.slot) for r in batch])
    assert again.addresses.tolist() == batch.addresses.tolist()
    assert again.slot_bytes.tolist() == batch.slot_bytes.tolist()
    assert again.places.tobytes() == batch.places.tobytes()
    assert [r.slot.nbytes for r in again[2:]] == [SLOT_BYTES] * 3
    assert RecordBatch.of(again) is again


def test_places_of_other_lengths_stay_as_they_are():
    places = [PLACES[0], Place(b"short"), Place(b""), PLACES[3], PLACES[4]]
    assert [record.place for record in batch_in(pool_of(), places=places)] == places
    empty = [Place(b"")] * 5
    assert [record.place for record in batch_in(pool_of(), places=empty)] == empty


def test_places_may_come_as_an_array_of_any_dtype_of_their_width():
    joined = b"".join(PLACES)
    for dtype in ("V24", PLACE_DTYPE):
        batch = batch_in(pool_of(), places=np.frombuffer(joined, dtype))
        assert [record.place for record in batch] == PLACES


def test_a_slot_outside_of_the_pool_is_cut_off_there():
    batch = batch_in(pool_of(page_count=5), pages=(4, 5, -1, 2**40, 0))
    assert batch.slot_bytes.tolist() == [PAGE_BYTES, 0, 0, 0, SLOT_BYTES]
    assert [record.slot.nbytes for record in batch] == batch.slot_bytes.tolist()


def test_a_batch_keeps_the_memory_of_its_slots():
    batch = batch_in(pool_of())
    batch[0].slot[:] = b"\7" * SLOT_BYTES
    assert bytes(batch[:1][0].slot) == b"\7" * SLOT_BYTES


def test_keys_without_slots_are_a_mistake():
    with pytest.raises(ValueError, match="as many keys"):
        RecordBatch.in_pool(KEYS, PLACES[:4], pool_of(), np.zeros(5, np.int64), SLOT_BYTES)


@pytest.mark.parametrize("as_array", [False, True])
def test_a_span_of_a_command_hands_over_its_own_records(as_array):
    places = np.frombuffer(b"".join(PLACES), "V24") if as_array else tuple(PLACES)
    promote = Promote(
        tier_idx=0, group_idx=1, keys=tuple(KEYS), places=places, slots=np.array([4, 0, 20, 2, 10])
    )
    pool = pool_of()
    records = RecordSpan(promote, 1, 4, 7).records(pool, [1, SLOT_BYTES])
    assert [(r.key, r.place) for r in records] == list(zip(KEYS, PLACES, strict=True))[1:4]
    assert ((records.addresses - memory_of(pool)) // PAGE_BYTES).tolist() == [0, 20, 2]
