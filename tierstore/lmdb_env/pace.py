"""How a long verification treats others: it says that it is long, gives way, and can be ended."""

import sys
import time
from collections.abc import Callable

from tierstore.errors import ClosedError

__all__ = ["LONG_BYTES", "UNHURRIED", "VerifyPace"]

LONG_BYTES = 32 << 20
"""A data file of this size or more is verified in the background of whoever opens it."""

_STEP_SECONDS = 0.001
_REST_SECONDS = 0.0001


def _nothing(_: float) -> None:
    pass


class VerifyPace:
    """The pace of one opening; one thread at a time.

    A short verification goes on without a pause, as its opener waits for it. A long one gives the
    interpreter away after each millisecond, or another thread would have to ask for it each time.
    """

    def __init__(
        self,
        is_over: Callable[[], bool] = bool,
        on_long: Callable[[float], None] = _nothing,
        *,
        long_bytes: int = LONG_BYTES,
    ) -> None:
        """`is_over` ends it; `on_long` is told that it is long, and how long to wait for it."""
        self._is_over = is_over
        self._on_long = on_long
        self._long_bytes = long_bytes
        self._is_long = False
        self._rested_at = 0.0

    def is_long(self, size_bytes: int) -> bool:
        """Return whether it takes long to verify so much."""
        return size_bytes >= self._long_bytes

    def begin(self, size_bytes: int, wait_seconds: float) -> None:
        """Note the size of what is verified now; a long one is worth so many seconds of waiting."""
        if self.is_long(size_bytes):
            self._is_long = True
            self._on_long(wait_seconds)

    def step(self) -> None:
        """Give way if it is long; to be called after each piece of work, of less than 5 ms.

        Raises:
            ClosedError: the verification is not wanted any more.
        """
        if self._is_over():
            raise ClosedError("closed while its database was verified")
        if self._is_long and time.monotonic() - self._rested_at >= _STEP_SECONDS:
            time.sleep(_REST_SECONDS)
            self._rested_at = time.monotonic()


UNHURRIED = VerifyPace(long_bytes=sys.maxsize)
"""Of openers that wait for the end, however long it takes."""
