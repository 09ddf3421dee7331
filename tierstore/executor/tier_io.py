"""One secondary tier as the executor sees it: its backend and its threads."""

import logging

from tierstore.backend.protocol import Backend
from tierstore.config import SecondaryConfig
from tierstore.errors import BackendError
from tierstore.io_pool import IoPool

__all__ = ["TierIo"]

_logger = logging.getLogger(__name__)


class TierIo:
    """One secondary tier's backend and its own threads, so that a hung tier stalls no other."""

    def __init__(self, config: SecondaryConfig, backend: Backend) -> None:
        self.config = config
        self.backend: Backend | None = backend
        self.pool = IoPool(config.io.threads, f"tierstore-{config.name}")

    def open(self) -> None:
        """Open the backend and start the threads; a backend that fails is out of use."""
        try:
            assert self.backend is not None
            self.backend.open()
        except BackendError as error:
            _logger.error("tier is out of use: tier=%s cause=%s", self.config.name, error)
            self.backend = None
        self.pool.open()
