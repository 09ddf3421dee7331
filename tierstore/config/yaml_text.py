"""YAML with the scalars of YAML 1.2, without duplicate keys and tags, and of bounded size.

PyYAML follows YAML 1.1, where `no`, `off` and `1:30` turn into false, false and 90, and where the
last of two equal keys silently wins. A few lines with aliases of aliases can also expand to a
document that does not fit into memory. This is the only module that imports yaml.
"""

import re
from collections.abc import Hashable
from typing import Any

import yaml

from tierstore.config.plain import DEPTH_MAX, NODE_COUNT_MAX
from tierstore.errors import ConfigError
from tierstore.quoting import escaped, quoted

__all__ = ["parse_yaml"]

_INT_DIGITS_MAX = 40


def parse_yaml(text: str) -> object:
    """Return the single document in `text`: mappings, lists, strings, numbers, booleans, None.

    An alias counts as a copy of what it names. Takes time in proportion to the text.

    Raises:
        ConfigError: the text is not YAML, a mapping has a duplicate key, a value has a tag, or the
            document is too large or too deeply nested; with line and column.
    """
    try:
        _require_bounds(text)
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - derives from SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        what = ", ".join(escaped(part) for part in (error.context, error.problem) if part)
        raise ConfigError(f"{where}{what}") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # The library does not wrap what its constructors raise.
        raise ConfigError(f"not YAML: {escaped(error)}") from None


def _require_bounds(text: str) -> None:
    """Check the events of a document one by one, before anything is built from them."""
    extent = _Extent()
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.NodeEvent):
            _require_no_tag(event)
            extent.add(event)
        if isinstance(event, yaml.CollectionStartEvent):
            extent.open(event)
        elif isinstance(event, yaml.CollectionEndEvent):
            extent.close()


class _Extent:
    """The size of a document in which each alias is replaced by a copy of what it names."""

    def __init__(self) -> None:
        self._node_count = 0
        self._open: list[tuple[str | None, int]] = []
        """Per open mapping or list: its anchor, and the number of nodes before it."""
        self._named: dict[str, int] = {}
        """The number of nodes that each anchor names."""

    def add(self, event: yaml.NodeEvent) -> None:
        node_count = 1
        if isinstance(event, yaml.AliasEvent):
            # An alias within the node that it names would be circular: its anchor is unknown here.
            if event.anchor not in self._named:
                raise _problem(event, f"the alias has no anchor &{event.anchor} before it")
            node_count = self._named[event.anchor]
        elif isinstance(event, yaml.ScalarEvent) and event.anchor:
            self._named[event.anchor] = 1
        self._node_count += node_count
        if self._node_count > NODE_COUNT_MAX:
            raise _problem(
                event, f"expected at most {NODE_COUNT_MAX} keys and values, aliases included"
            )

    def open(self, event: yaml.CollectionStartEvent) -> None:
        self._open.append((event.anchor, self._node_count - 1))
        if len(self._open) > DEPTH_MAX:
            raise _problem(
                event, f"mappings and lists are nested more than {DEPTH_MAX} levels deep"
            )

    def close(self) -> None:
        anchor, before = self._open.pop()
        if anchor:
            self._named[anchor] = self._node_count - before


def _require_no_tag(event: yaml.NodeEvent) -> None:
    tag = getattr(event, "tag", None)
    if tag is not None:
        raise _problem(event, f"tags such as {quoted(tag, 60)} are not supported; remove it")


def _problem(event: yaml.NodeEvent, what: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=what, problem_mark=event.start_mark)  # type: ignore[arg-type]  # of the C parser, says its stub


class _Loader(yaml.SafeLoader):
    # The core schema of YAML 1.2 instead of the resolvers that SafeLoader inherits.
    yaml_implicit_resolvers: dict[str, list[tuple[str, Any]]] = {}  # noqa: RUF012 - PyYAML's way

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002 - PyYAML's signature
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"duplicate key {quoted(key.value, 60)}", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_whole(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > _INT_DIGITS_MAX:
            raise yaml.constructor.ConstructorError(
                None, None, f"a number has {len(node.value):,} digits", node.start_mark
            )
        return int(node.value)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_whole)

for _tag, _pattern, _first in (
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", "[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?", "-+0123456789"),
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first)
    )
