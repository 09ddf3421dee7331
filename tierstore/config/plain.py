"""Converts a mapping that a program passes as a configuration to plain data.

The result consists of dict, list, str, int, float, bool, None, bytes and `pathlib` paths, all of
exactly these classes: nothing in it runs the caller's code, contains itself, or is large.
"""

import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from tierstore.config.problems import Location, problem_at
from tierstore.errors import ConfigError
from tierstore.quoting import escaped, named, quoted

__all__ = ["DEPTH_MAX", "NODE_COUNT_MAX", "plain_document"]

DEPTH_MAX = 16
"""Nested mappings and lists; a document needs five levels."""
NODE_COUNT_MAX = 10_000
"""Keys and values of a document; one with all keys and eight tiers has a few hundred."""

_INT_MAX = 1 << 63


def plain_document(source: Mapping[object, object]) -> dict[str, object]:
    """Return a copy of `source` that is plain data.

    Raises:
        ConfigError: a key is not text, a value has a type that YAML cannot express, the document
            is too large, or `source` itself raised.
    """
    try:
        return _Reader().mapping(source, ())
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - the caller's own classes may raise anything
        raise ConfigError(f"the mapping cannot be read: {named(error)}") from None


class _Reader:
    """Copies one document, and counts its nodes."""

    def __init__(self) -> None:
        self._node_count = 0

    def mapping(self, source: Mapping[object, object], where: Location) -> dict[str, object]:
        plain: dict[str, object] = {}
        for key in self._limited(source, where):
            if not issubclass(type(key), str):
                kind = type(key).__name__
                raise problem_at(where, f"the key {quoted(key)} must be text, not {escaped(kind)}")
            name = _text(key, where)
            plain[name] = self._value(source[key], (*where, name))
        return plain

    def _limited(self, source: Iterable[object], where: Location) -> Iterator[object]:
        if len(where) >= DEPTH_MAX:
            raise problem_at(
                where[:3], f"mappings and lists are nested more than {DEPTH_MAX} levels deep"
            )
        for item in source:
            self._node_count += 1
            if self._node_count > NODE_COUNT_MAX:
                raise problem_at((), f"expected at most {NODE_COUNT_MAX} keys and values in all")
            yield item

    def _value(self, value: Any, where: Location) -> object:
        kind = type(value)
        if value is None or kind in (bool, float, bytes):
            return value
        if issubclass(kind, str):
            return _text(value, where)
        if issubclass(kind, Mapping):
            return self.mapping(value, where)
        if issubclass(kind, list | tuple):
            items = enumerate(self._limited(value, where))
            return [self._value(item, (*where, idx)) for idx, item in items]
        if issubclass(kind, os.PathLike):
            return _path(value, where)
        if issubclass(kind, Integral):
            return _integer(value, where)
        if issubclass(kind, Real):
            return float(value)
        raise problem_at(
            where, f"expected text, a number, a boolean, a list or a mapping, got {quoted(value)}"
        )


def _text(value: Any, where: Location) -> str:
    text = str.__getitem__(value, slice(None))  # of a subclass, too
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise problem_at(where, f"{quoted(text)} is not valid Unicode") from error
    return text


def _path(value: Any, where: Location) -> object:
    text = os.fspath(value)
    if not isinstance(text, str):
        raise problem_at(where, f"expected a path of text, got {quoted(text)}")
    return Path(_text(text, where))


def _integer(value: Any, where: Location) -> int:
    number = operator.index(value)  # numpy's integers, too
    if not -_INT_MAX <= number < _INT_MAX:
        # Not quoted: it may be a key in the place of its file.
        raise problem_at(where, "the number is out of range")
    return int(number)
