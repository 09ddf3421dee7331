import contextlib
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from python_paths import ROOT, environment

from tierstore.config import (
    BreakerConfig,
    FaultRule,
    GpuConfig,
    IntegrityConfig,
    IoConfig,
    OffloadConfig,
    PrimaryConfig,
    SecondaryConfig,
    StoreConfig,
    emit_json_schema,
    load_config,
    to_mapping,
)
from tierstore.config.sections import Document
from tierstore.errors import ConfigError

CONFIGS = ROOT / "configs"
CONFIG_FILES = sorted(CONFIGS.glob("*.yaml"))


def tier(**keys: object) -> dict[str, object]:
    return {"name": "nvme", "backend": "file", "path": "/a", "capacity": "1GiB", **keys}


def document(*tiers: dict[str, object], **keys: object) -> dict[str, object]:
    return {"primary": {"capacity": "1GiB"}, "secondary": list(tiers), **keys}


def problem_of(source: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    return str(caught.value)


@pytest.mark.parametrize("path", CONFIG_FILES, ids=lambda path: path.name)
def test_every_shipped_file_loads_and_matches_the_schema(path: Path) -> None:
    load_config(path)
    jsonschema.validate(yaml.safe_load(path.read_text()), json.loads(emit_json_schema()))
    assert path.read_text().startswith("# yaml-language-server: $schema=./tierstore.schema.json\n")


@pytest.mark.parametrize("path", CONFIG_FILES, ids=lambda path: path.name)
def test_a_configuration_survives_the_way_to_a_mapping_and_back(path: Path) -> None:
    assert load_config(to_mapping(load_config(path))) == load_config(path)


def test_all_kinds_of_store_are_shipped() -> None:
    names = {path.name for path in CONFIG_FILES}
    assert names >= {"memory.yaml", "file.yaml", "lmdb.yaml", "two_tiers.yaml"}


def test_the_committed_schema_is_current() -> None:
    assert (CONFIGS / "tierstore.schema.json").read_text() == emit_json_schema()


def test_every_default_of_the_schema_is_a_value_that_can_be_written() -> None:
    schema = json.loads(emit_json_schema())
    values = {
        f"{name}.{key}": (value["default"], value)
        for name, section in [("", schema), *schema["$defs"].items()]
        for key, value in section["properties"].items()
        if "default" in value
    }
    assert values["IoSection.deadline"][0] == "2s"
    assert values["SecondarySection.io"][0] == {}
    for default, value in values.values():
        jsonschema.validate(default, {**value, "$defs": schema["$defs"]})


def test_the_schema_has_no_word_that_json_schema_lacks() -> None:
    words = set()

    def walk(schema: object) -> None:
        if isinstance(schema, dict):
            words.update(schema)
            for word, inner in schema.items():
                named = word in ("properties", "$defs")
                for part in inner.values() if named else [inner]:
                    if word != "default":
                        walk(part)
        elif isinstance(schema, list):
            for part in schema:
                walk(part)

    walk(json.loads(emit_json_schema()))
    annotations = {"$schema", "$defs", "default", "description", "examples", "title"}
    assert words <= jsonschema.Draft202012Validator.VALIDATORS.keys() | annotations


def test_a_full_document_becomes_dataclasses_in_bytes_and_seconds() -> None:
    io = {"mode": "mmap", "threads": 2, "deadline": "500ms", "write_queue": "1MB", "durable": True}
    raw = {
        "version": 1,
        "primary": {
            "capacity": "20GiB",
            "eviction": "lru",
            "pinned": "never",
            "huge_pages": False,
            "hugetlb": True,
        },
        "secondary": [tier(cascade="second_touch", eviction="lru", io=io)],
        "offload": {"blocks_per_chunk": 4, "decode": False},
        "gpu": {"kernel_below": "0B", "kernel_runs": 3, "pitched_from": "8KiB", "kernel_sms": 2},
    }
    assert load_config(raw) == StoreConfig(
        primary=PrimaryConfig(
            capacity_bytes=20 << 30, eviction="lru", pinned="never", huge_pages=False, hugetlb=True
        ),
        secondary=(
            SecondaryConfig(
                name="nvme",
                backend="file",
                path=Path("/a"),
                capacity_bytes=1 << 30,
                cascade="second_touch",
                io=IoConfig(
                    mode="mmap",
                    threads=2,
                    deadline_seconds=0.5,
                    write_queue_bytes=10**6,
                    durable=True,
                ),
            ),
        ),
        offload=OffloadConfig(blocks_per_chunk=4, decode=False),
        gpu=GpuConfig(
            kernel_below_bytes=0, kernel_runs=3, pitched_from_bytes=8 << 10, kernel_sms=2
        ),
    )


def test_the_document_and_the_dataclasses_have_the_same_defaults() -> None:
    assert load_config(document(tier())) == StoreConfig(
        primary=PrimaryConfig(capacity_bytes=1 << 30),
        secondary=(
            SecondaryConfig(name="nvme", backend="file", path=Path("/a"), capacity_bytes=1 << 30),
        ),
    )


def test_the_document_has_a_key_for_every_field() -> None:
    units = {"capacity": "capacity_bytes", "deadline": "deadline_seconds"}
    units |= {"write_queue": "write_queue_bytes", "kernel_below": "kernel_below_bytes"}
    units |= {"pitched_from": "pitched_from_bytes", "latency": "latency_seconds"}
    units["at"] = "at_bytes"
    units |= {name: f"{name}_seconds" for name in ("retry_after", "retry_after_max")}
    pairs = {
        "PrimarySection": PrimaryConfig,
        "SecondarySection": SecondaryConfig,
        "IoSection": IoConfig,
        "IntegritySection": IntegrityConfig,
        "BreakerSection": BreakerConfig,
        "FaultSection": FaultRule,
        "OffloadSection": OffloadConfig,
        "GpuSection": GpuConfig,
    }
    sections = Document.model_json_schema()["$defs"]
    assert sections.keys() == pairs.keys()
    for name, config in pairs.items():
        keys = [units.get(key, key) for key in sections[name]["properties"]]
        assert keys == [field.name for field in dataclasses.fields(config)]


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1B", 1),
        ("64KB", 64_000),
        ("512MiB", 512 << 20),
        ("1.5 GiB", 3 << 29),
        ("2TB", 2 * 10**12),
        ("0.5B", 0),
    ],
)
def test_sizes_are_read_with_their_unit(text: str, size_bytes: int) -> None:
    if size_bytes:
        config = load_config({"primary": {"capacity": text}})
        assert config.primary.capacity_bytes == size_bytes
    else:
        assert "must be greater than 0" in problem_of({"primary": {"capacity": text}})


