"""The installed LMDB is one whose files the code can verify."""

import tomllib

import lmdb
import numpy as np
from packaging.requirements import Requirement
from python_paths import ROOT

from tierstore.lmdb_env.page import META_DTYPE
from tierstore.lmdb_env.verify import find_damage

KNOWN_FORMAT = 1
"""What LMDB 0.9 writes into the first page of each file, and no other LMDB."""


def declared() -> Requirement:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (found,) = [
        requirement
        for requirement in map(Requirement, project["dependencies"])
        if requirement.name == "lmdb"
    ]
    return found


def test_the_installed_release_is_one_that_is_declared_and_the_declaration_ends() -> None:
    specifier = declared().specifier
    assert specifier.contains(lmdb.__version__)
    assert not specifier.contains("99.0")


def test_the_library_in_it_is_lmdb_0_9(tmp_path) -> None:
    assert lmdb.version()[:2] == (0, 9)
    with lmdb.open(str(tmp_path), map_size=1 << 20) as env, env.begin(write=True) as txn:
        txn.put(b"key", b"value")
    with (tmp_path / "data.mdb").open("rb") as file:
        content = file.read()
        assert find_damage(file.fileno(), page_count_max=1 << 20) == ""
    assert np.frombuffer(content, META_DTYPE, 1)["version"] == KNOWN_FORMAT
