"""Flushes of one tier's catalog to its device, and what they have found lost."""

import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from tierstore.backend.protocol import LostFinder
from tierstore.catalog.messages import take_all
from tierstore.errors import BackendError, CatalogError, ClosedError
from tierstore.tier.disk.resets import Resets
from tierstore.tier.disk.threads import CatalogThreads

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from tierstore.catalog.catalog import Catalog

__all__ = ["CatalogFlushes"]


class CatalogFlushes:
    """Flushes of one catalog, and the lost segments that they find.

    Threads that may wait call it, several at a time. Any thread may ask what was found.
    """

    def __init__(self, tier_name: str, threads: CatalogThreads, resets: Resets) -> None:
        self._tier_name = tier_name
        self._threads = threads
        self._resets = resets
        self._finding = threading.Lock()
        self._lost: deque[AbstractSet[int]] = deque()
        """Segments, from `sync` to `take_lost`."""
        self._doubted: Catalog | None = None
        """`sync` has found that it is lost; the keeper perhaps has not."""

    @property
    def is_lost(self) -> bool:
        """Whether `sync` has found the catalog lost, and it is not given up yet."""
        opened = self._threads.opened
        return opened is not None and opened.catalog is self._doubted

    def sync(self, find_lost: LostFinder | None, reset_seconds: float) -> None:
        """Flush the catalog; what `find_lost` says is left for `take_lost`.

        A reset that a failing catalog has not done is waited for, for so long at most.

        Raises:
            BackendError: the device refused, there is no catalog, or it has not done a reset yet,
                or its path was lost, with what was recorded there.
        """
        if find_lost is not None:
            # One at a time: a backend names each loss once, so a second flush that looks meanwhile
            # would find nothing, and end before this one has left its findings.
            with self._finding:
                self._find_lost(find_lost)
        if not self._resets.retry(reset_seconds):
            raise self._error(f"its catalog has not recorded a reset: {self._threads.complaint}")
        catalog = self._threads.catalog
        try:
            catalog.sync()
        except ClosedError as error:
            raise self._error("is closed") from error
        if catalog.is_lost():
            self._doubted = catalog
            self._threads.look()
            raise self._error("its path is lost")

    def take_lost(self) -> frozenset[int]:
        """Return the segments whose payload was found gone since the last call."""
        return frozenset[int]().union(*take_all(self._lost))

    def _find_lost(self, find_lost: LostFinder) -> None:
        opened = self._threads.opened
        relied_on = frozenset[int]() if opened is None else opened.writer.lost.relied_on
        segments = find_lost(relied_on)
        if opened is not None:
            opened.writer.lost.note_looked_for(relied_on)
        if segments:
            with suppress(BackendError, CatalogError, ClosedError):
                segments = self._threads.catalog.segments_in_use(segments)
            self._lost.append(segments)

    def _error(self, what: str) -> BackendError:
        return BackendError(f"secondary {self._tier_name!r}: {what}")
