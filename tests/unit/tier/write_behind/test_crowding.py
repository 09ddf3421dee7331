"""A tier that has room, but not in one piece, makes way without emptying itself."""

from tierstore.tier.write_behind.crowding import Crowding


class Tier:
    """Notes what it shall evict, and evicts when it is told to."""

    def __init__(self):
        self.evicted = []
        self.settled = True

    def make_way(self, chunk_count, payload_bytes):
        assert payload_bytes == 4096
        self.evicted.append(chunk_count)
        self.settled = False

    def is_settled(self):
        return self.settled


def settle(tier, crowding):
    tier.settled = True
    assert not crowding.is_making_way(is_releasing=False)


def test_writes_that_fail_together_evict_once():
    tier = Tier()
    crowding = Crowding(tier)
    assert all(crowding.make_way(1, 4096) for _ in range(20))
    assert tier.evicted == [2]
    assert crowding.is_making_way(is_releasing=False)


def test_a_write_that_fails_after_way_was_made_evicts_twice_as_much_and_at_last_gives_up():
    tier = Tier()
    crowding = Crowding(tier)
    while crowding.make_way(1, 4096):
        settle(tier, crowding)
    assert tier.evicted == [2, 4, 8, 16, 32, 64, 128, 256]
    crowding.end()
    assert crowding.make_way(1, 4096)
    assert tier.evicted[-1] == 2


def test_a_write_that_finds_room_ends_no_way_that_is_being_made():
    tier = Tier()
    crowding = Crowding(tier)
    assert crowding.make_way(1, 4096)
    crowding.end()
    assert crowding.make_way(1, 4096)
    assert tier.evicted == [2]
