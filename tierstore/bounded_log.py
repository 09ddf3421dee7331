"""Loggers whose lines are bounded, whatever a request or a file has put into a value."""

import logging
from collections.abc import Collection
from numbers import Number

from tierstore.quoting import escaped, quoted

__all__ = ["Causes", "bounded"]

_ARGUMENT_CHARS_MAX = 1_000
"""Of one value in a line; room for a path, and for most messages of our own."""
_CAUSES_MAX = 3
_REMEMBERED_MAX = 64


class Causes:
    """What one object has logged already, so that each cause is one line. Any thread."""

    def __init__(self) -> None:
        self._known: set[tuple[str, ...]] = set()

    def is_new(self, *words: str) -> bool:
        """Take note of a cause; return whether it has to be logged.

        `words` are of a small fixed set, such as the names of exception classes. Should they be
        more than expected, no further one is logged.
        """
        if words in self._known or len(self._known) >= _REMEMBERED_MAX:
            return False
        self._known.add(words)
        return True


def bounded(logger: logging.Logger) -> logging.Logger:
    """Make each value that is logged through `logger` one line of bounded length; return `logger`.

    Of a trace, the frames stay as they are: they are our own code. The words of its exceptions,
    which may quote what a request supplied, are bounded as other values are.
    """
    logger.addFilter(_bound)
    return logger


def _bound(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(map(_bounded_value, record.args))
    elif record.args:  # a single mapping is handed over as it is
        record.args = (_bounded_value(record.args),)
    if record.exc_info and record.exc_info[1] is not None:
        twin = _twin(record.exc_info[1], _CAUSES_MAX)
        record.exc_info = (type(twin), twin, record.exc_info[2])
    return True


def _bounded_value(value: object) -> object:
    if isinstance(value, Number):
        return value  # `%d` takes nothing else
    if isinstance(value, Collection) and not isinstance(value, str):
        return quoted(value)
    return escaped(value, _ARGUMENT_CHARS_MAX)


def _twin(error: BaseException, depth: int) -> BaseException:
    """Return an exception that a trace shows like `error`, but for what it says too much."""
    kind = type(error)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    twin: BaseException = type(kind.__name__, (Exception,), names)(
        escaped(error, _ARGUMENT_CHARS_MAX)
    )
    twin.__traceback__ = error.__traceback__
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and depth:
        # Both are told: what was raised from an error, and what was raised while one was handled.
        twin.__cause__ = _twin(cause, depth - 1)
    return twin
