"""The adapter against vLLM 0.32 and 0.33: every name it uses is there, every override fits.

Goal: neither version lacks anything. Method: `scripts/vllm_names.py` wrote down, from the source of
each version, what it has of the names that the adapter uses; the adapter's own source is parsed and
compared. Where vLLM is installed, its objects are looked at, too.
"""

import ast
import inspect
import json
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
import used_names
import vllm_names

from tierstore.errors import ConfigError
from tierstore_vllm.engine_names import (
    LORA_NAMES,
    NEEDED_NAMES,
    PLUGIN_NAMES,
    TESTED_VERSIONS,
    check_engine,
)

TABLES = {
    table["version"]: table["modules"]
    for table in (json.loads(f.read_text()) for f in sorted(vllm_names.TABLES.glob("*.json")))
}
VERSIONS = pytest.mark.parametrize("version", TABLES)
FILES = sorted(vllm_names.ADAPTER.rglob("*.py"))
OWN_METHODS = {"StepMetadata.is_empty", "WorkerReport.add", "WorkerReport.is_empty"}
"""Called by the adapter, not by vLLM."""
LATER_METHODS = {"supports_eagle_prefix_cache_hashing"}
"""Asked for by versions that are not tested yet; the answer keeps what the tested ones do."""
UNCHECKED_ATTRIBUTES = {
    ("LRUCacheWorkerLoRAManager", "lora_config"),  # set in a base class's constructor
    ("ModelConfig", "original_max_model_len"),  # set while it is made, see below
}


@dataclass
class Parameters:
    """A method's parameters, read from how they are written."""

    positional: dict[str, bool] = field(default_factory=dict)
    """Name to: has a default."""
    keyword_only: dict[str, bool] = field(default_factory=dict)
    has_rest: bool = False
    has_keywords: bool = False

    @classmethod
    def of(cls, written: list[str]) -> Self:
        found = cls()
        for text in written:
            if text.startswith("**"):
                found.has_keywords = True
            elif text.startswith("*"):
                found.has_rest = True
            else:
                kind = found.keyword_only if found.has_rest else found.positional
                kind[text.removesuffix("=")] = text.endswith("=")
        if "*" in written:
            found.has_rest = False
        return found

    def accepts_calls_of(self, base: Self) -> bool:
        """Say whether every call that `base` accepts is accepted, by position and by name."""
        names = [*self.positional][: len(base.positional)]
        ours = self.positional | self.keyword_only
        theirs = base.positional | base.keyword_only
        added = [has_default for name, has_default in ours.items() if name not in theirs]
        return (
            names == [*base.positional]
            and all(added)
            and all(
                ours.get(name, self.has_keywords) for name, default in theirs.items() if default
            )
            and all(name in ours or self.has_keywords for name in base.keyword_only)
            and self.has_rest >= base.has_rest
            and self.has_keywords >= base.has_keywords
        )


def parse(text: str) -> Parameters:
    return Parameters.of(text.split())


@pytest.mark.parametrize(
    ("ours", "theirs", "fits"),
    [
        ("a b", "a b", True),
        ("a b c=", "a b", True),
        ("a b c", "a b", False),
        ("a", "a b", False),
        ("b a", "a b", False),
        ("a b", "a b=", False),
        ("a b=", "a b=", True),
        ("a", "a **k", False),
        ("a **k", "a **k", True),
        ("a **k", "a * b", True),
        ("a", "a * b", False),
        ("a * b", "a * b", True),
        ("a * c", "a * b", False),
    ],
)
def test_an_override_fits_if_it_accepts_every_call(ours: str, theirs: str, fits: bool):  # noqa: FBT001 - a table of cases
    assert parse(ours).accepts_calls_of(parse(theirs)) is fits


def derived_classes() -> list[tuple[str, list[tuple[str, str]], ast.ClassDef]]:
    """List the adapter's classes with the classes of vLLM that they derive from."""
    found = []
    for file in FILES:
        tree = ast.parse(file.read_text())
        origin = {
            alias.name: str(node.module)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm.")
            for alias in node.names
        }
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base) for base in node.bases]
                theirs = [(origin[base], base) for base in bases if base in origin]
                if theirs:
                    found.append((node.name, theirs, node))
    return found


