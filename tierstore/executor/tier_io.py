"""One secondary tier as the executor sees it: its backend and its threads."""

from functools import partial
from typing import TYPE_CHECKING

from tierstore.backend.late import LateBackend
from tierstore.backend.opening import BackendOpener
from tierstore.config import SecondaryConfig
from tierstore.executor.progress import ReadGate, TierProgress
from tierstore.io_pool import IoPool
from tierstore.manifest import Manifest
from tierstore.tier.owners import OwnerLocks

if TYPE_CHECKING:
    from tierstore.backend.protocol import Backend

__all__ = ["TierIo"]


class TierIo:
    """One secondary tier's backend and its own threads, so that a hung tier stalls no other."""

    def __init__(
        self,
        config: SecondaryConfig,
        manifest: Manifest,
        opener: BackendOpener,
        *,
        rank: int,
        rank_count: int,
        pool_bytes: int,
    ) -> None:
        """Open the backend and start the threads; the slots are in a pool of `pool_bytes`."""
        self.config = config
        late = LateBackend(
            config.name, partial(opener, config, manifest, rank=rank, rank_count=rank_count)
        )
        late.open()
        self.backend: Backend = late
        self.owners = OwnerLocks(config.path)
        self.held_bytes_max = int(pool_bytes * config.io.breaker.hung_share)
        """What reads may hold of the pool while they hang."""
        self.gate = ReadGate(self.held_bytes_max, config.io.threads)
        self.progress = TierProgress(config.io.threads, config.io.deadline_seconds, self.gate)
        """Guarded by the executor's lock, as is the gate."""
        self.pool = IoPool(config.io.threads, f"tierstore-{config.name}")
        self.pool.open()
