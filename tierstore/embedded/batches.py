"""Calls that move their chunks in batches: what they work with, and how large a batch is."""

from collections.abc import Sequence

from tierstore.arrays import ByteArray
from tierstore.config import StoreConfig
from tierstore.embedded.planes import Planes
from tierstore.layout import GroupSpec
from tierstore.tier.stack import TierStack

__all__ = ["BATCHES_IN_FLIGHT", "BatchedCall", "batch_chunks"]

BATCHES_IN_FLIGHT = 8
"""Of all callers of `get`; each may have one even so."""

_BATCH_BYTES = 4 << 20
"""Chunks are put and got in batches of about this size: pins stay few, and the caller's copy of
one batch overlaps the I/O of the next."""


class BatchedCall:
    """One call that moves chunks; made for it, and thrown away with it."""

    __slots__ = ("_loop", "_planes", "_pool", "_specs", "_stack", "_stall_seconds")

    def __init__(
        self,
        planes: Planes,
        stack: TierStack,
        stall_seconds: float,
        pool: ByteArray,
        specs: Sequence[GroupSpec],
    ) -> None:
        """Tiers that do not move are waited for as in `PlaneLoop.make_room`."""
        self._planes = planes
        self._loop = planes.loop
        self._stack = stack
        self._stall_seconds = stall_seconds
        self._pool = pool
        self._specs = specs


def batch_chunks(config: StoreConfig, spec: GroupSpec) -> int:
    """Return how many chunks of a group one batch has."""
    # The batches of a get, or one of a put and the write-behind queue, fill half of the tier.
    # From a tier that hangs, those of a get take no more than its share before that is known.
    tier_count = max(1, len(config.secondary))
    hung_shares = [tier.io.breaker.hung_share for tier in config.secondary]
    part = min([1 / (2 * tier_count), *hung_shares])
    share = int(config.primary.capacity_bytes * part) // BATCHES_IN_FLIGHT
    # What a write queue cannot hold of a batch would be dropped.
    queues = (tier.io.write_queue_bytes for tier in config.secondary)
    return max(1, min(_BATCH_BYTES, share, *queues) // spec.slot_bytes)
