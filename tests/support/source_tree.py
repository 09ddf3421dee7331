"""The project's own source files, for the tests that read them."""

import ast
from functools import cache
from pathlib import Path

from python_paths import ROOT, TESTS

PACKAGES = (ROOT / "tierstore", ROOT / "adapters" / "vllm" / "tierstore_vllm")
CORE_FILES = sorted(PACKAGES[0].rglob("*.py"))
PACKAGE_FILES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
TEST_FILES = sorted(TESTS.rglob("*.py"))
SCRIPT_FILES = sorted((ROOT / "scripts").rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imported_names(path: Path) -> set[str]:
    """Every module that a file imports, wherever in the file the import stands."""
    names: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return names
