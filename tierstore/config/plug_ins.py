"""Parts that other packages provide, found by the entry points of installed packages.

A package declares its part in `pyproject.toml`. A configuration names it like a built-in part:

    [project.entry-points."tierstore.policies"]
    by_priority = "my_package.policy:PriorityPolicy"

    primary: {capacity: 20GiB, eviction: by_priority}

A built-in name always wins, so that no package can change the meaning of an existing file.
"""

import difflib
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import get_args

from tierstore.config.model import Cascade
from tierstore.errors import ConfigError
from tierstore.quoting import named, quoted

__all__ = [
    "BUILT_IN_NAMES",
    "PLUG_IN_NAME_PATTERN",
    "PlugInGroup",
    "find_plug_in",
    "load_plug_in",
    "require_members",
]

PLUG_IN_NAME_PATTERN = r"^[A-Za-z0-9_.-]{1,64}$"

_LOADED_MAX = 64
_SHOWN_MAX = 10


class PlugInGroup(StrEnum):
    """A kind of part, by the group of its entry points."""

    POLICIES = "tierstore.policies"
    """`primary.eviction`: a function that returns an `EvictionPolicy`."""
    ADMISSIONS = "tierstore.admissions"
    """`secondary[].cascade`: which chunks are written to a tier, and when."""
    BACKENDS = "tierstore.backends"
    """`secondary[].backend`: a function that returns a `Backend`."""
    TIERS = "tierstore.tiers"
    """`secondary[].tier`: a function that returns a `SecondaryTier`."""


BUILT_IN_NAMES: dict[PlugInGroup, tuple[str, ...]] = {
    PlugInGroup.POLICIES: ("lru", "arc"),
    PlugInGroup.ADMISSIONS: get_args(Cascade),
    PlugInGroup.BACKENDS: ("file", "lmdb"),
    PlugInGroup.TIERS: ("disk",),
}

_KEYS = {
    PlugInGroup.POLICIES: "primary.eviction",
    PlugInGroup.ADMISSIONS: "secondary[].cascade",
    PlugInGroup.BACKENDS: "secondary[].backend",
    PlugInGroup.TIERS: "secondary[].tier",
}


def load_plug_in(group: str, name: str) -> Callable[..., object]:
    """Return the object of the entry point `name` of `group`; it is imported once per process.

    `group` is a value of `PlugInGroup`. The caller handles built-in names.

    Raises:
        ConfigError: no installed package has it, several have, or it cannot be imported. The
            message names the key, the value, the names that exist, and the remedy.
    """
    kind = PlugInGroup(group)
    try:
        return find_plug_in(kind, name)
    except ValueError as error:
        raise ConfigError(f"{_KEYS[kind]}: {error}") from error.__cause__


def find_plug_in(group: PlugInGroup, name: object) -> Callable[..., object]:
    """Do as `load_plug_in`, for a caller that adds the key to the message itself.

    Raises:
        ValueError: as `load_plug_in`, without the key.
    """
    if not isinstance(name, str):
        raise ValueError(_unknown(group, name, ()))  # noqa: TRY004 - pydantic asks for it
    return _load(group, name)


def require_members(made: object, protocol: type, what: str) -> None:
    """Refuse an object from a plug-in that lacks a member of its protocol.

    Raises:
        ConfigError: names the missing members; `what` names key and plug-in.
    """
    members = {*vars(protocol), *getattr(protocol, "__annotations__", {})}
    public = (name for name in members if not name.startswith("_") or name == "__len__")
    try:
        lacking = sorted(name for name in public if not hasattr(made, name))
    except Exception as error:  # of a property
        raise ConfigError(
            f"{what}: the plug-in made {quoted(made)}, which cannot be looked at: {named(error)}"
        ) from error
    if lacking:
        raise ConfigError(
            f"{what}: the plug-in made {quoted(made)}, which has no {', '.join(lacking)}; "
            f"it must implement {protocol.__module__}.{protocol.__name__}"
        )


@lru_cache(maxsize=_LOADED_MAX)
def _load(group: PlugInGroup, name: str) -> Callable[..., object]:
    # Lazy, since it reads the metadata of all installed packages.
    from importlib.metadata import entry_points

    try:
        installed = list(entry_points(group=group))
    except Exception as error:
        raise ValueError(
            f"the entry points of {group} cannot be read: {named(error)}; fix or remove the "
            "package that declares them"
        ) from error
    found = {point.value: point for point in installed if point.name == name}
    if not found:
        raise ValueError(_unknown(group, name, (point.name for point in installed)))
    if len(found) > 1:
        raise ValueError(
            f"several installed packages define {quoted(name)} ({', '.join(sorted(found))}); "
            "remove all but one"
        )
    [(value, point)] = found.items()
    try:
        loaded = point.load()
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"the plug-in {quoted(name)} ({quoted(value)}) cannot be imported: {named(error)}; "
            "fix or remove its package"
        ) from error
    if not callable(loaded):
        raise ValueError(  # noqa: TRY004 - as above
            f"the plug-in {quoted(name)} ({quoted(value)}) must be a class or a function, not "
            f"{quoted(loaded)}; fix its package"
        )
    return loaded  # type: ignore[no-any-return] # `callable` has checked it


def _unknown(group: PlugInGroup, name: object, installed: Iterable[str]) -> str:
    built_in = BUILT_IN_NAMES[group]
    names = sorted(set(installed))
    nearest = (
        difflib.get_close_matches(name[:64], [*built_in, *names], n=1, cutoff=0.5)
        if isinstance(name, str)
        else []
    )
    expected = _either(list(map(quoted, built_in)))
    there = ", ".join([*map(quoted, names[:_SHOWN_MAX]), *(["..."] if names[_SHOWN_MAX:] else [])])
    remedy = (
        f"did you mean {quoted(nearest[0])}?" if nearest else "install the package that defines it;"
    )
    return (
        f"expected {expected}, got {quoted(name)}; {remedy} plug-ins of {group} in this "
        f"environment: {there or 'none'}"
    )


def _either(words: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