@pytest.mark.parametrize(
    "size", [20, 20.5, "20", "20G", "20gib", "-1GiB", "GiB", "1e3KiB", "1GiB ", True, None, []]
)
def test_a_size_without_a_known_unit_is_refused_with_the_remedy(tmp_path, size: object) -> None:
    for problem in problems_in_a_file_and_a_mapping(tmp_path, {"primary": {"capacity": size}}):
        if type(size) is int:
            assert problem is None or "add a unit, such as '20GiB'" in problem
            continue
        assert problem.startswith("primary.capacity: expected a size such as '20GiB', got ")
        assert "units are B, KiB, MiB, GiB" in problem


def test_a_bare_number_of_bytes_in_a_file_is_told_to_say_so(tmp_path) -> None:
    raw = {"version": 1, "primary": {"capacity": 1 << 30}}
    in_file, in_mapping = problems_in_a_file_and_a_mapping(tmp_path, raw)
    assert "add a unit, such as '1073741824B'" in in_file
    assert in_mapping is None


@pytest.mark.parametrize("deadline", [2, "2", "2sec", "-1s", "1h", True, None])
def test_a_duration_without_a_known_unit_is_refused_with_the_remedy(tmp_path, deadline) -> None:
    raw = document(tier(io={"deadline": deadline}))
    for problem in problems_in_a_file_and_a_mapping(tmp_path, raw):
        if type(deadline) is int:
            assert problem is None or "add a unit, such as '2s'" in problem
            continue
        start = "secondary[0].io.deadline: expected a duration such as '2s', got "
        assert problem.startswith(start)
        assert "units are ms, s or min" in problem


def problems_in_a_file_and_a_mapping(folder: Path, raw: dict[str, object]) -> list[str | None]:
    """Return what is wrong with a document that a person wrote, and with that of a program."""
    path = folder / "store.yaml"
    path.write_text(yaml.safe_dump(raw))
    problems: list[str | None] = []
    for source in (path, raw):
        try:
            load_config(source)
        except ConfigError as error:
            problems.append(str(error).removeprefix(f"{path}: "))
        else:
            problems.append(None)
    return problems


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (document(tier(io={"mod": "direct"})), "secondary[0].io.mod: unknown key; did you mean 'm"),
        (document(tier(capacity_bytes="1GiB")), "secondary[0].capacity_bytes: unknown key; did y"),
        (document(primry={}), "primry: unknown key; did you mean 'primary'?"),
        (document(zzz=1), "zzz: unknown key; valid keys are version, primary, secondary, offload"),
        (document(version=2), "version: expected 1, got 2"),
        ({}, "primary: this key is required"),
        ({"primary": None}, "primary: expected a mapping, got None"),
        (document(tier(backend="fil")), "secondary[0].backend: expected 'file' or 'lmdb', got 'fi"),
        (document(tier(io={"threads": "4"})), "secondary[0].io.threads: must be a valid integer"),
        (document(tier(io={"threads": True})), "secondary[0].io.threads: must be a valid integer"),
        (document(tier(io={"threads": 0})), "secondary[0].io.threads: must be greater than or eq"),
        (document(tier(name="a b")), "secondary[0].name: must match pattern"),
        (document(tier(path="")), "secondary[0].path: must have at least 1 character"),
        (document(tier(io={"write_queue": "0B"})), "secondary[0].io.write_queue: must be greater"),
        (
            document(gpu={"pitched_from": "0B"}),
            "gpu.pitched_from: must be greater than 0, got '0B'",
        ),
        (document(secondary={}), "secondary: must be a valid list"),
        ([], "expected a mapping with 'primary', got list"),
    ],
)
def test_a_wrong_key_is_named_by_its_path(raw: object, expected: str, tmp_path: Path) -> None:
    if isinstance(raw, dict):
        assert problem_of(raw).startswith(expected)
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(raw))
    assert problem_of(path).startswith(f"{path}: {expected}")


