r"""How a message shows a value that others have made: on one line, and of bounded length.

Requests, files and callers choose such values. A line of a log must not become two of them, nor a
terminal obey them, nor a message take the memory of the process or the time to build it.
"""

from itertools import islice
from pathlib import PurePath
from typing import Any

__all__ = ["CHARS_MAX", "escaped", "named", "quoted"]

CHARS_MAX = 200
"""Characters of one value, if nothing else is asked for."""

_DEPTH_MAX = 3
_ITEMS_MAX = 6
_INT_BITS_MAX = 256


def quoted(value: object, chars_max: int = CHARS_MAX) -> str:
    """Return a value as Python would write it if it is plain data, else the name of its class.

    Longer text ends in `... (3,000,000 characters)`. Runs no code of the value's class, and looks
    at no more of the value than is shown.
    """
    text = _written(value, chars_max, _DEPTH_MAX)
    # An escaped character takes up to ten; a cut may fall amid one.
    return text if len(text) <= 2 * chars_max else f"{text[: 2 * chars_max]}..."


def escaped(value: object, chars_max: int = CHARS_MAX) -> str:
    r"""Return the words of a value on one line: its `str`, with `\n` for what cannot be printed.

    For text, exceptions and objects of our own, whose `str` is known to be cheap.
    """
    try:
        text = str(value)
    except Exception:  # noqa: BLE001 - a message about an error must not become another error
        return f"<{_class_name(value)} without words>"
    length = str.__len__(text)
    shown = _printable(str.__getitem__(text, slice(chars_max)))
    return shown if length <= chars_max else f"{shown}... ({length:,} characters)"


def named(error: BaseException, chars_max: int = CHARS_MAX) -> str:
    """Return an exception's class and words: what its words alone may not tell."""
    return f"{_class_name(error)}: {escaped(error, chars_max)}"


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def _class_name(value: object) -> str:
    return escaped(type.__getattribute__(type(value), "__name__"), 60)


def _written(value: Any, chars_max: int, depth: int) -> str:
    kind = type(value)  # `isinstance` asks the value itself for its class
    if issubclass(kind, str):
        return _text(value, chars_max)
    if issubclass(kind, bytes):
        return _binary(value, chars_max)
    if value is None or kind is bool or kind is float:
        return repr(value)
    if kind is int:
        return _integer(value)
    if kind is list or kind is tuple or kind is dict:
        return _container(value, chars_max, depth)
    if issubclass(kind, PurePath):
        return escaped(value, chars_max)
    return f"<{_class_name(value)}>"


def _text(value: Any, chars_max: int) -> str:
    length = str.__len__(value)
    shown = str.__repr__(str.__getitem__(value, slice(chars_max)))
    return shown if length <= chars_max else f"{shown}... ({length:,} characters)"


def _binary(value: Any, chars_max: int) -> str:
    length = bytes.__len__(value)
    shown = bytes.__repr__(bytes.__getitem__(value, slice(chars_max)))
    return shown if length <= chars_max else f"{shown}... ({length:,} bytes)"


def _integer(value: Any) -> str:
    # Python refuses to write out numbers of some thousand digits.
    bits = value.bit_length()
    return repr(value) if bits <= _INT_BITS_MAX else f"<an integer of {bits:,} bits>"


def _container(value: Any, chars_max: int, depth: int) -> str:
    brackets = "{%s}" if type(value) is dict else "(%s)" if type(value) is tuple else "[%s]"
    if not depth:
        return brackets % "..."
    part = max(chars_max // _ITEMS_MAX, 1)
    if type(value) is dict:
        shown = [
            f"{_written(key, part, depth - 1)}: {_written(inner, part, depth - 1)}"
            for key, inner in islice(value.items(), _ITEMS_MAX)
        ]
    else:
        shown = [_written(inner, part, depth - 1) for inner in value[:_ITEMS_MAX]]
    if len(value) > _ITEMS_MAX:
        shown.append(f"... ({len(value):,} items)")
    return brackets % ", ".join(shown)