def find_member(table: Any, module: str, name: str, kind: str) -> Any:
    """Collect one kind of members of a class and of its bases in the same module."""
    described = table[module]["classes"][name]
    members = dict.fromkeys(described[kind]) if kind != "methods" else dict(described[kind])
    for base in described["bases"]:
        if base in table[module]["classes"]:
            members = find_member(table, module, base, kind) | members
    return members


def newest_methods(bases: list[tuple[str, str]]) -> set[str]:
    newest = list(TABLES.values())[-1]
    return {name for base in bases for name in find_member(newest, *base, "methods")}


def test_both_tested_versions_are_written_down():
    assert tuple(version.rpartition(".")[0] for version in TABLES) == TESTED_VERSIONS


@VERSIONS
def test_every_imported_name_exists(version: str):
    table = TABLES[version]
    imported = vllm_names.imported_names(FILES)
    assert "vllm.v1.kv_cache_interface" in imported
    missing = [
        f"{module}.{name}"
        for module, names in imported.items()
        for name in names
        if name not in table[module]["names"] and name not in table[module]["classes"]
    ]
    assert missing == []


@VERSIONS
def test_everything_that_the_check_asks_for_exists(version: str):
    table = TABLES[version]
    for module, classes in (*NEEDED_NAMES.items(), *LORA_NAMES.items(), *PLUGIN_NAMES.items()):
        for name, attributes in classes.items():
            if name not in table[module]["classes"]:
                assert name in table[module]["names"]
                continue
            members = find_member(table, module, name, "methods")
            members |= find_member(table, module, name, "attributes")
            assert [a for a in attributes if a not in members] == []


@VERSIONS
def test_a_models_length_is_known_as_the_user_gave_it(version: str):
    """No field, so the check cannot ask for it: it is set while a configuration is made."""
    attributes = TABLES[version]["vllm.config"]["classes"]["ModelConfig"]["attributes"]
    assert "original_max_model_len" in attributes


@VERSIONS
def test_every_override_exists_and_accepts_vllms_calls(version: str):
    table = TABLES[version]
    checked = 0
    for class_name, bases, node in derived_classes():
        theirs: dict[str, list[str]] = {}
        for module, base in reversed(bases):
            theirs |= find_member(table, module, base, "methods")
        for method in node.body:
            if not isinstance(method, ast.FunctionDef) or (
                method.name.startswith("_") and method.name != "__init__"
            ):
                continue
            if f"{class_name}.{method.name}" in OWN_METHODS or method.name in LATER_METHODS:
                continue
            if method.name not in theirs:
                # Sleep mode came with 0.33: such a hook must not be asked for, but may be there.
                assert method.name not in NEEDED_NAMES[bases[0][0]][bases[0][1]]
                assert method.name in newest_methods(bases), f"nobody calls {method.name}"
                continue
            ours = Parameters.of(vllm_names.parameters(method))
            base_parameters = Parameters.of(theirs[method.name])
            assert ours.accepts_calls_of(base_parameters), f"{class_name}.{method.name}"
            checked += 1
    assert checked > 30


@VERSIONS
def test_every_abstract_method_is_overridden(version: str):
    for class_name, bases, node in derived_classes():
        ours = {method.name for method in node.body if isinstance(method, ast.FunctionDef)}
        for module, base in bases:
            abstract = find_member(TABLES[version], module, base, "abstract")
            assert set(abstract) <= ours, class_name


def test_the_check_asks_for_everything_that_the_connector_imports():
    """All but what type checkers need, and what the warm-up needs, which runs in no engine."""
    imported: dict[str, set[str]] = {}
    for file in FILES:
        if file.stem == "warmup":
            continue
        tree = ast.parse(file.read_text())
        tree.body = [
            node
            for node in tree.body
            if not isinstance(node, ast.If) or ast.unparse(node.test) != "TYPE_CHECKING"
        ]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "vllm":
                imported.setdefault(str(node.module), set()).update(a.name for a in node.names)
    imported.pop("vllm.v1", None)  # the module `kv_cache_interface` under another name
    missing = {
        module: names.difference(
            *(table.get(module, {}) for table in (NEEDED_NAMES, LORA_NAMES, PLUGIN_NAMES))
        )
        for module, names in imported.items()
    }
    missing = {module: names for module, names in missing.items() if names}
    assert missing == {}, "add them to NEEDED_NAMES, and run scripts/vllm_names.py per version"


