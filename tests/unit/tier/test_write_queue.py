"""Demotes on their way: each chunk is written from the slot that its pin holds."""

import numpy as np
import pytest
from tier_fakes import keep, keys, memory

from tierstore.layout import PAGE_BYTES, GroupKind, GroupSpec
from tierstore.tier.write_behind.write_queue import WriteQueue
from tierstore.tier_events import Placed
from tierstore.transfer import JobId, Place

GROUP = GroupSpec(
    group_idx=0,
    kind=GroupKind.FULL,
    tokens_per_block=16,
    blocks_per_chunk=1,
    chunk_bytes=PAGE_BYTES,
)


class Tier:
    """Keeps what places were asked for."""

    owner = 1

    def __init__(self):
        self.tickets = {}

    def request_places(self, ticket, wanted, payload_bytes, use):
        assert payload_bytes == PAGE_BYTES
        del use
        self.tickets[ticket] = wanted

    def placed(self, ticket, positions):
        """Place those of a ticket's keys, by position."""
        chosen = tuple(self.tickets[ticket][i] for i in positions)
        return Placed(ticket, chosen, tuple(Place(bytes([i])) for i in range(len(chosen))))


@pytest.fixture
def primary():
    primary = memory(64)
    keep(primary, *range(0, 20, 2))
    keep(primary, *range(1, 20, 2))
    return primary


@pytest.mark.parametrize("positions", [range(20), [3], [0, 5, 19], range(7, 12)])
def test_a_demote_names_the_slots_of_those_chunks_that_got_places(primary, positions):
    tier = Tier()
    queue = WriteQueue(
        tier_idx=0, groups=[GROUP], primary=primary, secondary=tier, bytes_max=1 << 20
    )
    queue.add(0, keys(*range(20)))
    placed = tier.placed(1, positions)
    queue.drop_recorded(placed)
    # Whatever the policy does meanwhile: a pin holds a chunk in its slot.
    primary.touch(keys(4, 3))
    keep(primary, *range(100, 144))
    demote = queue.begin_write(placed, JobId(1))
    assert demote.keys == placed.keys
    assert demote.slots.dtype == np.int64
    assert demote.slots.tolist() == primary.locate(placed.keys)
    assert len(set(demote.slots.tolist())) == len(placed.keys)
