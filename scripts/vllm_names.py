"""Record which of the names that the adapter uses exist in the source of one vLLM version.

    PYTHONPATH=.:adapters/vllm python scripts/vllm_names.py SOURCE VERSION

SOURCE is the folder that holds the package `vllm`: an installation's site-packages, or an unpacked
wheel (`pip download --no-deps vllm==VERSION`, then `unzip`), which needs neither a GPU nor its own
torch. The source is parsed, never imported. The table goes to `tests/vllm/names/`, where the tests
compare the adapter with it. Per class it has bases, attributes and methods; parameters of a method
are written as in Python: `name`, `name=` with a default, `*name`, `**name`, and `*` alone before
those that are keyword-only.
"""

import argparse
import ast
import json
from collections.abc import Iterable
from pathlib import Path

from tierstore_vllm.engine_names import LORA_NAMES, NEEDED_NAMES, PLUGIN_NAMES

Description = dict[str, object]

ROOT = Path(__file__).resolve().parent.parent
ADAPTER = ROOT / "adapters" / "vllm" / "tierstore_vllm"
TABLES = ROOT / "tests" / "vllm" / "names"

_NAMES = {
    module: {**NEEDED_NAMES.get(module, {}), **LORA_NAMES.get(module, {})}
    for module in (*NEEDED_NAMES, *LORA_NAMES)
} | dict(PLUGIN_NAMES)
_DERIVED_FROM = "vllm.distributed.kv_transfer."
_UNCHECKED = {"original_max_model_len"}
"""Used, but set while an object is made, so that its class does not show it."""


def main() -> None:
    """Parse the arguments and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="folder that holds the package vllm")
    parser.add_argument("version", help="version of that vLLM, such as 0.33.0")
    arguments = parser.parse_args()
    table = describe(arguments.source, arguments.version)
    file = TABLES / f"vllm-{arguments.version}.json"
    file.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


def describe(source: Path, version: str) -> Description:
    """Return the table of one vLLM version: the adapter's names that exist there."""
    wanted = {module: set(classes) for module, classes in _NAMES.items()}
    for module, names in imported_names(sorted(ADAPTER.rglob("*.py"))).items():
        wanted.setdefault(module, set()).update(names)
    modules = {module: describe_module(source, module, wanted[module]) for module in wanted}
    return {"version": version, "modules": modules}


def imported_names(files: Iterable[Path]) -> dict[str, set[str]]:
    """Return what files import from vLLM, by module, wherever the import stands."""
    found: dict[str, set[str]] = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                names = {alias.name for alias in node.names}
                found.setdefault(str(node.module), set()).update(names)
    return found


def module_file(source: Path, name: str) -> Path:
    """Return the file of a module or package."""
    path = source.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def describe_module(source: Path, module: str, wanted: set[str]) -> Description:
    """Return the wanted classes with their bases, and which other wanted names there are."""
    tree = ast.parse(module_file(source, module).read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm."):
            offered = wanted.intersection(alias.name for alias in node.names)
            if offered:
                classes |= classes_of(module_file(source, str(node.module)), offered)
    needed = wanted & classes.keys()
    for name in [*needed]:
        needed |= ancestors(name, classes)
    names = {name for node in statements(tree.body) for name in bound_names(node)}
    names |= {name for name in wanted if module_file(source, f"{module}.{name}").exists()}
    return {
        "classes": {name: describe_class(classes[name], wanted_members(module)) for name in needed},
        "names": sorted(wanted & names - needed),
    }


def classes_of(path: Path, wanted: set[str]) -> dict[str, ast.ClassDef]:
    """Return the wanted classes that a module defines for another one to offer."""
    body = ast.parse(path.read_text()).body
    return {n.name: n for n in body if isinstance(n, ast.ClassDef) and n.name in wanted}


def ancestors(name: str, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Return the base classes that stand in the same module."""
    bases = {ast.unparse(base) for base in classes[name].bases} & classes.keys()
    return bases.union(*(ancestors(base, classes) for base in bases))


def statements(body: list[ast.stmt]) -> Iterable[ast.stmt]:
    """Yield a module's statements, those under a condition included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from statements(node.body)


def wanted_members(module: str) -> set[str] | None:
    """Return the members that the adapter uses; None: all, since it derives from these classes."""
    if module.startswith(_DERIVED_FROM):
        return None
    return {name for names in _NAMES.get(module, {}).values() for name in names} | _UNCHECKED


def describe_class(node: ast.ClassDef, wanted: set[str] | None) -> Description:
    """Return a class's bases, and those of its attributes and methods that are wanted."""
    attributes: set[str] = set()
    methods: dict[str, list[str]] = {}
    for member in node.body:
        if isinstance(member, ast.FunctionDef):
            methods[member.name] = parameters(member)
            # What a constructor sets is an attribute, too.
            attributes |= {
                target.attr
                for target in ast.walk(member)
                if isinstance(target, ast.Attribute)
                and isinstance(target.ctx, ast.Store)
                and ast.unparse(target.value) == "self"
            }
        else:
            attributes |= bound_names(member)
    return {
        "abstract": sorted(
            member.name
            for member in node.body
            if isinstance(member, ast.FunctionDef)
            and "abstractmethod" in {ast.unparse(item) for item in member.decorator_list}
        ),
        "attributes": sorted(name for name in attributes if wanted is None or name in wanted),
        "bases": [ast.unparse(base) for base in node.bases],
        "methods": {n: p for n, p in methods.items() if wanted is None or n in wanted},
    }


def bound_names(node: ast.stmt) -> set[str]:
    """Return the names that a statement binds."""
    if isinstance(node, ast.FunctionDef):
        return {node.name}
    if isinstance(node, ast.AnnAssign):
        return {node.target.id} if isinstance(node.target, ast.Name) else set()
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    return set()


def parameters(function: ast.FunctionDef) -> list[str]:
    """Return a function's parameters as text, without the one that Python binds."""
    decorators = {ast.unparse(decorator) for decorator in function.decorator_list}
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    found = [f"{a.arg}=" if i >= first_default else a.arg for i, a in enumerate(positional)]
    if "staticmethod" not in decorators:
        found = found[1:]
    if arguments.vararg:
        found.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        found.append("*")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(argument.arg if default is None else f"{argument.arg}=")
    if arguments.kwarg:
        found.append(f"**{arguments.kwarg.arg}")
    return found


if __name__ == "__main__":
    main()
