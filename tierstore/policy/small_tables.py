"""Many small tables in the place of a large one.

Python rebuilds a whole `dict` within one insertion: when it grows, and again after as many entries
came and went as it has places. That takes 10 ms and more at 140,000 entries, in the middle of an
engine's step.
"""

from collections.abc import Hashable
from math import ceil, sqrt
from typing import TypeVar

__all__ = ["TABLE_ENTRIES_MAX", "TABLE_PLACES", "small_tables"]

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

TABLE_PLACES = 256
"""An entry belongs to the table at a byte of its key, which is spread like a hash."""
TABLE_ENTRIES_MAX = 10_500
"""Python rebuilds a table of so many entries in 0.1 to 0.4 ms."""


def small_tables(entry_count: int) -> list[dict[Key, Value]]:
    """Return the table for each byte, empty; neighbours share one.

    Beyond `entry_count` entries the tables grow past `TABLE_ENTRIES_MAX` and work as before. That
    of 2,500,000 entries or more as well: there are no more tables than bytes.
    """
    share = min(range(1, TABLE_PLACES + 1), key=lambda share: _place_count(entry_count, share))
    tables: list[dict[Key, Value]] = [{} for _ in range(ceil(TABLE_PLACES / share))]
    return [tables[byte // share] for byte in range(TABLE_PLACES)]


def _place_count(entry_count: int, share: int) -> float:
    """Return how many places Python gives to all tables, if so many bytes share one."""
    if share > 1 and _largest(entry_count, share) > TABLE_ENTRIES_MAX:
        return float("inf")
    full_count, rest = divmod(TABLE_PLACES, share)
    return full_count * _places(entry_count, share) + (_places(entry_count, rest) if rest else 0)


def _places(entry_count: int, share: int) -> int:
    # Three times as many as entries, rounded up to a power of two.
    return 1 << ceil(3 * _largest(entry_count, share)).bit_length()


def _largest(entry_count: int, share: int) -> float:
    """Return how many entries a table of so many bytes has at most, by all odds."""
    mean = entry_count * share / TABLE_PLACES
    return mean + 3 * sqrt(mean)
