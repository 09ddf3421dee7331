"""Calls that threads make for callers who do not wait in a thread, and who may withdraw them.

A call begins in the first lane, whose one thread waits for no tier. Where it would wait, it begins
again in the second one, whose few threads do. So chunks in memory are put and got however many
calls wait for a device that hangs.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

from tierstore.errors import ClosedError
from tierstore.io_pool import IoPool

__all__ = [
    "AsyncCall",
    "Lanes",
    "WithdrawnError",
    "WouldWaitError",
    "begin_wait",
    "end_step",
    "end_wait",
    "may_wait",
    "steps_done",
    "touching",
]

Answer = TypeVar("Answer")

_CLOSE_SECONDS = 5.0
"""For threads whose calls have nothing to wait for any more."""


class WithdrawnError(Exception):
    """The caller does not want the call any more; only its thread sees this."""


class WouldWaitError(Exception):
    """The call would wait for a tier in a thread that must not; only this thread sees it."""


class _ThisThread(threading.local):
    call: "AsyncCall[Any] | None" = None


_this_thread = _ThisThread()


class AsyncCall(Generic[Answer]):
    """One call, made by a thread for a caller elsewhere.

    The caller may withdraw it at any time. Its thread touches the caller's memory only within
    `touching`, so that there is a moment from which on it does not.
    """

    def __init__(self, call: Callable[[], Answer]) -> None:
        self.answer: Future[Answer] = Future()
        self.may_wait = True
        self.step_count = 0
        """Steps that the call has done; it skips them when it begins again."""
        self._call: Callable[[], Answer] | None = call
        self._lock = threading.RLock()
        self._is_withdrawn = False
        self._toucher = 0
        """The thread that touches the caller's memory now."""
        self._untouched: Future[None] = Future()

    def run(self, *, may_wait: bool) -> None:
        """Call, and answer.

        Raises:
            WouldWaitError: not answered; to be run where it may wait.
        """
        with self._lock:
            call = self._call
        if call is None:
            return
        self.may_wait = may_wait
        _this_thread.call = self
        try:
            answer = call()
        except WouldWaitError:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the caller's
            with self._lock:
                if not self._is_withdrawn:
                    self.answer.set_exception(error)
        else:
            self.answer.set_result(answer)
        finally:
            _this_thread.call = None

    def take(self) -> Answer:
        """Return the answer, which is there, or raise what was raised; once.

        The trace of an error has frames that have this call. If that kept the error, the caller's
        arrays would stay with both until the garbage collector comes.
        """
        answer, self.answer = self.answer, Future()
        try:
            return answer.result()
        finally:
            del answer

    def withdraw(self) -> Future[None]:
        """Give the call up; what is returned is done when the caller's memory is not touched.

        The call ends at its next step: at once if it has not begun, or where it waits.
        """
        with self._lock:
            self._is_withdrawn = True
            self.answer = Future()  # an error that came meanwhile: as in `take`
            self._call = None  # and with it the caller's arrays, if it has not begun
            if not self._toucher and not self._untouched.done():
                self._untouched.set_result(None)
        return self._untouched

    def withdraw_now(self) -> None:
        """Give the call up, and wait while its thread copies a batch; for who cannot come back."""
        untouched = self.withdraw()
        if self._toucher != threading.get_ident():  # the garbage collector calls in any thread
            untouched.result()

    def require_wanted(self) -> None:
        """Raise `WithdrawnError` if the caller has withdrawn the call."""
        with self._lock:
            if self._is_withdrawn:
                raise WithdrawnError

    def begin_touch(self) -> None:
        """Begin to use the caller's memory, or raise `WithdrawnError`."""
        with self._lock:
            self.require_wanted()
            self._toucher = threading.get_ident()

    def end_touch(self) -> None:
        """End what `begin_touch` began."""
        with self._lock:
            self._toucher = 0
            if self._is_withdrawn:
                self._untouched.set_result(None)


