"""Opens a tier's catalog in a thread of its own, and opens another one after it was lost.

    opening   tried until it succeeds, with growing pauses; the caller who opens the tier waits for
              the first try only, for a bounded time, and less for a catalog that is large: it is
              verified in the background, while nothing is found in the tier
    open      checked once a second: is the path still where it was, and ours?
    lost      the path was removed, moved or unmounted: given up, and opened again as a new owner

The user of the catalog is told (`CatalogNews`) and acts on it in another thread. A device that
hangs blocks this thread only.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tierstore.bounded_log import bounded
from tierstore.catalog.catalog import Catalog
from tierstore.catalog.writer import CatalogWriter
from tierstore.errors import BackendError, CatalogError, ClosedError, TierStoreError
from tierstore.io_pool import IoPool, wait_for
from tierstore.lmdb_env.pace import LONG_BYTES, VerifyPace
from tierstore.tier.disk.outage import may_pass

__all__ = [
    "CatalogKeeper",
    "CatalogLost",
    "CatalogNews",
    "CatalogOpened",
    "KeeperPace",
    "OpenCatalog",
    "SegmentsFound",
]

_logger = bounded(logging.getLogger(__name__))

_WAIT_SECONDS = 0.1
"""Between two checks whether a wait is to end."""
_GIVE_UP_SECONDS_MAX = 10.0
"""The longest wait for what is being written for a lost catalog; a device may hang."""


@dataclass(frozen=True, slots=True, eq=False)
class OpenCatalog:
    """A catalog and its writer."""

    catalog: Catalog
    writer: CatalogWriter


@dataclass(frozen=True, slots=True)
class CatalogOpened:
    """The catalog can be used from now on."""

    opened: OpenCatalog


@dataclass(frozen=True, slots=True)
class CatalogLost:
    """The catalog is not to be used any more: it has to be closed."""

    opened: OpenCatalog
    is_given_up: threading.Event
    """To be set when nothing more is written for it. The next opening waits a while for it."""


@dataclass(frozen=True, slots=True)
class SegmentsFound:
    """The segments below the catalog's path, with their pages: some may have no row in it."""

    opened: OpenCatalog
    segments: dict[int, int]


CatalogNews = CatalogOpened | CatalogLost | SegmentsFound


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperPace:
    """When a keeper acts."""

    look_seconds: float = 1.0
    """Between two checks of an open catalog."""
    pause_seconds_min: float = 0.1
    pause_seconds_max: float = 30.0
    """Between two tries to open one: the pause doubles with each failure."""
    search_seconds: float = 60.0
    """Between two searches for segments without a row: a rank that was still writing when its path
    was removed leaves them behind. The first search comes soon after an opening."""
    search_seconds_first: float = 3.0
    long_bytes: int = LONG_BYTES
    """A catalog of this size or more is verified in the background."""


