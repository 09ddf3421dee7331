import ast
import re
from collections import Counter
from pathlib import Path

import pytest
from source_tree import (
    CORE_FILES,
    PACKAGE_FILES,
    PACKAGES,
    SCRIPT_FILES,
    TEST_FILES,
    imported_names,
    name_of,
    tree_of,
)

MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
FOLDER_MODULES_MAX = 16
WITHOUT_ROOMS = {"tests/vllm", "tests/vllm/support"}  # engines and their labs: not divided yet
ALL_FILES = [*PACKAGE_FILES, *SCRIPT_FILES, *TEST_FILES]


@pytest.mark.parametrize("path", [*PACKAGE_FILES, *SCRIPT_FILES], ids=name_of)
def test_a_module_is_short_enough_to_read(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MODULE_LINES_MAX


@pytest.mark.parametrize("path", [*PACKAGE_FILES, *SCRIPT_FILES], ids=name_of)
def test_a_function_fits_on_a_screen(path: Path) -> None:
    functions = [
        node
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert {name: lines for name, lines in lengths.items() if lines > FUNCTION_LINES_MAX} == {}


@pytest.mark.parametrize("folder", sorted({path.parent for path in ALL_FILES}), ids=name_of)
def test_a_folder_holds_few_enough_modules_to_know(folder: Path) -> None:
    modules = [path.name for path in ALL_FILES if path.parent == folder]
    if name_of(folder) in WITHOUT_ROOMS:
        assert len(modules) > FOLDER_MODULES_MAX, "it has its rooms now: take it off the list"
    else:
        assert len(modules) <= FOLDER_MODULES_MAX, modules


def test_no_two_modules_of_the_tests_have_one_name() -> None:
    """They are all imported by their bare names, from folders that are no packages."""
    counts = Counter(path.stem for path in TEST_FILES if path.stem != "conftest")
    assert [name for name, count in counts.items() if count > 1] == []


def test_threads_and_processes_are_started_only_by_the_io_pool() -> None:
    pattern = re.compile(
        r"\b(Thread|Timer|Process|Popen|ThreadPoolExecutor|ProcessPoolExecutor|fork)\("
        r"|\b(to_thread|start_new_thread|run_in_executor)\b"
    )
    found = {name_of(path) for path in PACKAGE_FILES if pattern.search(path.read_text())}
    # The build starts a compiler, and ends it with all that it has started.
    assert found <= {"tierstore/io_pool.py", "tierstore/native/compiling.py"}


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=name_of)
def test_a_module_is_named_by_a_noun_that_says_something(path: Path) -> None:
    words = path.stem.split("_")
    assert not {"util", "utils", "helper", "helpers", "common", "manager", "misc"} & set(words)
    assert not re.search(r"(_v|base)\d+$", path.stem)


@pytest.mark.parametrize("path", ALL_FILES, ids=name_of)
def test_what_is_left_to_do_names_its_issue(path: Path) -> None:
    marks = "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK"))
    unnamed = re.findall(rf"\b(?:{marks})\b(?!\(#\d+\))", path.read_text())
    assert unnamed == []


@pytest.mark.parametrize("library", ["cupy", "lmdb", "prometheus_client", "yaml"])
def test_a_foreign_library_is_imported_in_one_module(library: str) -> None:
    assert len(importers_of(library)) <= 1


def test_only_the_document_of_a_configuration_knows_pydantic() -> None:
    names = {path.stem for path in importers_of("pydantic") if path.parent.name == "config"}
    assert names == {"values", "sections", "document"}
    assert len(names) == len(importers_of("pydantic"))


def importers_of(library: str) -> list[Path]:
    return [
        path
        for path in PACKAGE_FILES
        if any(name.partition(".")[0] == library for name in imported_names(path))
    ]


def test_the_environment_is_read_only_by_the_command_line() -> None:
    pattern = re.compile(r"\b(environ|getenv)\b")
    found = {name_of(path) for path in CORE_FILES if pattern.search(path.read_text())}
    # The compiler is chosen where the package is built; the switch is one of a process.
    native = {"tierstore/native/compiling.py", "tierstore/native/library.py"}
    assert found <= {"tierstore/faults/opening.py"} | native


def test_of_the_environment_faults_read_one_variable_in_one_place() -> None:
    (path,) = [path for path in CORE_FILES if name_of(path) == "tierstore/faults/opening.py"]
    lines = [line.strip() for line in path.read_text().splitlines() if "environ" in line]
    assert [line for line in lines if "os." in line] == ['if os.environ.get(ALLOW_FAULTS) != "1":']


def test_the_folder_of_the_adapter_is_no_package() -> None:
    # A package `vllm` or `adapters` on the path would hide the engine or collide with others.
    assert not (PACKAGES[1].parent / "__init__.py").exists()
    assert not (PACKAGES[1].parent.parent / "__init__.py").exists()


def test_both_packages_ship_their_types() -> None:
    assert all((package / "py.typed").is_file() for package in PACKAGES)


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=name_of)
def test_what_is_logged_is_bounded_and_its_first_word_is_ours(path: Path) -> None:
    """Requests and files choose values; `bounded_log` cuts and escapes them, but no format."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            value = ast.unparse(node.value)
            if "getLogger" in value:
                assert value == "bounded(logging.getLogger(__name__))"
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("_logger."):
            text = node.args[1] if ast.unparse(node.func) == "_logger.log" else node.args[0]
            assert isinstance(text, ast.Constant)
            assert "%r" not in text.value, "a bounded value is text already"