def test_the_check_asks_for_every_attribute_that_is_used():
    """As far as the types of vLLM's objects can be followed in the source."""
    asked: dict[str, set[str]] = {}
    for table in (NEEDED_NAMES, LORA_NAMES):
        for classes in table.values():
            for name, attributes in classes.items():
                asked.setdefault(name, set()).update(attributes)
    files = [file for file in FILES if file.stem != "warmup"]
    used = used_names.used_attributes(files, asked) - UNCHECKED_ATTRIBUTES
    assert {("KVCacheGroupSpec", "is_eagle_group"), ("Request", "num_tokens")} <= used
    missing = {(owner, name) for owner, name in used if name not in asked[owner]}
    assert missing == set(), "add them to NEEDED_NAMES, and run scripts/vllm_names.py per version"


@pytest.fixture
def vllm() -> Any:
    return pytest.importorskip("vllm", reason="vLLM is not installed")


@pytest.mark.vllm
def test_the_written_table_is_that_of_the_installed_version(vllm: Any):
    if vllm.__version__ not in TABLES:
        pytest.skip(f"vLLM {vllm.__version__} is not written down")
    source = Path(vllm.__file__).parents[1]
    described = json.loads(json.dumps(vllm_names.describe(source, vllm.__version__)))
    assert described["modules"] == TABLES[vllm.__version__]


@pytest.mark.vllm
def test_the_installed_version_accepts_the_connector(vllm: Any, caplog: pytest.LogCaptureFixture):
    from tierstore_vllm import TierStoreConnector

    check_engine()
    assert [record for record in caplog.records if record.name.startswith("tierstore")] == []
    assert inspect.isabstract(TierStoreConnector) is False
    for name, ours in vars(TierStoreConnector).items():
        theirs = inspect.getattr_static(TierStoreConnector.__mro__[1], name, None)
        if theirs is None:
            continue
        assert isinstance(theirs, property) == isinstance(ours, property)
        assert isinstance(theirs, classmethod) == isinstance(ours, classmethod), name


@pytest.mark.vllm
def test_an_untested_version_that_has_all_names_is_used_with_a_warning(
    vllm: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(vllm, "__version__", "0.34.1")
    with caplog.at_level(logging.WARNING):
        check_engine()
    assert [record.getMessage() for record in caplog.records] == [
        "tierstore is tested with vLLM 0.32 and 0.33; 0.34.1 has everything it needs, continuing"
    ]


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("module_name", "class_name", "attribute"),
    [
        ("distributed.kv_transfer.kv_connector.v1.base", None, "SupportsHMA"),
        (
            "distributed.kv_transfer.kv_connector.v1.base",
            "KVConnectorBase_V1",
            "get_transfer_results",
        ),
        ("v1.metrics.cache_hit_source", "CacheHitSource", "DISK"),
        ("v1.kv_cache_interface", "KVCacheGroupSpec", "is_eagle_group"),
        ("v1.request", "Request", "num_tokens"),
    ],
)
def test_a_version_that_lacks_a_name_is_refused_with_the_name(
    module_name: str,
    class_name: str | None,
    attribute: str,
    vllm: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    module = pytest.importorskip(f"vllm.{module_name}")
    if class_name is None:
        monkeypatch.delattr(module, attribute)
    else:
        monkeypatch.setattr(module, class_name, type(class_name, (), {}))
    with pytest.raises(ConfigError, match=rf"(?s){attribute}.*install vLLM 0\.32 and 0\.33"):
        check_engine()


@pytest.mark.vllm
def test_a_missing_module_is_refused_with_its_names(monkeypatch: pytest.MonkeyPatch, vllm: Any):
    monkeypatch.setitem(sys.modules, "vllm.v1.metrics.cache_hit_source", None)
    with pytest.raises(ConfigError, match="cache_hit_source"):
        check_engine()
