"""The threads of one tier's catalog: one opens it, one writes to it, one reads it."""

import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress

from tierstore.bounded_log import bounded
from tierstore.catalog.catalog import Catalog
from tierstore.catalog.messages import Leave, Operation
from tierstore.catalog.writer import CatalogWriter
from tierstore.clock import Clock
from tierstore.config import SecondaryConfig
from tierstore.device.system import SystemCalls
from tierstore.errors import BackendError, ClosedError
from tierstore.io_pool import Mailbox
from tierstore.key import OffloadKey
from tierstore.lmdb_env.pace import VerifyPace
from tierstore.manifest import Manifest
from tierstore.tier.disk.catalog_keeper import CatalogKeeper, KeeperPace, OpenCatalog
from tierstore.tier.disk.catalog_reads import CatalogReads
from tierstore.tier.disk.dispatcher import CatalogDispatcher, CatalogEnd, DispatcherItem
from tierstore.tier.disk.pins import Pins
from tierstore.transfer import Place

__all__ = ["CatalogThreads", "NotOpenError"]

_logger = bounded(logging.getLogger(__name__))


class NotOpenError(BackendError):
    """The tier has no catalog now."""


class CatalogThreads:
    """What keeps a catalog open and carries operations to it. Whatever waits does so in them."""

    def __init__(
        self,
        name: str,
        config: SecondaryConfig,
        manifest: Manifest,
        *,
        rank_count: int,
        system: SystemCalls | None,
        pins: Pins,
        clock: Clock,
        pace: KeeperPace | None,
    ) -> None:
        """Describe them; `name` is that of the threads. The writer evicts nothing in `pins`."""
        self._name = name
        self._config = config
        self._manifest = manifest
        self._rank_count = rank_count
        self._system = system
        self._pins = pins
        self._clock = clock
        if pace is None:
            # Each search of an lmdb tier opens its databases, and what is in them is bounded.
            searches_once = config.backend == "lmdb"
            pace = KeeperPace(search_seconds=math.inf) if searches_once else KeeperPace()
        self.reads = CatalogReads(f"lookup-{name}")
        self._mailbox: Mailbox[DispatcherItem] = Mailbox(f"catalog-{name}", self._handle)
        self._keeper = CatalogKeeper(
            config.name, config.path, self._open_catalog, self._mailbox.put, pace
        )
        self.dispatcher = CatalogDispatcher(config.name, self.reads, self._keeper.look)
        self._is_failing = False

    def begin(self) -> None:
        """Start them; the caller calls `close` in the end."""
        self._mailbox.open()
        self.reads.open()
        self._keeper.open()

    def wait_open(self, seconds: float) -> None:
        """Wait for the first try to open the catalog, for so long at most.

        Raises:
            TierStoreError: the user has to change something; nothing is tried any more.
        """
        self._keeper.wait_first(seconds)
        self._mailbox.wait_idle(max(0.0, seconds))

    @property
    def opened(self) -> OpenCatalog | None:
        """The catalog in use; None: there is none now. Any thread may ask."""
        return self.dispatcher.opened

    @property
    def catalog(self) -> Catalog:
        """The catalog in use.

        Raises:
            NotOpenError: there is none now.
        """
        opened = self.opened
        if opened is None:
            raise NotOpenError(f"secondary {self._config.name!r}: {self.complaint}")
        return opened.catalog

    @property
    def complaint(self) -> str:
        """Why there is no catalog, or why it did not do what it was last told; empty: it did."""
        opened = self.opened
        return self._keeper.complaint if opened is None else opened.writer.failure

    def look(self) -> None:
        """Let the catalog be checked: it may be lost."""
        self._keeper.look()

    def put(self, operation: Operation) -> None:
        """Queue an operation for the writer; never blocks.

        Raises:
            ClosedError: after `close`.
        """
        self._mailbox.put(operation)

    def offer(self, operation: Operation, waiting_max: int) -> None:
        """Queue an operation, or drop it if so many wait already."""
        self._mailbox.offer(operation, waiting_max)

    def wait_idle(self, seconds: float) -> bool:
        """Wait until the writer has done all that is queued; False: time is up."""
        return self._mailbox.wait_idle(seconds)

    def locate(self, keys: Sequence[OffloadKey]) -> list[Place | None]:
        """Look keys up; called in the thread that reads, in which lost catalogs are closed, too.

        Raises:
            BackendError, ClosedError: the catalog cannot be read.
        """
        opened = self.opened
        if opened is None:
            return [None] * len(keys)
        try:
            return opened.catalog.locate(keys, self.reads.progressing)
        except (BackendError, ClosedError) as error:
            self._keeper.look()
            if not self._is_failing:
                self._is_failing = True
                _logger.warning("locate failed: tier=%s cause=%s", self._name, error)
            raise

    def close(self, seconds: float) -> bool:
        """Finish what is queued, sync and close the catalog; False: a thread hangs in its device.

        Returns after about `seconds`, whatever hangs.
        """
        until = time.monotonic() + seconds
        self._keeper.begin_close()
        # The catalog can be closed once no thread reads it any more.
        end = CatalogEnd() if self.reads.close(seconds) else Leave()
        with suppress(ClosedError):  # it was never opened
            self._mailbox.put(end)
        is_ended = self._mailbox.close(max(0.0, until - time.monotonic()))
        is_ended = self._keeper.close(max(0.0, until - time.monotonic())) and is_ended
        return is_ended and self.opened is None

    def _open_catalog(self, pace: VerifyPace) -> OpenCatalog:
        catalog = Catalog.open(
            self._config,
            self._manifest,
            rank_count=self._rank_count,
            system=self._system,
            pace=pace,
        )
        writer = CatalogWriter(catalog, self._pins, self._clock)
        writer.recover()
        return OpenCatalog(catalog, writer)

    def _handle(self, items: Sequence[DispatcherItem]) -> None:
        self.dispatcher.handle(items)
