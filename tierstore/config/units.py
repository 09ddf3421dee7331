"""Sizes and durations as people write them: a number and its unit, never a bare number."""

import re
from decimal import Decimal

__all__ = ["DURATION_PATTERN", "SIZE_PATTERN", "parse_duration", "parse_size"]

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


def parse_size(text: object) -> int:
    """Return the bytes that `text` means, rounded down: `20GiB`, `512 MiB`, `1.5GB`, `4096B`.

    Raises:
        ValueError: the unit is missing or unknown, or no device is as large; the message says what
            to write.
    """
    match = re.fullmatch(SIZE_PATTERN, text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(
            f"expected a size such as '20GiB', got {text!r}"
            + _remedy(
                text, "GiB" if _is_small(text) else "B", "B, KiB, MiB, GiB, TiB or KB, MB, GB, TB"
            )
        )
    size = Decimal(match[1]) * _SIZE_UNITS[match[2]]
    if size > _SIZE_MAX:
        raise ValueError(f"expected at most 1048576TiB, got {text}")
    return int(size)


def parse_duration(text: object) -> float:
    """Return the seconds that `text` means: `2s`, `500ms`, `1.5 min`.

    Raises:
        ValueError: the unit is missing or unknown; the message says what to write.
    """
    match = re.fullmatch(DURATION_PATTERN, text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(
            f"expected a duration such as '2s', got {text!r}" + _remedy(text, "s", "ms, s or min")
        )
    return float(Decimal(match[1]) * _DURATION_UNITS[match[2]])


def _is_small(text: object) -> bool:
    """Return whether a bare number cannot have meant bytes."""
    return isinstance(text, int | float) and text < 1 << 20


def _remedy(text: object, unit: str, units: str) -> str:
    is_number = isinstance(text, int | float) and not isinstance(text, bool)
    example = f"add a unit, such as '{text}{unit}'; " if is_number else ""
    return f": {example}units are {units}"
