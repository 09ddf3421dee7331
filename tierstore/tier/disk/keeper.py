"""Opens a tier's catalog in a thread of its own, and opens it anew after it was lost.

    opening   tried until it succeeds, with growing pauses; the caller who opens the tier waits for
              the first try only, and not for long
    open      looked after once a second: is the path still where it was, and ours?
    lost      the path was removed, moved or unmounted: given up, and opened anew as a fresh owner

Whoever uses the catalog is told (`CatalogNews`), and acts on it in a thread of his own. A device
that hangs keeps this thread alone.
"""

import logging
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
from tierstore.tier.disk.outage import may_pass

__all__ = [
    "CatalogFound",
    "CatalogKeeper",
    "CatalogLost",
    "CatalogNews",
    "CatalogOpened",
    "KeeperPace",
    "OpenCatalog",
]

_logger = bounded(logging.getLogger(__name__))

_WAIT_SECONDS = 0.1
"""Between two looks whether this shall end."""
_GIVE_UP_SECONDS_MAX = 10.0
"""What is being written for a lost catalog is waited for so long; a device may hang."""


@dataclass(frozen=True, slots=True, eq=False)
class OpenCatalog:
    """A catalog, and the one who writes to it."""

    catalog: Catalog
    writer: CatalogWriter


@dataclass(frozen=True, slots=True)
class CatalogOpened:
    """From now on it can be used."""

    opened: OpenCatalog


@dataclass(frozen=True, slots=True)
class CatalogLost:
    """From now on it is nobody's: it has to be closed."""

    opened: OpenCatalog
    is_given_up: threading.Event
    """To be set when nothing more is written for it; for a while nothing is opened before."""


@dataclass(frozen=True, slots=True)
class CatalogFound:
    """These segments, with their pages, lie below its path; some perhaps without a row."""

    opened: OpenCatalog
    segments: dict[int, int]


CatalogNews = CatalogOpened | CatalogLost | CatalogFound


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperPace:
    """When a keeper acts."""

    look_seconds: float = 1.0
    """Between two looks after an open catalog."""
    pause_seconds_min: float = 0.1
    pause_seconds_max: float = 30.0
    """Between two tries to open one: the pause doubles with each failure."""
    orphans_seconds: float = 60.0
    """Between two searches for segments that no row knows, as a rank may leave behind that was
    still writing when its path was removed; the first soon after an opening."""
    orphans_seconds_first: float = 3.0


class CatalogKeeper:
    """The thread of one tier."""

    def __init__(
        self,
        name: str,
        path: Path,
        open_catalog: Callable[[], OpenCatalog],
        tell: Callable[[CatalogNews], None],
        pace: KeeperPace,
    ) -> None:
        """`open_catalog` opens the catalog below `path`; `tell` is called in the thread."""
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
        self._was_mounted: bool | None = None
        """Whether the path was a mount point when it was opened first."""
        self._opened: OpenCatalog | None = None
        self._orphans_at = 0.0
        self._is_complained = False
        self.complaint = "it has not been opened yet"
        """Why the catalog is not open."""

    def open(self) -> None:
        """Start the thread, and with it the first try."""
        self._pool.open()
        self._pool.submit_urgent(self._run)

    def wait_first(self, seconds: float) -> None:
        """Wait until the first try is over, or time is up; others go on in the background.

        Raises:
            TierStoreError: the user has to mend something (`outage`); nothing is tried any more.
        """
        with self._lock:
            wait_for(self._changed, lambda: self._is_first_over, max(0.0, seconds))
            error, is_over = self._first_error, self._is_first_over
            self._is_waited_for = False
        if error is not None and not may_pass(error):
            raise error
        if not is_over:
            self._complain(f"its device does not answer within {seconds:.0f} s")

    def look(self) -> None:
        """Look after the catalog now: something has failed."""
        with self._lock:
            self._is_wanted = True
            self._changed.notify_all()

    def begin_close(self) -> None:
        """Let the thread end; it does nothing more, but for what it is just doing."""
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
            opened = self._open_catalog()
        except TierStoreError as failure:
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

    def _require_place(self) -> None:
        """Refuse to make more than the last directory anew, or to write beside a missing mount."""
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
        self.complaint = ""
        self._is_complained = False
        self._opened = opened
        self._orphans_at = time.monotonic() + self._pace.orphans_seconds_first
        try:
            self._tell(CatalogOpened(opened))
        except ClosedError:  # nobody is there any more
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
            # What a rank writes later is found by a search for orphans.
            until = time.monotonic() + _GIVE_UP_SECONDS_MAX
            while not (self._is_closing or is_given_up.is_set() or time.monotonic() >= until):
                self._pause(_WAIT_SECONDS)
        elif time.monotonic() >= self._orphans_at:
            self._orphans_at = time.monotonic() + self._pace.orphans_seconds
            with suppress(BackendError, ClosedError):  # the next search may see more
                self._tell(CatalogFound(opened, opened.catalog.segments()))
