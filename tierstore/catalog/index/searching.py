"""Whether some hashes are in none of several sorted arrays, as those of new keys are."""

from array import array
from collections.abc import Callable, Iterable
from typing import TypeAlias

from tierstore.catalog.index.hashes import Numbers
from tierstore.native.library import Loaded, find_library

__all__ = ["Quick", "Search", "address_of"]

Search: TypeAlias = tuple[int, int, int, int]
"""Addresses and lengths of sorted hashes, and of the sorted ones that may be among them."""


class Quick:
    """Searches by one call of the native library, which keeps the interpreter.

    numpy gives it away some three times for each array. Without the library nothing is known here.
    """

    def __init__(self, library: Callable[[], Loaded] = find_library) -> None:
        """Use the library that `library` finds."""
        self._calls = library().calls

    def finds_none(self, searches: Iterable[Search]) -> bool:
        """Return whether it is certain that no search has a match; 0.1 us per hash.

        The caller keeps the arrays that lie at the addresses.
        """
        if self._calls is None:
            return False
        numbers = array("Q")
        for search in searches:
            numbers.extend(search)
        address, length = numbers.buffer_info()
        is_found = self._calls.has_match(address, length // 4)
        return not is_found


def address_of(numbers: Numbers) -> int:
    """Return where an array lies; its items are adjacent, in the byte order of the processor."""
    return int(numbers.ctypes.data)
