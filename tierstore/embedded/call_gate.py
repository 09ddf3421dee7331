"""One call at a time but where it waits, and none within another one of the same thread."""

import threading
from collections.abc import Callable
from typing import TypeVar

from tierstore.errors import ReentryError
from tierstore.io_pool import is_pool_thread

__all__ = ["Gate"]

Answer = TypeVar("Answer")


class Gate:
    """A monitor: lets the calls of several threads through one by one; refuses one within another.

    A lock per structure would let more of them overlap, but the invariants of the tiers span all.

    A call that waits for something steps out, and others run meanwhile; it comes back before those
    that have not begun. What a call does between two such points is atomic.

    Between any two steps of a call, also while it waits, its thread may run foreign code: a signal
    handler, a `__del__`, a handler of log records. A lock would deadlock such a thread, and a
    re-entrant one would let it change what the call is changing.
    """

    def __init__(self) -> None:
        # Re-entrant only because those can be taken back without an interruption: `step_out`.
        self._lock = threading.RLock()
        self._entrance = threading.RLock()
        """Held by who comes back, until it is in: who begins stands behind it."""
        # A thread is noted before it asks for the lock and until it has left it, so that there is
        # no moment at which it holds the lock and is not known to.
        self._inside: set[int] = set()

    def is_inside(self) -> bool:
        """Return whether a call of this thread is under way, or waits for its turn."""
        return threading.get_ident() in self._inside

    def run(self, call: Callable[[], Answer]) -> Answer:
        """Wait until the calls of other threads wait or have ended, then call.

        Raises:
            ReentryError: the thread is in a call already, or is one that the store works with.
        """
        self._require_outside()
        thread_id = threading.get_ident()
        try:
            self._inside.add(thread_id)
            with self._entrance:
                pass
            with self._lock:
                return call()
        finally:
            self._inside.discard(thread_id)

    def step_out(self, wait: Callable[[], None]) -> None:
        """Let others in while `wait` runs; the thread is inside, and is so again in any case.

        An interruption of `wait` comes through when the thread is back: what is cleaned up then is
        cleaned up inside. Coming back cannot be interrupted, or the lock might be missing then.
        """
        state = (1, threading.get_ident())
        try:
            self._lock.release()
            wait()
        finally:
            # Each lock is asked for by the first step of a block that is entered in any case. The
            # name is what `threading.Condition` calls for the same purpose.
            try:
                self._entrance._acquire_restore(state)  # type: ignore[attr-defined] # noqa: SLF001
            finally:
                try:
                    self._lock._acquire_restore(state)  # type: ignore[attr-defined] # noqa: SLF001
                finally:
                    self._entrance.release()

    def try_run(self, call: Callable[[], None], timeout_seconds: float = 0) -> bool:
        """Call unless calls of other threads last longer than `timeout_seconds`; return whether.

        A negative time has no end. For a thread of the store's own, and for one that must not wait
        long.
        """
        thread_id = threading.get_ident()
        try:
            self._inside.add(thread_id)
            if not self._lock.acquire(timeout=timeout_seconds):
                return False
            try:
                call()
            finally:
                self._lock.release()
        finally:
            self._inside.discard(thread_id)
        return True

    def _require_outside(self) -> None:
        if self.is_inside():
            raise ReentryError(
                "a call of this thread to the store is under way, and this one came from within "
                "it (a signal handler, a __del__, a log handler, a sequence of keys); nothing was "
                "changed: let that code leave the store alone, or note what it wants for later"
            )
        if is_pool_thread():
            raise ReentryError(
                "this thread does the I/O of a store (a backend, a log handler or a __del__ called "
                "from it), and the call would wait for it; nothing was changed: call from a thread "
                "of your own"
            )