@contextmanager
def touching() -> Iterator[None]:
    """Use the caller's memory; raises `WithdrawnError` if it is not ours to use any more."""
    call = _this_thread.call
    if call is None:
        yield
        return
    call.begin_touch()
    try:
        yield
    finally:
        call.end_touch()


def may_wait() -> bool:
    """Return whether the call of this thread may wait for a tier."""
    return _this_thread.call is None or _this_thread.call.may_wait


def steps_done() -> int:
    """Return how many steps the call of this thread had done before it began again."""
    return 0 if _this_thread.call is None else _this_thread.call.step_count


def end_step() -> None:
    """Note a step that must not be done twice; all calls do theirs in the same order each time."""
    if _this_thread.call is not None:
        _this_thread.call.step_count += 1


def begin_wait() -> None:
    """Raise `WouldWaitError` if the call of this thread must not wait."""
    if not may_wait():
        raise WouldWaitError


def end_wait() -> None:
    """Raise `WithdrawnError` if the caller does not want this thread's call any more."""
    if _this_thread.call is not None:
        _this_thread.call.require_wanted()


class Lanes:
    """The threads that make the calls to one store; they hold no store between calls.

    What waits for a thread is not bounded here: each call has a caller who waits for it.
    """

    def __init__(self, waiting_count: int) -> None:
        """So many calls may wait for a tier at once; others wait for one of them to end."""
        self._first = IoPool(1, "tierstore-call", serves_callers=True)
        self._waiting = IoPool(waiting_count, "tierstore-wait", serves_callers=True)
        self._process_id = os.getpid()
        self._lock = threading.RLock()
        self._ended: Future[None] | None = None

    def open(self) -> None:
        """Start the first lane.

        Raises:
            ConfigError: the system starts no more threads.
        """
        self._first.open()

    def open_waiting(self) -> None:
        """Start the second lane: may take a while, on a busy machine.

        Raises:
            ConfigError: the system starts no more threads.
        """
        self._waiting.open()

    def begin(self, call: Callable[[], Answer], *, waits: bool = False) -> AsyncCall[Answer]:
        """Let a thread make a call; `waits`: it would wait anyway.

        Raises:
            ClosedError: after `close`, or in a forked process, which has no such threads.
        """
        if os.getpid() != self._process_id:
            raise ClosedError(
                f"the store belongs to process {self._process_id}, not to one forked from it"
            )
        begun = AsyncCall(call)
        with self._lock:
            if self._ended is not None:
                raise ClosedError("the store is closed; open another")
            if waits:
                self._waiting.submit_urgent(partial(begun.run, may_wait=True))
            else:
                self._first.submit_urgent(partial(self._run_first, begun))
        return begun

    def begin_close(self, last: Callable[[], None]) -> Future[None]:
        """Let no call begin after `last`, and end the threads; done when all have ended.

        Idempotent: a second `last` is not called. Done at once in a forked process.
        """
        ended: Future[None] = Future()
        if os.getpid() != self._process_id:
            ended.set_result(None)
            return ended
        with self._lock:
            if self._ended is None:
                self._ended = ended
                self._first.submit_urgent(partial(self._end, last, ended))
                self._first.begin_close()
            return self._ended

    def abandon(self) -> None:
        """Let the threads end: no caller is left. Called by the garbage collector: waits not."""
        if os.getpid() == self._process_id:
            self._first.begin_close()
            self._waiting.begin_close()

    def _run_first(self, call: AsyncCall[Any]) -> None:
        try:
            call.run(may_wait=False)
        except WouldWaitError:
            # Before `_end`, which this lane runs last, so that its threads are there still.
            self._waiting.submit_urgent(partial(call.run, may_wait=True))

    def _end(self, last: Callable[[], None], ended: Future[None]) -> None:
        try:
            last()
        except BaseException as error:  # noqa: BLE001 - it is the closer's
            self._waiting.begin_close()
            ended.set_exception(error)
        else:
            self._waiting.close(_CLOSE_SECONDS)
            ended.set_result(None)
