"""One secondary tier as the executor sees it: its backend and its threads."""

from functools import partial
from typing import TYPE_CHECKING

from tierstore.backend.late import LateBackend
from tierstore.backend.opening import BackendOpener
from tierstore.config import SecondaryConfig
from tierstore.executor.progress import TierProgress
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
    ) -> None:
        """Open the backend and start the threads."""
        self.config = config
        late = LateBackend(
            config.name, partial(opener, config, manifest, rank=rank, rank_count=rank_count)
        )
        late.open()
        self.backend: Backend = late
        self.owners = OwnerLocks(config.path)
        self.progress = TierProgress(config.io.threads, config.io.deadline_seconds)
        """Guarded by the executor's lock."""
        self.pool = IoPool(config.io.threads, f"tierstore-{config.name}")
        self.pool.open()

    def close(self) -> None:
        """Close what the threads used, once they have ended."""
        self.backend.close()
        self.owners.close()
