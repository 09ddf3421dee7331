"""YAML as people expect it: YAML 1.2 words, and no key twice.

PyYAML follows YAML 1.1, where `no`, `off` and `1:30` turn into false, false and 90, and where the
last of two equal keys silently wins. The one module that imports yaml.
"""

import re
from collections.abc import Hashable
from typing import Any

import yaml

from tierstore.errors import ConfigError

__all__ = ["parse_yaml"]


def parse_yaml(text: str) -> object:
    """Return the one document in `text`: mappings, lists, strings, numbers, booleans, None.

    Raises:
        ConfigError: not YAML, or a key stands twice in one mapping; with line and column.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - derives from SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{where}{what}") from error
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # The library lets through what its constructors raise for a value behind a wrong tag.
        raise ConfigError(f"not YAML: {error}") from error


class _Loader(yaml.SafeLoader):
    # The core schema of YAML 1.2 instead of the resolvers that SafeLoader inherits.
    yaml_implicit_resolvers: dict[str, list[tuple[str, Any]]] = {}  # noqa: RUF012 - PyYAML's way

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002 - PyYAML's signature
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key '{key.value}' stands twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", "[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?", "-+0123456789"),
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first)
    )
