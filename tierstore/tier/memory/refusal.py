"""The errors for keys that do not fit a call: each names the first of them."""

from collections.abc import Callable, Sequence

from tierstore.key import OffloadKey

__all__ = ["refusal", "refusal_of_first", "require_distinct"]


def refusal(what: str, why: str, key: OffloadKey) -> ValueError:
    """Return the error that `what` cannot be done because of one key."""
    return ValueError(f"{what}: key {key.hex()} {why}; nothing was changed")


def refusal_of_first(
    what: str, why: str, keys: Sequence[OffloadKey], offends: Callable[[OffloadKey], bool]
) -> ValueError:
    """Return the error that names the first of the keys that offends; there is one."""
    return refusal(what, why, next(filter(offends, keys)))


def require_distinct(what: str, keys: Sequence[OffloadKey]) -> None:
    """Refuse a list in which a key comes twice.

    Raises:
        ValueError: a key came twice.
    """
    if len(keys) > 1 and len(set(keys)) != len(keys):
        raise refusal_of_first(what, "came twice", keys, lambda key: keys.count(key) > 1)
