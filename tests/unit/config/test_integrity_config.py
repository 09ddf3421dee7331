"""The `integrity` section: what may be written, and that no key gets into a message."""

import base64
import pickle
from pathlib import Path

import pytest
from keyed import key_file, secret_of

from tierstore.config import IntegrityConfig, load_config, to_mapping
from tierstore.errors import ConfigError

HEX = secret_of(1).hex()


def document(integrity, path="/var/cache/a"):
    tier = {"name": "a", "backend": "file", "path": str(path), "capacity": "1GiB"}
    return {"primary": {"capacity": "1GiB"}, "secondary": [{**tier, "integrity": integrity}]}


def problem_of(source):
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    text = str(caught.value)
    assert HEX[:20] not in text, "the key is in the message"
    return text


def integrity_of(source):
    (tier,) = load_config(source).secondary
    return tier.integrity


def test_a_tier_has_no_integrity_unless_it_is_asked_for():
    raw = document({})
    del raw["secondary"][0]["integrity"]
    assert integrity_of(raw) is None
    assert "integrity" not in to_mapping(load_config(raw))["secondary"][0]


def test_the_section_becomes_a_path_and_a_choice():
    assert integrity_of(document({"key_file": "/etc/key"})) == IntegrityConfig(
        key_file=Path("/etc/key")
    )
    assert integrity_of(document({"key_file": Path("/etc/key"), "encrypt": True})).encrypt


def test_a_relative_path_belongs_to_the_folder_of_the_file(tmp_path, monkeypatch):
    text = """
primary: {capacity: 1GiB}
secondary:
  - {name: a, backend: file, path: cache, capacity: 1GiB, integrity: {key_file: keys/a.key}}
"""
    (tmp_path / "store.yaml").write_text(text)
    monkeypatch.chdir("/")
    assert integrity_of(tmp_path / "store.yaml").key_file == tmp_path / "keys" / "a.key"


def test_a_home_is_found(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert integrity_of(document({"key_file": "~/a.key"})).key_file == Path("/home/somebody/a.key")


def test_a_configuration_survives_the_way_to_a_mapping_and_back():
    config = load_config(document({"key_file": "/etc/key", "encrypt": True}))
    assert load_config(to_mapping(config)) == config


@pytest.mark.parametrize(
    ("integrity", "words"),
    [
        (None, "expected a mapping with key_file"),
        (HEX, "expected a mapping with key_file"),
        (True, "expected a mapping with key_file"),
        ([HEX], "expected a mapping with key_file"),
        ({}, "key_file: this key is required"),
        ({"encrypt": True}, "key_file: this key is required"),
        ({"key": HEX}, "valid keys are key_file, encrypt"),
        ({"key_file": HEX}, "this is a key"),
        ({"key_file": base64.b64encode(secret_of(1)).decode()}, "this is a key"),
        ({"key_file": f" {HEX}\n"}, "this is a key"),
        ({"key_file": None}, "expected the path of a file"),
        ({"key_file": int(HEX, 16)}, "the number is out of range"),
        ({"key_file": 5}, "expected the path of a file"),
        ({"key_file": secret_of(1)}, "expected the path of a file"),
        ({"key_file": ""}, "must have at least 1 character"),
        ({"key_file": "a\0b"}, "zero bytes"),
        ({"key_file": "~nobody-at-all/key"}, "unknown home"),
        ({"key_file": "/etc/key", "encrypt": "yes"}, "encrypt: must be a valid boolean"),
        ({"key_file": "/etc/key", "encript": True}, "did you mean 'encrypt'"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(integrity, words):
    problem = problem_of(document(integrity))
    assert problem.startswith("secondary[0].integrity")
    assert words in problem


def test_a_key_below_a_tier_is_refused_by_whatever_name(tmp_path):
    tier, keys = tmp_path / "tier", tmp_path / "keys"
    tier.mkdir()
    keys.mkdir()
    inside = key_file(tier / "a.key", 1)
    (keys / "link").symlink_to(inside)
    (tier / "out").symlink_to(key_file(keys / "a.key", 1))
    for name in (inside, keys / "link", tier / "out", keys / ".." / "tier" / "a.key"):
        assert "lies below the path of secondary[0]" in problem_of(
            document({"key_file": name}, tier)
        )
    assert integrity_of(document({"key_file": keys / "a.key"}, tier)) is not None


def test_no_key_is_in_a_configuration(tmp_path):
    config = load_config(document({"key_file": key_file(tmp_path / "a.key", 1)}))
    shown = repr(config) + str(to_mapping(config)) + repr(pickle.dumps(config))
    assert HEX[:20] not in shown
    assert repr(secret_of(1))[2:20] not in shown
