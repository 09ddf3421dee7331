"""A task whose I/O stands still for as long as somebody else says."""

import threading
from collections.abc import Callable

__all__ = ["HangingTask", "stand_still"]

_SECONDS_MAX = 120
"""A task takes no longer, unless it waits for a lock that another one holds over its I/O."""


class HangingTask(threading.Thread):
    """Runs a task up to its first `stand_still`, and the rest of it when it may go on.

    Whoever starts it or lets it go on waits meanwhile: no two threads ever run side by side.
    """

    def __init__(self, task: Callable[[], None], until_step: int) -> None:
        """`until_step` is for the caller: when the task may go on."""
        super().__init__(name="hanging task", daemon=True)
        self.until_step = until_step
        self.has_ended = False
        self._task = task
        self._rests = threading.Event()
        self._goes_on = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the task; for `threading`."""
        try:
            self._task()
        except BaseException as error:  # noqa: BLE001 - raised where the task is waited for
            self._error = error
        self.has_ended = True
        self._rests.set()

    def begin(self) -> None:
        """Run it up to its I/O, or to its end if it does none."""
        self.start()
        self._wait()

    def end(self) -> None:
        """Let its I/O go on, and the task end; idempotent."""
        self._rests.clear()
        self._goes_on.set()
        self.join(_SECONDS_MAX)
        assert self.has_ended, "a task that hung does not end"
        self._raise()

    def stand_still(self) -> None:
        """Return when the task may go on; called by itself."""
        self._rests.set()
        self._goes_on.wait()

    def _wait(self) -> None:
        assert self._rests.wait(_SECONDS_MAX), "a task neither comes to its I/O nor ends"
        self._raise()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def stand_still() -> None:
    """Hang, if the task that runs here is one that hangs; its I/O calls this."""
    task = threading.current_thread()
    if isinstance(task, HangingTask):
        task.stand_still()
