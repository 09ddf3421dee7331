"""One secondary tier as the executor sees it: its backend and its threads."""

import logging
from typing import TYPE_CHECKING

from tierstore.backend.opening import BackendOpener
from tierstore.config import SecondaryConfig
from tierstore.errors import BackendError
from tierstore.io_pool import IoPool
from tierstore.manifest import Manifest

if TYPE_CHECKING:
    from tierstore.backend.protocol import Backend

__all__ = ["TierIo"]

_logger = logging.getLogger(__name__)


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
        self.backend: Backend | None = None
        """None: the tier is out of use."""
        try:
            self.backend = opener(config, manifest, rank=rank, rank_count=rank_count)
        except BackendError as error:
            _logger.error("tier is out of use: tier=%s cause=%s", config.name, error)
        self.pool = IoPool(config.io.threads, f"tierstore-{config.name}")
        self.pool.open()
