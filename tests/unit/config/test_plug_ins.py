"""Plug-ins are found, loaded once, and refused in words; built-in names stay what they are."""

import json
import re
import subprocess
import sys

import jsonschema
import pytest
from written_plug_in import write_plug_in

from tierstore.config import emit_json_schema, load_config, to_mapping
from tierstore.config.plug_ins import PlugInGroup, load_plug_in
from tierstore.errors import ConfigError

GROUPS = {
    "tierstore.policies": ("primary.eviction", "lru"),
    "tierstore.admissions": ("secondary[0].cascade", "on_evict"),
    "tierstore.backends": ("secondary[0].backend", "lmdb"),
    "tierstore.tiers": ("secondary[0].tier", "disk"),
}


def document(key: str, name: object, **options: object) -> dict[str, object]:
    primary: dict[str, object] = {"capacity": "1GiB"}
    tier: dict[str, object] = {"name": "t", "backend": "file", "path": "/a", "capacity": "1GiB"}
    section, _, field = key.rpartition(".")
    keys = {field: name, **({f"{field}_options": options} if options else {})}
    (primary if section == "primary" else tier).update(keys)
    return {"primary": primary, "secondary": [tier]}


def problem_of(key: str, name: object, **options: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(document(key, name, **options))
    return caught.value


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("group", "key"), [(group, key) for group, (key, _) in GROUPS.items()])
def test_an_installed_name_is_accepted_where_a_built_in_one_is(folder, group, key):
    write_plug_in(folder, group, "mine", "def make(): ...", attribute="make")
    raw = document(key, "mine", share=0.5, names=["a"])
    if group == "tierstore.tiers":  # it comes with a backend of its own
        write_plug_in(folder, "tierstore.backends", "mine", "def make(): ...", attribute="make")
        raw["secondary"][0]["backend"] = "mine"
    config = load_config(raw)
    section = config.primary if key.startswith("primary") else config.secondary[0]
    field = key.rpartition(".")[2]
    assert getattr(section, field) == "mine"
    assert getattr(section, f"{field}_options") == {"share": 0.5, "names": ["a"]}
    assert load_config(to_mapping(config)) == config
    jsonschema.validate(raw, json.loads(emit_json_schema()))


@pytest.mark.parametrize("group", PlugInGroup)
def test_every_group_can_be_loaded_and_is_imported_once(folder, group):
    source = "count = []\ncount.append(1)\ndef make(): return count"
    write_plug_in(folder, group, "once", source, attribute="make")
    first, second = load_plug_in(group, "once"), load_plug_in(str(group), "once")
    assert first is second
    assert first() == [1]


@pytest.mark.parametrize(("group", "key"), [(group, key) for group, (key, _) in GROUPS.items()])
def test_a_typo_is_refused_with_the_nearest_name_and_what_there_is(folder, group, key):
    write_plug_in(folder, group, "by_weight", "def make(): ...", attribute="make")
    built_in = GROUPS[group][1]
    text = str(problem_of(key, built_in[:-1] + "x"))
    assert text.startswith(f"{key}: expected ")
    assert f"'{built_in}'" in text
    assert f"plug-ins of {group} in this environment: 'by_weight'" in text
    assert "did you mean 'by_weight'?" in str(problem_of(key, "by_wieght"))
    assert "install the package that defines it" in str(problem_of(key, "quite different"))


def test_without_plug_ins_the_message_is_as_short_as_before():
    assert str(problem_of("primary.eviction", "lur")) == (
        "primary.eviction: expected 'lru' or 'arc', got 'lur'; did you mean 'lru'? "
        "plug-ins of tierstore.policies in this environment: none"
    )


