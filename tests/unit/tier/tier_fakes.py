"""What lies beside the modules under test: records and ways down, as dicts and lists."""

from collections import Counter

from tierstore.config import PrimaryConfig
from tierstore.key import OffloadKey
from tierstore.layout import PAGE_BYTES
from tierstore.testing.spread import spread_hashes
from tierstore.tier.memory.primary import PrimaryTier
from tierstore.tier.reservation import ChunkState
from tierstore.transfer import Place


def keys(*numbers):
    """Return keys of group 0."""
    return [OffloadKey(bytes(12) + block_hash) for block_hash in spread_hashes(numbers)]


def memory(slot_count):
    return PrimaryTier(PrimaryConfig(capacity_bytes=slot_count * PAGE_BYTES), [PAGE_BYTES])


def keep(primary, *numbers):
    """Make chunks resident."""
    tail_first = keys(*numbers)[::-1]
    assert primary.reserve(0, tail_first) is not None
    primary.commit(tail_first)


class FakeHealth:
    def __init__(self):
        self.reads_under_way = 0
        self.judged = []

    def begin_read(self):
        self.reads_under_way += 1

    def end_read(self, arrived_count, reasons, begun_at):
        self.reads_under_way -= 1
        self.judged.append((arrived_count, list(reasons)))


class FakeRecords:
    """What can be read of one tier; keeps what it was asked and told."""

    def __init__(self, *numbers):
        self.places = {key: Place(bytes([i])) for i, key in enumerate(keys(*numbers))}
        self.asked = []
        self.ahead = []
        self.arriving = ()
        """Chunks that are still being looked up."""
        self.health = FakeHealth()
        self.failed = {}
        self.succeeded = []
        self.hung = Counter()
        self.gave_way = []

    def locate(self, wanted):
        self.asked.append(list(wanted))
        return [self.places.get(key) for key in wanted]

    def states(self, wanted):
        self.asked.append(list(wanted))
        return [self._state(key) for key in wanted]

    def _state(self, key):
        if key in self.arriving:
            return ChunkState.ARRIVING
        return ChunkState.RECORDED if key in self.places else ChunkState.ABSENT

    def look_ahead(self, wanted):
        self.ahead.append(list(wanted))
        return lambda: None

    def fail(self, reasons):
        self.failed.update(reasons)

    def succeed(self, arrived):
        self.succeeded += arrived

    def hang(self, wanted, slot_bytes):
        self.hung.update(chunks=len(wanted), slot_bytes=slot_bytes)

    def end_hang(self, wanted, slot_bytes, _failed):
        self.hung.subtract(chunks=len(wanted), slot_bytes=slot_bytes)

    def give_way(self, wanted):
        self.gave_way += wanted

    def reset(self):
        pass


class FakePins:
    def __init__(self):
        self.counts = Counter()

    def pin(self, wanted):
        self.counts.update(wanted)

    def unpin(self, wanted):
        self.counts.subtract(wanted)
        self.counts += Counter()


class FakeSecondary:
    def __init__(self):
        self.pins = FakePins()
        self.unpin = self.pins.unpin
        self.pin = self.pins.pin
        self.touched = []

    def touch(self, tail_first, *, use):
        self.touched.append((list(tail_first), use))


class FakeCascade:
    """Keeps what it was told of chunks."""

    def __init__(self):
        self.told = []
        self.promoted_count = 0

    def on_resident(self, _group_idx, wanted, _use):
        self.told.append(("resident", list(wanted)))

    def on_promoted(self, wanted, _use):
        self.told.append(("promoted", list(wanted)))

    def on_evicted(self, wanted):
        self.told.append(("evicted", list(wanted)))

    def count_promoted(self, chunk_count, _chunk_bytes):
        self.promoted_count += chunk_count
