"""`put`, `get` and `match_prefix` say in one way what the store has of some keys."""

import numpy as np
import pytest
from store_kit import Chunks, config_of

from tierstore import PrefixMatch, TierStore

CHUNKS = Chunks(65_536)
MEMORY_OF_FOUR = {"primary": {"capacity": "256KiB"}}


def test_put_and_get_answer_one_bool_per_key_in_the_order_of_the_keys(tmp_path):
    with CHUNKS.open(config_of(tmp_path)) as store:
        stored = CHUNKS.keys([3, 1, 3, 2])
        assert store.put(stored, CHUNKS.array([3, 1, 3, 2])) == [True] * 4
        asked = CHUNKS.keys([1, 7, 2, 3, 8])
        assert store.get(asked, CHUNKS.array(range(5))) == [True, False, True, True, False]
        assert store.match_prefix(asked) == PrefixMatch(chunk_count=1)
        assert store.put([], CHUNKS.array([])) == store.get([], CHUNKS.array([])) == []
        assert store.match_prefix([]) == PrefixMatch(chunk_count=0)


@pytest.mark.parametrize("stored", [range(10), range(10)[::-1], [*range(10), *range(5)]])
def test_put_answers_what_get_and_match_prefix_answer_next(stored):
    """Memory has room for four: what the first batches brought, the last ones evict."""
    with TierStore.open(MEMORY_OF_FOUR, CHUNKS.manifest) as store:
        keys = CHUNKS.keys(stored)
        are_stored = store.put(keys, CHUNKS.array(stored))
        out = np.zeros((len(keys), CHUNKS.chunk_bytes), np.uint8)
        matched = store.match_prefix(keys).chunk_count
        assert all(are_stored[:matched])
        assert not any(are_stored[matched : matched + 1])
        assert store.get(keys, out) == are_stored
        assert len(set(zip(keys, are_stored, strict=True))) == len(set(keys))
        assert sum(dict(zip(keys, are_stored, strict=True)).values()) == 4
        assert store.check() == []


def test_put_answers_false_for_what_pins_leave_no_room_for():
    with TierStore.open(MEMORY_OF_FOUR, CHUNKS.manifest) as store:
        assert CHUNKS.put(store, range(4)) == 4
        resident = CHUNKS.keys(range(4))
        primary = store._stack.primary
        slots = primary.locate(resident)
        primary.pin(resident)
        assert store.put(CHUNKS.keys([0, 9]), CHUNKS.array([0, 9])) == [True, False]
        primary.unpin(resident)
        assert primary.locate(resident) == slots