@pytest.mark.parametrize("name", [None, 3, ["lru"], {"lru": 1}, "", "x" * 10_000, "a\nb", True])
def test_what_is_no_name_is_refused_in_bounded_words(name):
    for key, built_in in GROUPS.values():
        text = str(problem_of(key, name))
        assert text.startswith(f"{key}: expected ")
        assert f"'{built_in}'" in text
        assert len(text) < 1000
        assert "\n" not in text


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import no_such_module_anywhere", ModuleNotFoundError),
        ("raise RuntimeError('no licence')", RuntimeError),
        ("make = (", SyntaxError),
        ("import sys; sys.exit(3)", SystemExit),
        ("made = 1", AttributeError),
    ],
)
@pytest.mark.parametrize("group", GROUPS)
def test_a_plug_in_that_cannot_be_imported_is_a_problem_of_its_key(folder, group, source, cause):
    value = write_plug_in(folder, group, "broken", source, attribute="make")
    error = problem_of(GROUPS[group][0], "broken")
    text = f"{GROUPS[group][0]}: the plug-in 'broken' ('{value}') cannot be imported: "
    assert str(error).startswith(text + cause.__name__)
    assert isinstance(error.__cause__, cause)
    with pytest.raises(ConfigError, match="cannot be imported") as caught:
        load_plug_in(group, "broken")
    assert isinstance(caught.value.__cause__, cause)


def test_a_broken_plug_in_named_in_a_file_names_the_file_and_the_cause(folder):
    write_plug_in(folder, "tierstore.policies", "bad", "1 / 0", attribute="make")
    path = folder / "store.yaml"
    path.write_text("primary: {capacity: 1GiB, eviction: bad}\n")
    with pytest.raises(
        ConfigError, match=rf"^{re.escape(str(path))}: primary\.eviction: "
    ) as caught:
        load_config(path)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_what_is_no_function_is_refused(folder):
    write_plug_in(folder, "tierstore.policies", "number", "make = 3", attribute="make")
    assert "must be a class or a function, not 3" in str(problem_of("primary.eviction", "number"))


def test_a_name_of_two_packages_is_refused_with_both(folder):
    values = [
        write_plug_in(folder, "tierstore.backends", "twin", "def make(): ...", attribute="make")
        for _ in range(2)
    ]
    text = str(problem_of("secondary[0].backend", "twin"))
    assert all(value in text for value in values)
    assert "remove all but one" in text


@pytest.mark.parametrize("group", GROUPS)
def test_a_built_in_name_wins_and_imports_nothing(folder, group):
    key, built_in = GROUPS[group]
    write_plug_in(folder, group, built_in, "raise RuntimeError", attribute="make")
    load_config(document(key, built_in))


@pytest.mark.parametrize(("key", "built_in"), GROUPS.values())
def test_options_of_a_built_in_part_are_refused(key, built_in):
    field = key.rpartition(".")[2]
    assert str(problem_of(key, built_in, size=3)) == (
        f"{key}_options: {field} '{built_in}' is built in and takes no options; remove the key"
    )


def test_a_plug_in_may_be_called_as_a_built_in_part_of_another_kind(folder):
    write_plug_in(folder, "tierstore.backends", "disk", "def make(): ...", attribute="make")
    config = load_config(document("secondary[0].backend", "disk", size=3))
    assert config.secondary[0].backend_options == {"size": 3}


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_a_plug_in_tier_needs_a_backend_of_its_own(folder, backend):
    write_plug_in(folder, "tierstore.tiers", "mine", "def make(): ...", attribute="make")
    raw = document("secondary[0].tier", "mine")
    raw["secondary"][0]["backend"] = backend
    with pytest.raises(ConfigError) as caught:
        load_config(raw)
    assert str(caught.value) == (
        f"secondary[0].backend: '{backend}' keeps records where a tier on disk places them; name "
        "the backend that belongs to tier 'mine'"
    )


@pytest.mark.parametrize("key", ["path", "backend", "capacity"])
def test_a_plug_in_tier_needs_the_keys_of_every_tier(folder, key):
    write_plug_in(folder, "tierstore.tiers", "mine", "def make(): ...", attribute="make")
    raw = document("secondary[0].tier", "mine")
    del raw["secondary"][0][key]
    with pytest.raises(ConfigError, match=rf"^secondary\[0\]\.{key}: this key is required"):
        load_config(raw)


@pytest.mark.parametrize("options", [None, [], "a", 3])
def test_options_are_a_mapping(options):
    raw = {"primary": {"capacity": "1GiB", "eviction_options": options}}
    with pytest.raises(ConfigError, match=r"^primary\.eviction_options: "):
        load_config(raw)


def test_a_file_that_names_no_plug_in_does_not_look_for_any():
    code = (
        "import sys; from tierstore import TierStore; from tierstore.config import load_config; "
        "load_config({'primary': {'capacity': '1GiB'}}); "
        "import tierstore.config.plug_ins as found; print(found._load.cache_info().misses)"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout == "0\n"
