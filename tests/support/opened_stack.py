"""A tier stack of a few slots over disks, and an executor that carries its commands out."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tierstore import Manifest, load_config, make_offload_keys
from tierstore.clock import Clock, MonotonicClock
from tierstore.embedded.loop import PlaneLoop
from tierstore.executor import TransferExecutor
from tierstore.layout import PAGE_BYTES
from tierstore.metrics import Counters
from tierstore.testing.spread import spread_hashes
from tierstore.tier.movement_log import MovementLog
from tierstore.tier.opening import open_stack
from tierstore.tier.reservation import ChunkState
from tierstore.tier.stack import TierStack

SLOT_COUNT = 4
MANIFEST = Manifest.simple("m", chunk_bytes=PAGE_BYTES)
ABSENT, ARRIVING = ChunkState.ABSENT, ChunkState.ARRIVING
RECORDED, RESIDENT = ChunkState.RECORDED, ChunkState.RESIDENT


def keys(*numbers):
    return make_offload_keys(MANIFEST.namespace, 0, spread_hashes(numbers))


@dataclass
class Tiers:
    stack: TierStack
    loop: PlaneLoop
    movements: MovementLog
    counters: Counters
    slot_count: int

    def store(self, *numbers):
        """Store chunks, and let them be written."""
        self.keep(*numbers)
        self.loop.flush()

    def keep(self, *numbers):
        """Store chunks in memory; what goes down from there the tiers' rules say."""
        self.stack.finish_offload(self.stack.reserve_offload(0, keys(*numbers)))

    def recorded(self, tier_idx, *numbers):
        """Return which of the chunks a tier has, once all that was begun has ended."""
        self.settle_writes()
        places = self.stack.secondaries[tier_idx].locate(keys(*numbers))
        return [n for n, place in zip(numbers, places, strict=True) if place is not None]

    def settle_writes(self):
        """Let all that goes down reach the disks; loads may hang meanwhile."""
        cascades = self.stack.cascades
        assert self.loop.settle(lambda: not any(c.demotes.has_work() for c in cascades), 60)

    def locate(self, *numbers):
        return self.stack.states(keys(*numbers))

    def reset(self):
        self.stack.reset(MANIFEST)
        self.loop.flush()

    def assert_all_slots_can_be_had(self):
        """Whatever was pinned or arriving is free again."""
        assert self.loop.settle(lambda: not self.stack.has_work(), 60)
        numbers = range(100, 100 + self.slot_count)
        self.store(*numbers)
        assert self.locate(*numbers) == [RESIDENT] * self.slot_count
        assert self.stack.check() == []


@contextmanager
def opened(
    tmp_path, *disks, clock: Clock | None = None, slot_count: int = SLOT_COUNT
) -> Iterator[Tiers]:
    """Open memory of a few slots over disks with further keys each."""
    primary = {"capacity": f"{slot_count * PAGE_BYTES}B", "eviction": "lru"}
    secondary = [
        {"name": f"disk{i}", "backend": "file", "path": str(tmp_path / str(i)), "capacity": "16MiB"}
        | disk
        for i, disk in enumerate(disks)
    ]
    config = load_config({"version": 1, "primary": primary, "secondary": secondary})
    counters = Counters()
    movements = MovementLog()
    stack = open_stack(
        config, MANIFEST, rank_count=1, counters=counters, movements=movements, clock=clock
    )
    executor = TransferExecutor.open(
        config, MANIFEST, rank=0, rank_count=1, caches=None, counters=counters
    )
    yield Tiers(
        stack, PlaneLoop(stack, executor, MonotonicClock()), movements, counters, slot_count
    )
    executor.close()
    stack.close()
