"""Error messages about a configuration, of bounded length."""

from collections.abc import Sequence

from tierstore.errors import ConfigError
from tierstore.quoting import escaped

__all__ = ["PROBLEM_COUNT_MAX", "Location", "key_path", "problem_at", "problems_of"]

PROBLEM_COUNT_MAX = 20
"""Lines of one message; further problems are counted."""
_KEY_CHARS_MAX = 60

Location = tuple[str | int, ...]


def key_path(location: Location) -> str:
    """Return the path of a key, such as `secondary[0].io.mode`; its parts are escaped."""
    parts = (
        f"[{part}]" if isinstance(part, int) else f".{escaped(part, _KEY_CHARS_MAX)}"
        for part in location
    )
    return "".join(parts).removeprefix(".")


def problem_at(location: Location, what: str) -> ConfigError:
    """Return the error about one key; the empty path means the whole document."""
    return ConfigError(f"{key_path(location)}: {what}" if location else what)


def problems_of(lines: Sequence[str], count: int) -> ConfigError:
    """Return the error about `count` problems; `lines` holds the first of them."""
    shown = list(lines[:PROBLEM_COUNT_MAX])
    if count > len(shown):
        shown.append(f"and {count - len(shown):,} more")
    return ConfigError("\n".join(shown))
