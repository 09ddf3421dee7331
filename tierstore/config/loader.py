"""Turns a YAML file or a mapping into a `StoreConfig`, or raises a `ConfigError` with a remedy."""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.config.model import SecondaryConfig, StoreConfig
from tierstore.config.plug_ins import BUILT_IN_NAMES, PlugInGroup
from tierstore.config.problems import problem_at, problems_of
from tierstore.config.real_paths import real_paths
from tierstore.config.text_file import read_text
from tierstore.errors import ConfigError
from tierstore.quoting import escaped, named, quoted

if TYPE_CHECKING:
    from tierstore.config.sections import Document

__all__ = ["check_config", "emit_json_schema", "load_config", "to_mapping"]

_SECONDARY_CAPACITY_BYTES_MIN = 8 << 20
"""A smaller tier would hold little more than its catalog."""
_RESERVED_TIER_NAME = "primary"
"""The name of the tier in host memory, in logs and metrics."""
_PATH_CHARS_MAX = 1_000
_GROUPS = {
    "eviction": PlugInGroup.POLICIES,
    "tier": PlugInGroup.TIERS,
    "backend": PlugInGroup.BACKENDS,
    "cascade": PlugInGroup.ADMISSIONS,
}
"""Of the plug-ins that a key can name."""


def load_config(source: str | os.PathLike[str] | Mapping[str, object]) -> StoreConfig:
    """Read a YAML file, or a mapping with the same keys, and check all of it.

    A relative path is relative to the folder of the YAML file; in a mapping, to the current folder.
    Creates no file, and opens only the YAML file.

    Raises:
        ConfigError: names every wrong key by its path (`secondary[0].io.mod`), says what is wrong
            and what to write instead.
    """
    if isinstance(source, Mapping):
        return _check(source, _current_folder(), is_python=True)
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"expected a mapping or the path of a YAML file, got {type(source).__name__}"
        )
    try:
        path = Path(source).expanduser().absolute()
    except Exception as error:  # noqa: BLE001 - no home, no current folder, or the caller's class
        raise ConfigError(
            f"{quoted(source)}: {named(error)}; give the path of a YAML file"
        ) from None
    from tierstore.config.yaml_text import parse_yaml

    try:
        return _check(parse_yaml(read_text(path)), path.parent, is_python=False)
    except ConfigError as error:
        text = f"{escaped(path, _PATH_CHARS_MAX)}: {error}"
        raise ConfigError(text) from error.__cause__


def check_config(config: StoreConfig) -> StoreConfig:
    """Check a configuration that a program has built, and return it as `load_config` reads it.

    Raises:
        ConfigError: as `load_config`.
    """
    try:
        mapping = to_mapping(config)
    except Exception as error:  # noqa: BLE001 - a field of a wrong type, of the caller's own class
        raise ConfigError(f"the configuration cannot be read: {named(error)}") from None
    return load_config(mapping)


def emit_json_schema() -> str:
    """Return the JSON Schema of a configuration file, for editors."""
    from tierstore.config.document import json_schema

    return json.dumps(json_schema(), indent=2) + "\n"


def to_mapping(config: StoreConfig) -> dict[str, Any]:
    """Return the mapping that `load_config` reads as `config`."""
    mapping = _keys_of(config)
    for tier in mapping["secondary"]:
        if tier["backend"] == "lmdb":
            del tier["io"]["mode"]
    return mapping


def _keys_of(record: Any) -> dict[str, Any]:
    """Return the keys of a section's fields, without those that are None by default and None."""
    values = [(field, getattr(record, field.name)) for field in dataclasses.fields(record)]
    return dict(
        _key_of(field.name, value)
        for field, value in values
        if value is not None or field.default is not None
    )


def _key_of(name: str, value: Any) -> tuple[str, Any]:
    if dataclasses.is_dataclass(value):
        return name, _keys_of(value)
    if isinstance(value, tuple | list):
        return name, [_key_of("", item)[1] for item in value]
    # A value that is not a number is left unchanged, for `load_config` to refuse.
    if name.endswith("_bytes"):
        return name.removesuffix("_bytes"), f"{value}B" if type(value) is int else value
    if name.endswith("_seconds"):
        is_number = type(value) in (int, float)
        text = f"{Decimal(repr(value)):f}s" if is_number else value
        return name.removesuffix("_seconds"), text
    return name, str(value) if isinstance(value, Path) else value


def _current_folder() -> Path | None:
    try:
        return Path.cwd()
    except OSError:  # it was removed
        return None


