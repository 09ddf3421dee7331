"""The two planes of an open store, and all that has to end with it."""

import atexit
import logging
import math
import os
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from tierstore.bounded_log import bounded
from tierstore.clock import MonotonicClock
from tierstore.embedded.async_calls import begin_wait, end_wait
from tierstore.embedded.call_gate import Gate
from tierstore.embedded.catalog_reader import CatalogReader
from tierstore.embedded.idle_carrier import IdleCarrier
from tierstore.embedded.loop import PlaneLoop
from tierstore.errors import BackendError, CatalogError, ClosedError
from tierstore.executor import TransferExecutor
from tierstore.io_pool import is_pool_thread
from tierstore.metrics import Counters
from tierstore.tier.stack import TierStack

__all__ = ["Patience", "Planes"]

_logger = bounded(logging.getLogger(__name__))

Answer = TypeVar("Answer")

_RAISED_AT_REST = (BackendError, CatalogError)
"""What the planes raise on purpose, when what they hold is consistent."""

_FLUSH_SHARE = 2 / 3
"""Of the time of a close, for a flush of what moves no more."""

_ENDING_SHARE = 1 / 6
"""Of the time of a close, for the threads, and for the catalogs, whatever is left of it."""

_LOOK_SECONDS = 0.02
"""Between two looks whether calls of others have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long calls wait for a tier that does not move: carries out no command."""

    put_seconds: float = 3.0
    """Once, of `put` and of a `get` that needs room: then chunks stay in memory without a record
    in that tier, or leave memory without one, until it moves again."""
    flush_seconds: float = 30.0
    """Of `flush`, in all, for any number of tiers."""
    check_seconds: float = 3.0
    """Of `check`, for what is on its way."""
    close_seconds: float = 15.0
    """Of `close`, in all: the flush, the threads, the catalogs of all tiers."""
    exit_seconds: float = 10.0
    """Of the close at the interpreter's exit, even if everything moves."""