class CatalogKeeper:
    """The thread of one tier."""

    def __init__(
        self,
        name: str,
        path: Path,
        open_catalog: Callable[[VerifyPace], OpenCatalog],
        tell: Callable[[CatalogNews], None],
        pace: KeeperPace,
    ) -> None:
        """`open_catalog` opens the catalog below `path`; `tell` is called in the thread.

        It raises ClosedError if it was ended by its pace.
        """
        self._name = name
        self._path = path
        self._open_catalog = open_catalog
        self._tell = tell
        self._pace = pace
        self._pool = IoPool(1, f"keeper-{name}")
        self._lock = threading.RLock()  # an interruption cannot keep it from being left
        self._changed = threading.Condition(self._lock)
        self._is_closing = False
        self._is_wanted = False
        self._is_waited_for = True
        self._first_error: TierStoreError | None = None
        self._is_first_over = False
        self._is_long = False
        self._long_until = math.inf
        """Until when a first try is waited for that was found to be long."""
        self._was_mounted: bool | None = None
        """Whether the path was a mount point when it was opened first."""
        self._opened: OpenCatalog | None = None
        self._search_at = 0.0
        self._is_complained = False
        self.complaint = "it has not been opened yet"
        """Why the catalog is not open; empty: it is."""

    def open(self) -> None:
        """Start the thread, and with it the first try."""
        self._pool.open()
        self._pool.submit_urgent(self._run)

    def wait_first(self, seconds: float) -> None:
        """Wait for the end of the first try, for so long at most; later ones go on by themselves.

        Raises:
            TierStoreError: the user has to change something (`outage`); nothing is tried any more.
        """
        until = time.monotonic() + max(0.0, seconds)
        with self._lock:
            # In short waits: it may turn out to be longer than was thought.
            while not self._is_first_over:
                seconds_left = min(until, self._long_until) - time.monotonic()
                if seconds_left <= 0:
                    break
                wait_for(
                    self._changed, lambda: self._is_first_over, min(seconds_left, _WAIT_SECONDS)
                )
            error, is_over = self._first_error, self._is_first_over
            self._is_waited_for = False
        if error is not None and not may_pass(error):
            raise error
        if not is_over and not self._is_long:
            self._complain(f"its device does not answer within {seconds:.0f} s")

    def look(self) -> None:
        """Check the catalog now: something has failed."""
        with self._lock:
            self._is_wanted = True
            self._changed.notify_all()

    def begin_close(self) -> None:
        """Let the thread end after what it is doing now."""
        with self._lock:
            self._is_closing = True
            self._changed.notify_all()

    def close(self, timeout_seconds: float) -> bool:
        """Wait for the end of the thread; False: it hangs in its device."""
        self.begin_close()
        return self._pool.close(timeout_seconds)

    def _run(self) -> None:
        pause = self._pace.pause_seconds_min
        while not self._is_closing:
            if self._opened is None:
                if not self._try_to_open():
                    self._pause(pause)
                    pause = min(2 * pause, self._pace.pause_seconds_max)
                    continue
                pause = self._pace.pause_seconds_min
            self._pause(self._pace.look_seconds)
            if not self._is_closing:
                with suppress(MemoryError):  # the next look comes soon
                    self._look_after()

    def _pause(self, seconds: float) -> None:
        with self._lock:
            wait_for(self._changed, lambda: self._is_closing or self._is_wanted, seconds)
            self._is_wanted = False

    def _try_to_open(self) -> bool:
        error: TierStoreError | None = None
        try:
            self._require_place()
            opened = self._open_catalog(self._pace_of_try())
        except TierStoreError as failure:
            if self._is_closing and isinstance(failure, ClosedError):
                return False
            error = failure
        except (OSError, MemoryError) as failure:
            error = BackendError(f"{self._path}: {failure or 'no memory'}")
            error.__cause__ = failure
        if error is None:
            self._take(opened)
        with self._lock:
            is_raised = self._is_waited_for and error is not None and not may_pass(error)
            if not self._is_first_over:
                self._first_error, self._is_first_over = error, True
            if is_raised:
                self._is_closing = True
            self._changed.notify_all()
        if error is not None and not is_raised:
            self._complain(str(error))
        return error is None

    def _pace_of_try(self) -> VerifyPace:
        return VerifyPace(
            lambda: self._is_closing, self._note_long, long_bytes=self._pace.long_bytes
        )

    def _note_long(self, wait_seconds: float) -> None:
        """Note that the catalog is being verified, which may take long."""
        with self._lock:
            self._long_until = min(self._long_until, time.monotonic() + wait_seconds)
            self.complaint = "its catalog is large, and is being verified"
            if not self._is_long:
                self._is_long = True
                _logger.info(
                    "catalog is being verified, nothing is found meanwhile: tier=%s", self._name
                )
            self._changed.notify_all()

    def _require_place(self) -> None:
        """Refuse to make more than the last directory again, or to write beside a missing mount."""
        if self._was_mounted is None:
            return
        if not self._path.parent.is_dir():
            raise CatalogError(f"{self._path}: its parent is gone; make it, or mount it")
        if self._was_mounted and not self._path.is_mount():
            raise CatalogError(f"{self._path}: is not mounted any more; mount it")

    def _take(self, opened: OpenCatalog) -> None:
        if self._was_mounted is None:
            self._was_mounted = self._path.is_mount()
        if self._is_complained:
            _logger.warning("tier is in use again: tier=%s", self._name)
        elif self._is_long:
            _logger.info("catalog is verified, tier is in use: tier=%s", self._name)
        self._is_long = False
        self.complaint = ""
        self._is_complained = False
        self._opened = opened
        self._search_at = time.monotonic() + self._pace.search_seconds_first
        try:
            self._tell(CatalogOpened(opened))
        except ClosedError:  # the tier was closed meanwhile
            opened.catalog.close()

    def _complain(self, cause: str) -> None:
        """Log once that the tier is out of use."""
        self.complaint = cause
        if not self._is_complained:
            self._is_complained = True
            _logger.error(
                "tier is out of use, and opened as soon as it can be: tier=%s cause=%s",
                self._name,
                cause,
            )

    def _look_after(self) -> None:
        opened = self._opened
        if opened is None:
            return
        if opened.catalog.is_lost():
            self._complain(f"{self._path}: was removed, moved or unmounted while it was in use")
            is_given_up = threading.Event()
            with suppress(ClosedError):
                self._tell(CatalogLost(opened, is_given_up))
            self._opened = None
            # What a rank writes later is found by a search for segments without a row.
            until = time.monotonic() + _GIVE_UP_SECONDS_MAX
            while not (self._is_closing or is_given_up.is_set() or time.monotonic() >= until):
                self._pause(_WAIT_SECONDS)
        elif time.monotonic() >= self._search_at:
            self._search_at = time.monotonic() + self._pace.search_seconds
            with suppress(BackendError, ClosedError):  # the next search may see more
                self._tell(SegmentsFound(opened, opened.catalog.segments()))