def test_every_wrong_key_is_reported_at_once() -> None:
    problem = problem_of(document(tier(evction="lru", capacity="5"), offlod={}))
    assert len(problem.splitlines()) == 3


@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        ([tier(), tier(path="/b")], "secondary[1].name: 'nvme' is also the name of secondary[0]"),
        ([tier(), tier(name="b")], "secondary[1].path: /a and secondary[0].path (/a) contain"),
        ([tier(), tier(name="b", path="/a/b")], "secondary[1].path: /a/b and secondary[0].path"),
        ([tier(path="/a/b"), tier(name="b")], "secondary[1].path: /a and secondary[0].path"),
        ([tier(), tier(name="b", path="/x/../a/")], "secondary[1].path: /x/../a and secondary[0]"),
        ([tier(backend="lmdb", io={"mode": "mmap"})], "secondary[0].io.mode: the lmdb backend has"),
        ([tier(capacity="8191KiB")], "secondary[0].capacity: at least 8MiB"),
        ([tier(name="primary")], "secondary[0].name: 'primary' names the tier in host memory"),
    ],
)
def test_an_impossible_pair_is_refused(tiers: list[dict[str, object]], expected: str) -> None:
    assert problem_of(document(*tiers)).startswith(expected)


def test_folders_with_a_common_beginning_are_not_nested() -> None:
    config = load_config(document(tier(path="/a"), tier(name="b", path="/ab")))
    assert [str(one.path) for one in config.secondary] == ["/a", "/ab"]


def test_a_link_to_another_tiers_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    tiers = [tier(path=tmp_path / "real"), tier(name="b", path=tmp_path / "link")]
    assert "contain each other" in problem_of(document(*tiers))


def test_a_relative_path_belongs_to_the_folder_of_the_file(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "store.yaml"
    path.write_text(yaml.safe_dump(document(tier(path="cache"))))
    assert load_config(path).secondary[0].path == tmp_path / "cache"
    assert load_config(str(path)).secondary[0].path == tmp_path / "cache"
    monkeypatch.chdir(tmp_path)
    assert load_config("store.yaml").secondary[0].path == tmp_path / "cache"


def test_a_relative_path_of_a_mapping_belongs_to_the_current_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(document(tier(path="cache"))).secondary[0].path == tmp_path / "cache"


def test_the_home_folder_is_expanded(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config(document(tier(path="~/cache"))).secondary[0].path == tmp_path / "cache"


def test_loading_creates_nothing(tmp_path: Path) -> None:
    load_config(document(tier(path=tmp_path / "cache")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("primary: {capacity: 1GiB}\nversion: 1\nprimary: {}", "line 3, column 1: duplicate key"),
        ("primary: {capacity: 1GiB, capacity: 2GiB}", "line 1, column 27: duplicate key 'capac"),
        ("primary: [", "line 1, column 11: while parsing a flow node, expected the node content"),
        ("primary: {}\n---\nversion: 1", "line 2, column 1: expected a single document in the str"),
        ("primary: !!python/name:os.system", "line 1, column 10: tags such as 'tag:yaml.org,20"),
        ("", "expected a mapping with 'primary', got NoneType"),
        ("primary: {capacity: 1GiB, huge_pages: yes}", "primary.huge_pages: must be a valid bool"),
    ],
)
def test_yaml_that_surprises_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    assert problem_of(path).startswith(f"{path}: {expected}")


def test_words_that_yaml_1_1_turned_into_booleans_are_words(tmp_path: Path) -> None:
    path = tmp_path / "store.yaml"
    path.write_text(
        "primary: {capacity: 1GiB, huge_pages: false}\nsecondary:\n"
        "- {name: off, backend: file, path: 010, capacity: 1GiB}\n"
    )
    config = load_config(path)
    assert config.secondary[0].name == "off"
    assert config.secondary[0].path == tmp_path / "010"
    assert config.primary.huge_pages is False


def test_a_file_that_is_not_there_is_a_config_error(tmp_path: Path) -> None:
    assert "cannot be read" in problem_of(tmp_path / "absent.yaml")


def test_importing_the_package_does_not_import_pydantic_or_yaml() -> None:
    code = "import sys, tierstore.config; print({'pydantic', 'yaml'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("aB1 /~", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["capacity", "io", "name", "path", "x"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["primary", "secondary", "version", "y"]), values))
def test_any_mapping_is_accepted_or_refused_with_a_config_error(raw: dict[str, object]) -> None:
    with contextlib.suppress(ConfigError):
        load_config(raw)
