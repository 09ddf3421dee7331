"""Sizes and durations: a number with a unit or, from a program, a bare number.

In a YAML file a bare number is refused: 20 may mean bytes or GiB. In Python it is an
int of bytes, or a number of seconds.
"""

import re
from dataclasses import dataclass
from decimal import Decimal

from tierstore.quoting import quoted

__all__ = [
    "DURATION_PATTERN",
    "SIZE_PATTERN",
    "parse_duration",
    "parse_size",
]

_SIZE_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}
_DURATION_UNITS = {"ms": Decimal("0.001"), "s": Decimal(1), "min": Decimal(60)}

SIZE_PATTERN = rf"^([0-9]+(?:\.[0-9]+)?) ?({'|'.join(_SIZE_UNITS)})$"
"""A regular expression that JSON Schema understands too."""
_SIZE_MAX = _SIZE_UNITS["TiB"] << 20
DURATION_PATTERN = rf"^([0-9]+(?:\.[0-9]+)?) ?({'|'.join(_DURATION_UNITS)})$"
_SECONDS_MIN, _SECONDS_MAX = 0.001, 3600.0


@dataclass(frozen=True, slots=True)
class _Quantity:
    """The words of an error message about a value that is not such a quantity."""

    expected: str
    of_program: str
    small_unit: str
    """What a bare number below 2**20 may have meant."""
    large_unit: str
    units: str


_SIZE = _Quantity(
    "a size such as '20GiB'",
    "an int of bytes",
    "GiB",
    "B",
    "B, KiB, MiB, GiB, TiB or KB, MB, GB, TB",
)
_DURATION = _Quantity("a duration such as '2s'", "a number of seconds", "s", "s", "ms, s or min")


def parse_size(raw: object, *, is_python: bool = False) -> int:
    """Return the number of bytes, rounded down, of `20GiB`, `512 MiB`, `1.5GB` or `4096B`.

    With `is_python`, an int of bytes is accepted, too.

    Raises:
        ValueError: the unit is missing or unknown, or the size is larger than any device; the
            message says what to write.
    """
    size: Decimal | int
    if is_python and type(raw) is int:
        size = raw
    else:
        match = re.fullmatch(SIZE_PATTERN, raw) if isinstance(raw, str) else None
        if match is None:
            raise ValueError(_problem(raw, _SIZE, is_python=is_python))
        size = Decimal(match[1]) * _SIZE_UNITS[match[2]]
    if size < 0:
        raise ValueError(f"expected bytes from 0 up, got {quoted(raw)}")
    if size > _SIZE_MAX:
        raise ValueError(f"expected at most 1048576TiB, got {quoted(raw)}")
    return int(size)


def parse_duration(raw: object, *, is_python: bool = False) -> float:
    """Return the seconds of `2s`, `500ms` or `1.5 min`; with `is_python`, also of a number.

    Raises:
        ValueError: the unit is missing or unknown, or the duration is shorter than a millisecond or
            longer than an hour; the message says what to write.
    """
    if is_python and isinstance(raw, int | float) and not isinstance(raw, bool):
        seconds = float(raw)
    else:
        match = re.fullmatch(DURATION_PATTERN, raw) if isinstance(raw, str) else None
        if match is None:
            raise ValueError(_problem(raw, _DURATION, is_python=is_python))
        seconds = float(Decimal(match[1]) * _DURATION_UNITS[match[2]])
    if not _SECONDS_MIN <= seconds <= _SECONDS_MAX:
        raise ValueError(f"expected 1ms to 60min, got {quoted(raw)}")
    return seconds


def _problem(raw: object, quantity: _Quantity, *, is_python: bool) -> str:
    example = ""
    if isinstance(raw, int | float) and not isinstance(raw, bool) and not is_python:
        unit = quantity.small_unit if raw < 1 << 20 else quantity.large_unit
        example = f"add a unit, such as '{quoted(raw)}{unit}'; "
    or_number = f", or give {quantity.of_program}" if is_python else ""
    return (
        f"expected {quantity.expected}, got {quoted(raw)}: "
        f"{example}units are {quantity.units}{or_number}"
    )
