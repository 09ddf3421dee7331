"""A failed system call becomes a reason for the metrics, and one log line per cause."""

import errno
import logging
import threading
from pathlib import Path

from tierstore.bounded_log import Causes, bounded
from tierstore.quoting import quoted
from tierstore.transfer import FailureReason

__all__ = [
    "FailureLog",
    "checked_failures",
    "name_of",
    "reason_of",
    "take_cause",
    "unread_reason_of",
]

_logger = bounded(logging.getLogger(__name__))

_REASONS = {
    errno.ENOENT: FailureReason.ABSENT,
    errno.ENOSPC: FailureReason.FULL,
    errno.EDQUOT: FailureReason.FULL,
}

_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""The process or the machine lacks a resource for now; the device was not asked."""


def reason_of(error: OSError) -> FailureReason:
    """Translate an operating system error: absent, full, or an I/O error for all others."""
    return _REASONS.get(error.errno or 0, FailureReason.IO_ERROR)


def unread_reason_of(error: OSError) -> FailureReason:
    """Return `reason_of`, or STALLED for a read that was not tried: its record is not to blame."""
    return FailureReason.STALLED if error.errno in _SHORT else reason_of(error)


def name_of(error: OSError) -> str:
    """Return the symbol of an operating system error, such as `EIO`."""
    return errno.errorcode.get(error.errno or 0, type(error).__name__)


def checked_failures(
    answer: object, record_count: int, what: str, causes: Causes
) -> dict[int, FailureReason]:
    """Return the failed records that a backend names; all of them if it answers nonsense.

    A backend may be another package's. A record that it names wrongly could be taken for read,
    and an answer of another type would end the thread's task before its job is answered. `what`
    names the call and the tier; `causes` are those that were logged.
    """
    if type(answer) is dict and all(
        type(index) is int and 0 <= index < record_count and type(reason) is FailureReason
        for index, reason in answer.items()
    ):
        return answer
    if causes.is_new(what):
        _logger.error(
            "a backend answers no failed records by index (further ones are only counted): %s "
            "answer=%s records=%d",
            what,
            quoted(answer),
            record_count,
        )
    return dict.fromkeys(range(record_count), FailureReason.IO_ERROR)


_this_thread = threading.local()


def take_cause() -> str:
    """Return the last cause that this thread gave a `FailureLog`, once; empty: none.

    For callers of a backend, which get a reason only.
    """
    cause: str = getattr(_this_thread, "cause", "")
    _this_thread.cause = ""
    return cause


class FailureLog:
    """Logs a failure the first time its cause appears; the metrics count the others."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._causes: set[tuple[str, str]] = set()

    def report(self, action: str, cause: str, *, record_count: int) -> None:
        """Log `cause`, a word of a small fixed set, unless this action failed by it before."""
        _this_thread.cause = cause
        with self._lock:
            known = (action, cause) in self._causes
            self._causes.add((action, cause))
        if not known:
            _logger.warning(
                "%s failed: directory=%s cause=%s records=%d (further ones are only counted)",
                action,
                self._directory,
                cause,
                record_count,
            )