class Planes:
    """Runs calls one at a time but where they wait; closes once: by request, at exit, or when gone.

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
        self._clock = MonotonicClock()
        self.loop = PlaneLoop(stack, executor, self._clock, counters, step_out=self.step_out)
        self.reader = CatalogReader(stack.secondaries)
        self.idle = IdleCarrier(self.loop, self._gate, self._close_abandoned)
        self.is_changing = False
        """Whether an exception now would leave in doubt what the planes hold: of the call that runs
        now, for each has its own."""
        self._raised_at_rest: BaseException | None = None
        """What came while a call waited, when what the planes hold is consistent."""
        self._process_id = os.getpid()
        self._is_in_doubt = False
        self._is_closed = False
        self._has_ended = False
        self._ends_at = math.inf
        self._closer = 0
        """The thread that closes: it goes on when all others are refused."""
        self._close_wanted: set[int] = set()
        """Threads that want to close when their call ends."""

    def open(self) -> None:
        """Start the thread, and see to it that the interpreter closes what is open at its exit."""
        self.idle.open()
        atexit.register(self._close_at_exit)

    def run(self, call: Callable[[], Answer]) -> Answer:
        """Run one call on an open store, in its own process; alone, but where it steps out.

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
            if self._close_wanted and threading.get_ident() in self._close_wanted:
                self.close()

    def step_out(self, wait: Callable[[], None]) -> None:
        """Let others call while the call that runs now waits; what the planes hold is consistent.

        An interruption meanwhile leaves nothing in doubt.

        Raises:
            ClosedError: the store was closed meanwhile, or a call was interrupted.
            WouldWaitError, WithdrawnError: the call is one of `async_calls` that must not wait, or
                whose caller has withdrawn it.
        """
        was_changing, self.is_changing = self.is_changing, False
        try:
            begin_wait()
            self._gate.step_out(wait)
            self._require_open()
            end_wait()
        except BaseException as error:
            self._raised_at_rest = error
            raise
        finally:
            self.is_changing = was_changing

    @property
    def is_over(self) -> bool:
        """Whether calls are refused: what they leave behind is not settled any more."""
        return self._is_closed or self._is_in_doubt

    def close(self) -> None:
        """Flush, stop the threads, release the memory; idempotent.

        From within a call of the same thread: when that call ends.

        Raises:
            ReentryError: called by a thread of the store.
        """
        if os.getpid() != self._process_id:
            return
        thread_id = threading.get_ident()
        if self._gate.is_inside() and not is_pool_thread():
            self._close_wanted.add(thread_id)
            return
        self._close_wanted.discard(thread_id)
        self._gate.run(partial(self._close, self._patience.close_seconds))

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
        self._require_open()
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
            at_rest = error is self._raised_at_rest
            if not at_rest and (in_doubt or not isinstance(error, Exception)):
                self._is_in_doubt = True
                self.idle.stop()
            raise
        finally:
            self._raised_at_rest = None

    def _require_open(self) -> None:
        is_closer = self._is_closed and threading.get_ident() == self._closer
        if self._is_in_doubt or (self._is_closed and not is_closer):
            raise ClosedError("the store is closed, or a call was interrupted; open another")

    def _close(self, seconds: float, flush_seconds_max: float = math.inf) -> None:
        """Close, or wait until another thread has; the thread is inside the gate."""
        if self._is_closed:
            while not self._has_ended:
                self._gate.step_out(partial(self._executor.wait, _LOOK_SECONDS))
            return
        self._closer = threading.get_ident()
        self._is_closed = True
        self._ends_at = self._clock.seconds() + seconds
        with ExitStack() as ending:
            ending.callback(self._note_end)
            ending.callback(atexit.unregister, self._close_at_exit)
            for close in (self._stack.close, self._close_reader, self._executor.close):
                ending.callback(self._end, close, seconds)
            ending.callback(self.idle.close)
            if self._is_in_doubt:
                _logger.error("close after an interruption, without a flush: %s", self._label)
                return
            try:
                self.loop.flush(seconds * _FLUSH_SHARE, flush_seconds_max)
            except (BackendError, ClosedError) as error:
                _logger.error("close without a complete flush: %s cause=%s", self._label, error)
            # As long as tiers move, the flush goes on.
            ends_at = self._clock.seconds() + seconds * (1 - _FLUSH_SHARE)
            self._ends_at = max(self._ends_at, ends_at)

    def _end(self, close: Callable[[float], object], seconds: float) -> None:
        """Close a part of the planes, whose threads may hang, in half of the time that is left."""
        left_seconds = self._ends_at - self._clock.seconds()
        self._gate.step_out(partial(_call, close, max(left_seconds / 2, seconds * _ENDING_SHARE)))

    def _close_reader(self, seconds: float) -> None:
        self.reader.close(min(seconds, _LOOK_SECONDS))  # it has nothing to finish

    def _note_end(self) -> None:
        self._has_ended = True
        self._closer = 0

    def _close_abandoned(self) -> None:
        """Close in the idle thread; no other caller is left."""
        self._gate.try_run(partial(self._close, self._patience.close_seconds), -1)

    def _close_at_exit(self) -> None:
        """Close what the program left open; other threads may hang in their calls for ever."""
        if os.getpid() == self._process_id:
            seconds = self._patience.exit_seconds
            until = self._clock.seconds() + seconds
            if not self._gate.try_run(partial(self._close_until, until), seconds):
                _logger.warning("exit within a call of another thread: %s", self._label)

    def _close_until(self, until: float) -> None:
        """Close by a point in time, or soon after it if it is near."""
        seconds_min = self._patience.exit_seconds * _ENDING_SHARE
        seconds = max(until - self._clock.seconds(), seconds_min)
        self._close(min(seconds, self._patience.close_seconds), seconds * _FLUSH_SHARE)


def _call(close: Callable[[float], object], seconds: float) -> None:
    close(seconds)
