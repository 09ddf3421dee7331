import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from python_paths import ROOT, environment

from tierstore.config import emit_json_schema, load_config
from tierstore.config.yaml_text import parse_yaml
from tierstore.metrics import Metric
from tierstore.transfer import FailureReason

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ROOT / "BENCHMARKS.md",
    ROOT / "SECURITY.md",
    ROOT / "adapters" / "vllm" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


def blocks(language: str) -> list[object]:
    return [
        pytest.param(text, id=f"{path.name}-{number}")
        for path in DOCUMENTS
        for number, text in enumerate(
            re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
        )
    ]


def yaml_keys() -> Iterator[str]:
    schema = json.loads(emit_json_schema())

    def walk(section: Mapping[str, object], prefix: str) -> Iterator[str]:
        for name, value in section["properties"].items():
            inner = value.get("items", value)
            brackets = "[]" if "items" in value else ""
            yield f"{prefix}{name}"
            if "$ref" in inner:
                definition = schema["$defs"][inner["$ref"].rpartition("/")[2]]
                yield from walk(definition, f"{prefix}{name}{brackets}.")

    return walk(schema, "")


@pytest.mark.parametrize("text", blocks("python"))
def test_a_python_block_runs(text: str, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, env=environment(),
        check=True, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("text", blocks("yaml"))
def test_a_yaml_block_loads(text: str) -> None:
    load_config(parse_yaml(text))


@pytest.mark.parametrize("text", blocks("bash"))
def test_a_bash_block_parses_and_names_what_exists(text: str) -> None:
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    words = [word for line in shlex.split(text, comments=True) for word in line.split()]
    ours = [word for word in words if re.match(r"(\./)?(scripts|configs|tests|docs|\.ci)/", word)]
    assert [word for word in ours if not (ROOT / word).exists()] == []


def test_the_launch_line_is_json_that_vllm_understands() -> None:
    launch = next(
        line
        for block in re.findall(
            r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
        )
        for line in [shlex.split(block)]
        if "--kv-transfer-config" in line
    )
    settings = json.loads(launch[launch.index("--kv-transfer-config") + 1])
    assert settings["kv_connector"] == "TierStoreConnector"
    assert settings["kv_connector_module_path"] == "tierstore_vllm"
    assert settings["kv_role"] == "kv_both"
    assert settings["kv_load_failure_policy"] == "recompute"
    load_config(ROOT / settings["kv_connector_extra_config"]["tierstore.config"])


def test_the_first_screen_of_the_readme_is_one_screen() -> None:
    first_screen = (ROOT / "README.md").read_text().partition("\n## ")[0]
    assert len(first_screen.rstrip().splitlines()) <= 40


@pytest.mark.parametrize("key", list(yaml_keys()))
def test_every_yaml_key_is_documented(key: str) -> None:
    assert f"| `{key}` |" in (ROOT / "docs" / "configuration.md").read_text()


def test_no_yaml_key_is_documented_that_does_not_exist() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    assert set(re.findall(r"^\| `(.+?)` \|", text, re.MULTILINE)) == set(yaml_keys())


def test_exactly_the_metrics_that_exist_are_documented() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ?(?:`(\w+)`)? ?\|", text, re.MULTILINE)
    assert set(rows) == {(metric.metric_name, metric.kind, metric.label) for metric in Metric}


def test_exactly_the_reasons_that_are_counted_are_documented() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text().partition("## Reasons")[2]
    counted = {reason.value for reason in FailureReason}
    modules = [path for path in (ROOT / "tierstore").rglob("*.py") if "testing" not in path.parts]
    for path in modules:
        found = re.findall(
            r'(?<!{)label="(\w+)"|_drop\(.*, "(\w+)"\)|or \{"(\w+)"\}', path.read_text()
        )
        counted.update("".join(words) for words in found)
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == counted


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text())
    local = [link for link in links if not link.startswith("http")]
    assert [link for link in local if not (path.parent / link).exists()] == []
