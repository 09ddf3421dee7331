import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from python_paths import ROOT, environment
from source_tree import PACKAGE_FILES, name_of, tree_of

PUBLIC_FILES = [
    path
    for path in PACKAGE_FILES
    if not any(part.startswith("_") and part != "__init__.py" for part in path.parts)
]


def exported_names(path: Path) -> list[str] | None:
    for node in tree_of(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return None


def defined_names(path: Path) -> set[str]:
    """Public classes, functions and constants that a module defines itself."""
    names: set[str] = set()
    for node in tree_of(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(
                target.id
                for target in targets
                if isinstance(target, ast.Name) and target.id.isupper()
            )
    return {name for name in names if not name.startswith("_")}


def bound_names(path: Path) -> set[str]:
    """Aliases of types; and in a package, what it imports to offer it again."""
    names: set[str] = set()
    body = tree_of(path).body
    conditional = [inner for outer in body if isinstance(outer, ast.If) for inner in outer.body]
    for node in [*body, *conditional]:
        if isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.ImportFrom) and path.name == "__init__.py":
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def by_kind(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions: the order that ruff sorts `__all__` in."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


@pytest.mark.parametrize("path", PUBLIC_FILES, ids=name_of)
def test_all_is_sorted_and_exact(path: Path) -> None:
    exported, defined = exported_names(path), defined_names(path)
    if exported is None:
        assert defined == set(), "public names, but no __all__"
        return
    assert exported == sorted(exported, key=by_kind)
    assert defined <= set(exported)
    assert set(exported) <= defined | bound_names(path)


def test_the_package_offers_the_names_of_the_embedded_api() -> None:
    import tierstore

    wanted = {"AsyncTierStore", "Manifest", "TierStore", "load_config", "make_offload_keys"}
    assert wanted <= set(tierstore.__all__)
    assert all(hasattr(tierstore, name) for name in tierstore.__all__)


def test_the_public_names_are_those_that_were_announced() -> None:
    import tierstore

    named = " ".join(tierstore.__all__)
    assert named == (
        "AsyncTierStore BackendBusyError BackendError BackendFullError CatalogError ChunkRows "
        "ClosedError ConfigError CpuTensor LayoutError Manifest ManifestError MissingExtraError "
        "OffloadKey PrefixMatch PromptError ReentryError StoreConfig StoreStats TierStore "
        "TierStoreError WritableChunkRows __version__ get_offload_block_hash "
        "get_offload_group_idx get_offload_namespace load_config make_offload_key "
        "make_offload_keys"
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert tierstore.__version__ == project["version"]


def test_importing_tierstore_is_light() -> None:
    heavy = {
        "numpy",
        "lmdb",
        "pydantic",
        "yaml",
        "torch",
        "vllm",
        "cryptography",
        "cupy",
        "asyncio",
        "typer",
        "rich",
    }
    code = f"import sys, tierstore; print(sorted({heavy!r} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
