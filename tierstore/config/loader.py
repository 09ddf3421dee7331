"""From a YAML file or a mapping to `StoreConfig`, or to a `ConfigError` that says what to write."""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.config.model import SecondaryConfig, StoreConfig
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from tierstore.config.document import Document

__all__ = ["emit_json_schema", "load_config", "to_mapping"]

_SECONDARY_CAPACITY_BYTES_MIN = 8 << 20
"""A smaller tier would hold little more than its catalog."""
_RESERVED_TIER_NAME = "primary"
"""What logs and metrics call the tier in host memory."""


def load_config(source: str | os.PathLike[str] | Mapping[str, object]) -> StoreConfig:
    """Read a YAML file, or a mapping with the same keys, and check every word of it.

    A relative path of a tier is relative to the folder of the YAML file; of a mapping, to the
    current folder. Creates nothing and opens nothing but the YAML file.

    Raises:
        ConfigError: names every wrong key by its path (`secondary[0].io.mod`), says what is wrong
            and what to write instead.
    """
    if isinstance(source, Mapping):
        return _check(source, Path.cwd())
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"expected a mapping or the path of a YAML file, got {type(source).__name__}"
        )
    try:
        path = Path(source).expanduser().absolute()
    except (RuntimeError, TypeError) as error:  # `~` of nobody, a path of bytes
        raise ConfigError(f"{source!r}: {error}; give the path of a YAML file") from error
    try:
        return _check(_read(path), path.parent)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def emit_json_schema() -> str:
    """Return the JSON Schema of a configuration file, for editors."""
    from tierstore.config.document import json_schema

    return json.dumps(json_schema(), indent=2) + "\n"


def to_mapping(config: StoreConfig) -> dict[str, Any]:
    """Return the mapping that `load_config` reads as `config`."""
    mapping: dict[str, Any] = _to_yaml("", dataclasses.asdict(config))[1]
    for tier in mapping["secondary"]:
        if tier["backend"] == "lmdb":
            del tier["io"]["mode"]
    return mapping


def _to_yaml(name: str, value: Any) -> tuple[str, Any]:
    if isinstance(value, dict):
        return name, dict(_to_yaml(*item) for item in value.items() if item[1] is not None)
    if isinstance(value, tuple):
        return name, [_to_yaml("", item)[1] for item in value]
    if name.endswith("_bytes"):
        return name.removesuffix("_bytes"), f"{value}B"
    if name.endswith("_seconds"):
        return name.removesuffix("_seconds"), f"{value:f}s"
    return name, str(value) if isinstance(value, Path) else value


def _read(path: Path) -> object:
    from tierstore.config.yaml_text import parse_yaml

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # not there, no text, or a zero byte in the path
        raise ConfigError(f"cannot be read: {error}") from error
    return parse_yaml(text)


def _check(raw: object, folder: Path) -> StoreConfig:
    from tierstore.config.document import parse_document

    document = parse_document(raw)
    config = document.build(folder)
    problems = [*_impossible_keys(document), *_impossible_tiers(config.secondary)]
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def _impossible_keys(document: "Document") -> Iterator[str]:
    for tier_idx, tier in enumerate(document.secondary):
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


def _impossible_tiers(tiers: Sequence[SecondaryConfig]) -> Iterator[str]:
    real_paths = [Path(os.path.realpath(tier.path)) for tier in tiers]
    for tier_idx, tier in enumerate(tiers):
        where = f"secondary[{tier_idx}]"
        if tier.name == _RESERVED_TIER_NAME:
            yield f"{where}.name: 'primary' names the tier in host memory; choose another name"
        if tier.capacity_bytes < _SECONDARY_CAPACITY_BYTES_MIN:
            minimum = _SECONDARY_CAPACITY_BYTES_MIN >> 20
            yield f"{where}.capacity: at least {minimum}MiB, got {tier.capacity_bytes} bytes"
        for earlier_idx in range(tier_idx):
            if tiers[earlier_idx].name == tier.name:
                yield f"{where}.name: '{tier.name}' is also the name of secondary[{earlier_idx}]"
            ours, theirs = real_paths[tier_idx], real_paths[earlier_idx]
            if ours.is_relative_to(theirs) or theirs.is_relative_to(ours):
                yield (
                    f"{where}.path: {tier.path} and secondary[{earlier_idx}].path "
                    f"({tiers[earlier_idx].path}) contain each other; give each tier its own folder"
                )
