"""Which attributes of vLLM's objects the adapter's source uses.

Types are followed from the annotations of parameters and fields, through assignments, attributes
and loops. What cannot be followed is left out, so everything that is found is used for certain.
"""

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["used_attributes"]

_TYPES = {
    ("CachedRequestData", "resumed_req_ids"): "",
    ("KVCacheBlocks", "blocks"): "list[list[KVCacheBlock]]",
    ("KVCacheConfig", "kv_cache_groups"): "list[KVCacheGroupSpec]",
    ("Request", "lora_request"): "LoRARequest",
    ("SchedulerOutput", "scheduled_cached_reqs"): "CachedRequestData",
    ("SchedulerOutput", "scheduled_new_reqs"): "list[NewRequestData]",
    ("VllmConfig", "attention_config"): "AttentionConfig",
    ("VllmConfig", "cache_config"): "CacheConfig",
    ("VllmConfig", "compilation_config"): "CompilationConfig",
    ("VllmConfig", "kv_events_config"): "KVEventsConfig",
    ("VllmConfig", "kv_transfer_config"): "KVTransferConfig",
    ("VllmConfig", "load_config"): "LoadConfig",
    ("VllmConfig", "lora_config"): "LoRAConfig",
    ("VllmConfig", "model_config"): "ModelConfig",
    ("VllmConfig", "parallel_config"): "ParallelConfig",
    ("VllmConfig", "speculative_config"): "SpeculativeConfig",
    ("SpeculativeConfig", "draft_model_config"): "ModelConfig",
}
"""What attributes of vLLM's objects are, as far as the adapter goes on from there."""


@dataclass
class _Scope:
    """The types of names, as text of annotations."""

    names: dict[str, str]
    used: set[tuple[str, str]]
    fields: dict[str, str] = field(default_factory=dict)
    """Of `self`."""

    def type_of(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name):
                return self.names.get(name, "")
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                return self.fields.get(name, "")
            case ast.Attribute(value=value, attr=name):
                return _TYPES.get((self.type_of(value), name), "")
            case ast.Subscript(value=value):
                return _element(self.type_of(value))
            case ast.Call(func=ast.Name(id="enumerate" | "sorted" | "list"), args=[first, *_]):
                return self.type_of(first)
            case ast.Call(func=ast.Attribute(value=value, attr="values"), args=[]):
                return self.type_of(value)
            case ast.NamedExpr(value=value):
                return self.type_of(value)
            case ast.IfExp(body=body, orelse=other):
                return self.type_of(body) or self.type_of(other)
        return ""

    def bind(self, target: ast.expr, type_name: str) -> None:
        match target:
            case ast.Name(id=name):
                self.names[name] = type_name
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                if type_name:
                    self.fields[name] = type_name
            case ast.Tuple(elts=[_, second]):  # of enumerate
                self.bind(second, type_name)

    def read(self, body: Iterable[ast.AST]) -> None:
        """Bind what is assigned, in the order of the source, and note what is used."""
        for node in (found for statement in body for found in _in_order(statement)):
            if isinstance(node, ast.FunctionDef):
                arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                self.names.update((a.arg, _name_of(a.annotation)) for a in arguments)
            elif isinstance(node, ast.Attribute):
                if self.type_of(node.value).isidentifier():
                    self.used.add((self.type_of(node.value), node.attr))
            else:
                self._bind_all(node)

    def _bind_all(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=[target], value=value):
                self.bind(target, self.type_of(value))
            case ast.AnnAssign(target=target, annotation=annotation):
                self.bind(target, _name_of(annotation))
            case ast.NamedExpr(target=target, value=value):
                self.bind(target, self.type_of(value))
            case ast.Assert(test=ast.Call(func=ast.Name(id="isinstance"), args=[target, narrowed])):
                self.bind(target, _name_of(narrowed))
            case ast.For(target=target, iter=source):
                self.bind(target, _element(self.type_of(source)))
            case ast.comprehension(target=target, iter=source):
                self.bind(target, _element(self.type_of(source)))


def used_attributes(files: Iterable[Path], classes: Iterable[str]) -> set[tuple[str, str]]:
    """Return (class, attribute) for each attribute of these classes of vLLM that is used."""
    used: set[tuple[str, str]] = set()
    for file in files:
        tree = ast.parse(file.read_text())
        for node in tree.body:
            # A class is read twice: fields may be bound below their first use.
            scope = _Scope({}, used)
            for _ in range(2 if isinstance(node, ast.ClassDef) else 1):
                scope.read([node])
    return {(owner, name) for owner, name in used if owner in set(classes)}


def _in_order(node: ast.AST) -> Iterable[ast.AST]:
    """Walk depth first; the generators of a comprehension come before its element."""
    yield node
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        children.sort(key=lambda child: not isinstance(child, ast.comprehension))
    for child in children:
        yield from _in_order(child)


def _name_of(annotation: ast.expr | None) -> str:
    """Return an annotation as text, without quotes and `| None`."""
    if annotation is None:
        return ""
    text = ast.unparse(annotation).replace("'", "").replace('"', "")
    for prefix in ("Sequence", "Mapping[str, ", "dict[str, ", "Iterable"):
        if text.startswith(prefix):
            inner = text.removeprefix(prefix).strip("[]")
            return f"list[{inner}]"
    return text.removesuffix(" | None")


def _element(type_name: str) -> str:
    inner = type_name.removeprefix("list[")
    return inner[:-1] if inner != type_name else ""
