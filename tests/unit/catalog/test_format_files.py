"""The files, databases and items of docs/format.md against those of stores that were in use."""

import re

import numpy as np
from catalog_harness import Harness
from format_tables import table_of

from tierstore import Manifest, TierStore
from tierstore.catalog.messages import BeginEpoch, ForgetNamespace
from tierstore.catalog.rows import number_value
from tierstore.device.block_units import BlockUnits
from tierstore.lmdb_env.env import LmdbEnv
from tierstore.testing.spread import spread_hashes

NUMBERS = {"<owner>": r"\d+", "<rank>": r"\d+", "<segment>": r"[0-9a-f]{8}"}
CHUNK_BYTES = 65_536
ROWS_OF_OTHER_FILE_SYSTEMS = {
    ("state", "`units`"): (b"units", BlockUnits().pack()),
    ("units", "segment, unit (2 x u32)"): (bytes(8), number_value(1)),
}
"""Most give back every page by itself, and have none of these."""


def test_databases_and_the_bytes_of_their_rows_are_those_of_a_catalog(tmp_path):
    harness = Harness(tmp_path / "tier")
    for number in range(0, 60, 4):
        harness.store(*range(number, number + 4))
    epoch = harness.manifest.in_epoch("one")
    harness.writer.handle([BeginEpoch(epoch.namespace, epoch.canonical_json)])
    harness.writer.handle([ForgetNamespace(harness.manifest.namespace)])
    rows = table_of("Catalog")
    databases = vars(harness.catalog._databases)
    assert {row["database"].strip("`") for row in rows} == databases.keys()
    for row in rows:
        name = row["database"].strip("`")
        with harness.catalog._env.read(databases[name]) as txn:
            stored = [(bytes(key), bytes(value)) for key, value in txn.cursor()]
        other = ROWS_OF_OTHER_FILE_SYSTEMS.get((name, row["key"]))
        if other is not None:
            stored = [other]
        elif name == "state" or row["key"] == "`head`":
            stored = [item for item in stored if item[0] == row["key"].strip("`").encode()]
        elif name == "shards":
            stored = [item for item in stored if item[0] != b"head"] or [(bytes(2), b"")]
        assert stored, f"{name} has no row to compare with"
        low, _, high = row["key bytes"].partition(" to ")
        assert all(int(low) <= len(key) <= int(high or low) for key, _ in stored), name
        if row["value bytes"]:
            assert {len(value) for _, value in stored} == {int(row["value bytes"])}, name
    harness.catalog.close()


def test_files_below_a_path_are_those_of_the_page(tmp_path):
    patterns = {}
    for row in table_of("Files"):
        pattern = re.escape(row["path"].strip("`"))
        for word, digits in NUMBERS.items():
            pattern = pattern.replace(word, digits)
        patterns[row["path"]] = re.compile(pattern)
    found = set()
    for backend in ("file", "lmdb"):
        path = tmp_path / backend
        with opened_with_chunks(path, backend):
            found |= files_below(path)
        found |= files_below(path)  # the seal
        env = LmdbEnv.open(path / "catalog", map_bytes=1 << 38, tier=path)
        env.distrust("a test says so")
        env.close()
        found |= files_below(path)
    assert {name for name in found if not any(p.fullmatch(name) for p in patterns.values())} == (
        set()
    )
    assert {
        name for name, p in patterns.items() if not any(p.fullmatch(file) for file in found)
    } == set()


def files_below(path):
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


def test_items_of_a_payload_environment_are_those_of_the_page(tmp_path):
    path = tmp_path / "tier"
    opened_with_chunks(path, "lmdb").close()
    (payload,) = path.glob("rank*/payload")
    env = LmdbEnv.open(payload, map_bytes=1 << 26, tier=path)
    with env.read() as txn:
        items = {bytes(key): bytes(value) for key, value in txn.cursor()}
    env.close()
    widths = {row["item"]: int(row["key bytes"]) for row in table_of("Payload environment")}
    headers = {key for key, value in items.items() if value.startswith(b"TSRECORD")}
    assert len(headers) == 4
    assert {len(key) for key in headers} == {widths["header"]}
    assert all(key.endswith(b"\x01") for key in headers)
    others = items.keys() - headers - {b"\xff" * widths["generation"]}
    assert others == {key[: widths["body"]] for key in headers}


def opened_with_chunks(path, backend):
    """Return an open store whose tier has four records."""
    tier = {"name": "disk", "backend": backend, "path": str(path), "capacity": "64MiB"}
    config = {
        "primary": {"capacity": "4MiB"},
        "secondary": [tier | {"cascade": "write_through"}],
    }
    manifest = Manifest.simple("m", chunk_bytes=CHUNK_BYTES)
    store = TierStore.open(config, manifest)
    store.put(manifest.keys(spread_hashes(range(4))), np.ones((4, CHUNK_BYTES), np.uint8))
    store.flush()
    return store
