"""The two planes of an open store, and all that has to end with it."""

import atexit
import logging
import math
import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from tierstore.bounded_log import bounded
from tierstore.clock import MonotonicClock
from tierstore.errors import BackendError, CatalogError, ClosedError
from tierstore.executor import TransferExecutor
from tierstore.gate import Gate
from tierstore.idle_carrier import IdleCarrier
from tierstore.io_pool import is_pool_thread
from tierstore.metrics import Counters
from tierstore.plane_loop import PlaneLoop
from tierstore.tier.stack import TierStack

__all__ = ["Patience", "Planes"]

_logger = bounded(logging.getLogger(__name__))

Answer = TypeVar("Answer")

_RAISED_AT_REST = (BackendError, CatalogError)
"""What the planes raise on purpose, when what they hold is consistent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long calls wait for a tier that does not move."""

    put_seconds: float = 10.0
    """Then its demotes are dropped, until it moves again."""
    flush_seconds: float = 60.0
    close_seconds: float = 10.0
    """Of each step of `close`: the flush of what moves no more, the threads, the catalogs."""
    exit_seconds: float = 10.0
    """Of the flush at the interpreter's exit, even if everything moves."""


class Planes:
    """Runs calls one at a time, and closes once: by request, at exit, or when the store is gone.

    The store refers to its planes, never they to it: their threads keep no store alive.
    """

    def __init__(
        self,
        stack: TierStack,
        executor: TransferExecutor,
        counters: Counters,
        *,
        label: str,
        patience: Patience,
    ) -> None:
        """Take over both planes; `label` says in messages which store it is."""
        self._stack = stack
        self._executor = executor
        self._label = label
        self._patience = patience
        self._gate = Gate()
        self.loop = PlaneLoop(stack, executor, MonotonicClock(), counters)
        self.idle = IdleCarrier(self.loop, self._gate, self._close_abandoned)
        self.is_changing = False
        """Whether an exception now would leave in doubt what the planes hold."""
        self._process_id = os.getpid()
        self._is_torn = False
        self._is_closed = False
        self._is_close_wanted = False

    def open(self) -> None:
        """Start the thread, and see to it that the interpreter closes what is open at its exit."""
        self.idle.open()
        atexit.register(self._close_at_exit)

    def run(self, call: Callable[[], Answer]) -> Answer:
        """Run one call: alone, on an open store, in its own process.

        Raises:
            ReentryError: a call of this thread is under way.
            ClosedError: closed, torn by an interruption, or of another process.
        """
        if os.getpid() != self._process_id:  # before the gate: a fork copies one that is shut
            raise ClosedError(
                f"the store belongs to process {self._process_id}, not to one forked from it"
            )
        try:
            return self._gate.run(partial(self._guard, call))
        finally:
            if self._is_close_wanted:
                self.close()

    def close(self) -> None:
        """Flush, stop the threads, release the memory; idempotent.

        From within a call of the same thread: when that call ends.

        Raises:
            ReentryError: called by a thread of the store.
        """
        if os.getpid() != self._process_id:
            return
        if self._gate.is_inside() and not is_pool_thread():
            self._is_close_wanted = True
            return
        self._gate.run(self._close)

    def abandon(self) -> None:
        """Take note that the store is gone; the planes close in their own thread."""
        if self._is_closed or os.getpid() != self._process_id:
            return
        self.idle.abandon()
        warnings.warn(
            f"a TierStore was dropped without close(): {self._label}; it is flushed and closed in "
            "the background, use `with` or call close() to know when",
            ResourceWarning,
            stacklevel=2,
        )

    def _guard(self, call: Callable[[], Answer]) -> Answer:
        if self._is_closed or self._is_torn:
            raise ClosedError("the store is closed, or a call was interrupted; open another")
        self.is_changing = False
        try:
            try:
                return call()
            finally:
                self.idle.wake()
        except BaseException as error:
            # It came between any two steps, by a signal handler or a bug: two chunks might own
            # one slot.
            in_doubt = self.is_changing and not isinstance(error, _RAISED_AT_REST)
            if in_doubt or not isinstance(error, Exception):
                self._is_torn = True
                self.idle.stop()
            raise

    def _close(self, flush_seconds_max: float = math.inf) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        seconds = min(self._patience.close_seconds, flush_seconds_max)
        with ExitStack() as ending:
            ending.callback(atexit.unregister, self._close_at_exit)
            ending.callback(self._stack.close, seconds)
            ending.callback(self._executor.close, seconds)
            ending.callback(self.idle.close)
            if self._is_torn:
                return
            try:
                self.loop.flush(seconds, flush_seconds_max)
            except BackendError as error:
                _logger.error("close without a complete flush: %s cause=%s", self._label, error)

    def _close_abandoned(self) -> None:
        """Close in the idle thread; nobody else can call any more."""
        self._gate.try_run(self._close, -1)

    def _close_at_exit(self) -> None:
        """Close what the program left open; other threads may hang in their calls for ever."""
        if os.getpid() == self._process_id:
            seconds = self._patience.exit_seconds
            if not self._gate.try_run(partial(self._close, seconds), seconds):
                _logger.warning("exit within a call of another thread: %s", self._label)