def _check(raw: object, folder: Path | None, *, is_python: bool) -> StoreConfig:
    from tierstore.config.document import parse_document

    document = parse_document(raw, is_python=is_python)
    if folder is None:
        _require_whole_paths(document)
    config = document.build(folder or Path("/"))
    problems = [*_impossible_keys(document), *_impossible_tiers(config.secondary)]
    if problems:
        raise problems_of(problems, len(problems))
    return config


def _require_whole_paths(document: "Document") -> None:
    for tier_idx, tier in enumerate(document.secondary):
        if not Path(tier.path).expanduser().is_absolute():
            raise problem_at(
                ("secondary", tier_idx, "path"),
                f"{quoted(tier.path)} is relative, and the current folder was removed; give an "
                "absolute path",
            )


def _impossible_keys(document: "Document") -> Iterator[str]:
    yield from _idle_options("primary", document.primary, ("eviction",))
    for tier_idx, tier in enumerate(document.secondary):
        yield from _idle_options(f"secondary[{tier_idx}]", tier, ("tier", "backend", "cascade"))
        if _is_plug_in("tier", tier.tier) and not _is_plug_in("backend", tier.backend):
            yield (
                f"secondary[{tier_idx}].backend: {tier.backend!r} keeps records where a tier on "
                f"disk places them; name the backend that belongs to tier {tier.tier!r}"
            )
        if tier.backend == "lmdb" and "mode" in tier.io.model_fields_set:
            yield (
                f"secondary[{tier_idx}].io.mode: the lmdb backend has no I/O modes; "
                "remove the key or set backend: file"
            )
        breaker = tier.io.breaker
        if breaker.retry_after_max < breaker.retry_after:
            yield (
                f"secondary[{tier_idx}].io.breaker.retry_after_max: "
                f"{breaker.retry_after_max:g} s is shorter than retry_after "
                f"({breaker.retry_after:g} s); give at least that"
            )


def _idle_options(where: str, section: object, keys: Sequence[str]) -> Iterator[str]:
    """Yield options that are given to a built-in part, which would silently ignore them."""
    for key in keys:
        name = getattr(section, key)
        if getattr(section, f"{key}_options") and not _is_plug_in(key, name):
            yield (
                f"{where}.{key}_options: {key} {name!r} is built in and takes no options; "
                "remove the key"
            )


def _is_plug_in(key: str, name: str) -> bool:
    return name not in BUILT_IN_NAMES[_GROUPS[key]]


def _impossible_tiers(tiers: Sequence[SecondaryConfig]) -> Iterator[str]:
    found = _real_paths(tiers)
    for tier_idx, tier in enumerate(tiers):
        where = f"secondary[{tier_idx}]"
        if tier.name == _RESERVED_TIER_NAME:
            yield f"{where}.name: 'primary' names the tier in host memory; choose another name"
        if tier.capacity_bytes < _SECONDARY_CAPACITY_BYTES_MIN:
            minimum = _SECONDARY_CAPACITY_BYTES_MIN >> 20
            yield f"{where}.capacity: at least {minimum}MiB, got {tier.capacity_bytes} bytes"
        if tier.integrity is not None:
            paths = [found[other.path] for other in tiers]
            yield from _exposed_keys(where, tier.integrity.key_file, paths, found)
        for earlier_idx in range(tier_idx):
            if tiers[earlier_idx].name == tier.name:
                yield f"{where}.name: '{tier.name}' is also the name of secondary[{earlier_idx}]"
            ours, theirs = found[tier.path], found[tiers[earlier_idx].path]
            if ours.is_relative_to(theirs) or theirs.is_relative_to(ours):
                yield (
                    f"{where}.path: {escaped(tier.path)} and secondary[{earlier_idx}].path "
                    f"({escaped(tiers[earlier_idx].path)}) contain each other; "
                    "give each tier its own folder"
                )


def _real_paths(tiers: Sequence[SecondaryConfig]) -> dict[Path, Path]:
    """Resolve links if there are paths to compare. A single tier needs no access to its device."""
    keys = [tier.integrity.key_file for tier in tiers if tier.integrity is not None]
    if len(tiers) + len(keys) < 2:  # noqa: PLR2004 - a pair
        return {}
    paths = [*(tier.path for tier in tiers), *keys, *(key.parent for key in keys)]
    return dict(zip(paths, real_paths(paths), strict=True))


def _exposed_keys(
    where: str, file: Path, tier_paths: Sequence[Path], real: Mapping[Path, Path]
) -> Iterator[str]:
    """Yield key files below a tier's path, where those who can write to the tier can read them."""
    names = {real[file], real[file.parent] / file.name}
    for tier_idx, path in enumerate(tier_paths):
        if any(name.is_relative_to(path) for name in names):
            yield (
                f"{where}.integrity.key_file: {file} lies below the path of secondary[{tier_idx}]; "
                "keep the key where those who can write to a tier cannot read it"
            )
