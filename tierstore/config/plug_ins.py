"""Parts that other packages bring along: found by the entry points of what is installed.

A package names its part in `pyproject.toml`, a configuration names it where it names a built-in:

    [project.entry-points."tierstore.policies"]
    by_priority = "my_package.policy:PriorityPolicy"

    primary: {capacity: 20GiB, eviction: by_priority}

A built-in name always wins, so that no package can change what an existing file means.
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
    """Tiers that are no directory of this machine."""


BUILT_IN_NAMES: dict[PlugInGroup, tuple[str, ...]] = {
    PlugInGroup.POLICIES: ("lru", "arc"),
    PlugInGroup.ADMISSIONS: get_args(Cascade),
    PlugInGroup.BACKENDS: ("file", "lmdb"),
    PlugInGroup.TIERS: (),
}

_KEYS = {
    PlugInGroup.POLICIES: "primary.eviction",
    PlugInGroup.ADMISSIONS: "secondary[].cascade",
    PlugInGroup.BACKENDS: "secondary[].backend",
    PlugInGroup.TIERS: "secondary[].tier",
}


def load_plug_in(group: str, name: str) -> Callable[..., object]:
    """Return what the entry point `name` of `group` names; it is imported once per process.

    `group` is a value of `PlugInGroup`; built-in names are the caller's to know.

    Raises:
        ConfigError: no installed package has it, several have, or it cannot be imported. The
            message names the key, the value, what there is, and the remedy.
    """
    kind = PlugInGroup(group)
    try:
        return find_plug_in(kind, name)
    except ValueError as error:
        raise ConfigError(f"{_KEYS[kind]}: {error}") from error.__cause__


def find_plug_in(group: PlugInGroup, name: object) -> Callable[..., object]:
    """Do as `load_plug_in` for a caller that knows the key itself.

    Raises:
        ValueError: as `load_plug_in`, without the key.
    """
    if not isinstance(name, str):
        raise ValueError(_unknown(group, name, ()))  # noqa: TRY004 - pydantic asks for it
    return _load(group, name)


def require_members(made: object, protocol: type, what: str) -> None:
    """Refuse what a plug-in has made if it lacks a member of its protocol.

    Raises:
        ConfigError: names what it lacks; `what` names key and plug-in.
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
            f"it has to do what {protocol.__module__}.{protocol.__name__} says"
        )


@lru_cache(maxsize=_LOADED_MAX)
def _load(group: PlugInGroup, name: str) -> Callable[..., object]:
    # Only who names a plug-in waits for the metadata of all installed packages to be read.
    from importlib.metadata import entry_points

    try:
        installed = list(entry_points(group=group))
    except Exception as error:
        raise ValueError(
            f"the entry points of {group} cannot be read: {named(error)}; mend or remove the "
            "package that has them"
        ) from error
    found = {point.value: point for point in installed if point.name == name}
    if not found:
        raise ValueError(_unknown(group, name, (point.name for point in installed)))
    if len(found) > 1:
        raise ValueError(
            f"{quoted(name)} is named by several installed packages ({', '.join(sorted(found))}); "
            "remove all but one"
        )
    [(value, point)] = found.items()
    try:
        loaded = point.load()
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"the plug-in {quoted(name)} ({quoted(value)}) cannot be imported: {named(error)}; "
            "mend or remove its package"
        ) from error
    if not callable(loaded):
        raise ValueError(  # noqa: TRY004 - as above
            f"the plug-in {quoted(name)} ({quoted(value)}) is no class or function, but "
            f"{quoted(loaded)}; mend its package"
        )
    return loaded  # type: ignore[no-any-return] # `callable` tells that it is one


def _unknown(group: PlugInGroup, name: object, installed: Iterable[str]) -> str:
    built_in = BUILT_IN_NAMES[group]
    names = sorted(set(installed))
    nearest = (
        difflib.get_close_matches(name[:64], [*built_in, *names], n=1, cutoff=0.5)
        if isinstance(name, str)
        else []
    )
    expected = _either([*map(quoted, built_in), *([] if built_in else ["a plug-in"])])
    there = ", ".join([*map(quoted, names[:_SHOWN_MAX]), *(["..."] if names[_SHOWN_MAX:] else [])])
    remedy = (
        f"did you mean {quoted(nearest[0])}?" if nearest else "install the package that has it;"
    )
    return (
        f"expected {expected}, got {quoted(name)}; {remedy} plug-ins of {group} in this "
        f"environment: {there or 'none'}"
    )


def _either(words: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
