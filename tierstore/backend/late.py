"""A backend that could not be opened yet: each call tries again, for a device may come back."""

import logging
import threading
from collections.abc import Callable, Sequence

from tierstore.backend.protocol import Backend, RecordIo
from tierstore.errors import BackendError, TierStoreError
from tierstore.transfer import FailureReason, PageRun

__all__ = ["LateBackend"]

_logger = logging.getLogger(__name__)


class LateBackend:
    """Opens a backend at the first call that succeeds in it. See `Backend`."""

    def __init__(self, name: str, open_backend: Callable[[], Backend]) -> None:
        """`open_backend` returns an open backend or raises `BackendError`; `name` is the tier's."""
        self._name = name
        self._open_backend = open_backend
        self._lock = threading.Lock()
        self._backend: Backend | None = None
        self._closed = False
        self._is_logged = False
        self._is_tried = False

    def open(self) -> None:
        """Try to open the backend; idempotent. A device that refuses is tried again by its calls.

        Raises:
            ConfigError, MissingExtraError: the configuration cannot work, here and now.
        """
        self._opened()

    def write(self, records: Sequence[RecordIo]) -> dict[int, FailureReason]:
        """Write, once the backend is open."""
        backend = self._opened()
        if backend is None:
            return dict.fromkeys(range(len(records)), FailureReason.IO_ERROR)
        return backend.write(records)

    def read(self, records: Sequence[RecordIo]) -> dict[int, FailureReason]:
        """Read, once the backend is open."""
        backend = self._opened()
        if backend is None:
            # Not an I/O error, which would count against the records: nobody has tried them.
            return dict.fromkeys(range(len(records)), FailureReason.STALLED)
        return backend.read(records)

    def release(
        self, runs: Sequence[PageRun], empty_segments: Sequence[int]
    ) -> FailureReason | None:
        """Release, once the backend is open."""
        backend = self._opened()
        if backend is None:
            return FailureReason.IO_ERROR
        return backend.release(runs, empty_segments)

    def sync(self) -> None:
        """Flush what was written.

        Raises:
            BackendError: the device refused.
        """
        if self._backend is not None:  # otherwise nothing was written
            self._backend.sync()

    def close(self) -> None:
        """Close the backend, if it was ever opened; idempotent."""
        with self._lock:
            self._closed = True
            if self._backend is not None:
                self._backend.close()

    def _opened(self) -> Backend | None:
        # The lock is held over I/O: the other threads of the tier would wait for the device too.
        with self._lock:
            if self._backend is None and not self._closed:
                try:
                    self._backend = self._open_backend()
                except TierStoreError as error:
                    # Later, what was sound may be gone (a key file): no reason to end a thread.
                    if not self._is_tried and not isinstance(error, BackendError):
                        raise
                    if not self._is_logged:
                        self._is_logged = True
                        _logger.error(
                            "tier is out of use until it opens: tier=%s cause=%s", self._name, error
                        )
                self._is_tried = True
            return self._backend
