import subprocess
import sys
import tomllib

from python_paths import ROOT, environment
from source_tree import CORE_FILES, PACKAGE_FILES, imported_names


def test_imports_go_downwards_only() -> None:
    # In a process of its own: the linter reconfigures logging, which other tests listen to.
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-cache"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_module_of_the_core_has_a_layer() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    placed = {name.strip(" ()") for layer in layers for name in layer.split("|")}
    core = ROOT / "tierstore"
    modules = {
        f"tierstore.{path.relative_to(core).parts[0].removesuffix('.py')}" for path in CORE_FILES
    }
    assert modules - {"tierstore.__init__"} <= placed


def test_only_declared_libraries_are_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    modules = {"PyYAML": "yaml", "prometheus-client": "prometheus_client"}
    modules |= {"cupy-cuda12x": "cupy", "cupy-cuda13x": "cupy"}
    declared = [*project["dependencies"]]
    for requirements in project["optional-dependencies"].values():
        declared += requirements
    names = {line.partition(">=")[0].partition("[")[0] for line in declared}
    allowed = {modules.get(name, name) for name in names} | set(sys.stdlib_module_names)
    allowed |= {"tierstore", "tierstore_vllm", "pydantic_core", "vllm"}
    imported = {name.partition(".")[0] for path in PACKAGE_FILES for name in imported_names(path)}
    assert imported <= allowed
