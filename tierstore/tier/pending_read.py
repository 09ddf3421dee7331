"""A read of a catalog that another thread runs, and its answer."""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from tierstore.bounded_log import bounded
from tierstore.errors import BackendError, TierStoreError

__all__ = ["PendingRead"]

_logger = bounded(logging.getLogger(__name__))

Answer = TypeVar("Answer")


class PendingRead(Generic[Answer]):
    """One read, and its result or error."""

    def __init__(self, call: Callable[[], Answer]) -> None:
        self._call = call
        self._answer: list[Answer] = []
        self._error: BaseException | None = None
        self.is_done = False

    def run(self) -> None:
        """Run the read, in the thread."""
        try:
            self._answer.append(self._call())
        except TierStoreError as error:
            self._error = error
        except Exception as error:  # the outermost frame of a thread: a bug must not end it
            self._error = error
            with suppress(MemoryError):
                _logger.exception("read of a catalog failed")
        self.is_done = True

    def answer(self) -> Answer:
        """Return the answer, or raise what the read raised.

        Raises:
            BackendError: the read is not done yet.
        """
        if not self.is_done:
            raise BackendError("its catalog does not answer; check the health of the device")
        if self._error is not None:
            raise self._error
        return self._answer[0]
