"""Whatever bytes lie on the disk: read as what they are, or refused; never served wrong."""

import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from store_kit import MIB, Chunks, config_of, du

from tierstore.catalog.pages.cluster_row import ClusterRow
from tierstore.catalog.rows import (
    Databases,
    OwnerRow,
    PendingRow,
    SegmentRow,
    StateRow,
)
from tierstore.codec.record import HEADER_BYTES, PLACE_BYTES, explain_mismatch, parse_places
from tierstore.errors import CatalogDamagedError, TierStoreError
from tierstore.key import make_offload_keys
from tierstore.lmdb_env.env import LmdbEnv
from tierstore.manifest import Manifest
from tierstore.testing.spread import spread_hashes

CHUNKS = Chunks(12_000)
OLD = range(64)
NEW = range(1000, 1016)
MANIFEST = Manifest.simple("stored", chunk_bytes=4096)
(KEY,) = make_offload_keys(MANIFEST.namespace, 0, spread_hashes([1]))
DATABASES = [
    "state", "namespaces", "epochs", "floors", "owners", "order", "clusters", "shards", "log",
    "segments", "pending",
]  # fmt: skip

ROWS = st.binary(max_size=120)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)
FEW = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MANY = settings(FEW, max_examples=2500)


@pytest.mark.parametrize("row", [StateRow, SegmentRow, OwnerRow, ClusterRow, PendingRow])
@given(value=ROWS)
def test_a_row_of_any_bytes_is_read_or_called_damaged(row, value):
    with suppress(CatalogDamagedError):
        assert row.unpack(value).pack() == value


@given(st.lists(st.binary(max_size=2 * PLACE_BYTES), max_size=4))
def test_places_of_any_bytes_are_as_many_as_were_given(places):
    assert len(parse_places(places)) == len(places)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES), st.binary(min_size=1, max_size=64))
def test_a_header_of_any_bytes_fits_no_record(header, payload):
    assert explain_mismatch(header, memoryview(payload), KEY, rank=0) is not None


@given(st.binary(max_size=200) | JSON.map(lambda value: repr(value).encode()))
def test_a_manifest_of_any_bytes_differs_in_words(stored):
    with suppress(TierStoreError):
        assert MANIFEST.difference(stored)
    with suppress(TierStoreError):
        MANIFEST.nearest_difference([stored, MANIFEST.canonical_json])


def opened(path, backend="file"):
    config = config_of(path, backend=backend, primary="1MiB", capacity="8MiB", io={"threads": 1})
    return CHUNKS.open(config)


@pytest.fixture(scope="module", params=["file", "lmdb"])
def template(request, tmp_path_factory):
    """A store that was closed: two generations, and one that was reset."""
    path = tmp_path_factory.mktemp("stored") / request.param
    with opened(path, request.param) as store:
        CHUNKS.put(store, range(200, 300))
        store.reset()
        CHUNKS.put(store, OLD)
    return path


def use(template, tmp_path_factory, spoil):
    """Spoil a copy and use it: chunks compare what is served, and nothing else may be raised."""
    path = tmp_path_factory.mktemp("copy") / "tier"
    shutil.copytree(template, path)
    spoil(path)
    for _ in range(2):
        with suppress(TierStoreError), opened(path, template.name) as store:
            CHUNKS.found(store, OLD)
            CHUNKS.put(store, NEW)
            store.flush()
        assert du(path) <= 8 * MIB
    with suppress(TierStoreError), opened(path, template.name) as store:
        CHUNKS.found(store, [*OLD, *NEW])
        store.check()
    shutil.rmtree(path.parent)


def spoil_row(path: Path, database: str, at: float, change: tuple[str, bytes]) -> None:
    """Change one row, chosen by where it is among all; the library does not notice anything."""
    kind, content = change
    env = LmdbEnv.open(path / "catalog", map_bytes=1 << 24, sealed=True)
    try:
        handle = getattr(Databases(env), database)
        with env.write() as txn:
            rows = list(txn.cursor(db=handle))
            key, value = rows[int(at * len(rows))] if rows else (content[:8] or b"k", b"")
            if kind == "delete":
                txn.delete(key, db=handle)
            elif kind == "add":
                txn.put(content[:76] or b"k", value, db=handle)
            else:
                start = int(at * len(value))
                changed = value[:start] + content + value[start + len(content) * (kind == "put") :]
                txn.put(key, changed, db=handle)
    finally:
        env.close()


changes = st.tuples(
    st.sampled_from(["put", "insert", "delete", "add"]),
    st.binary(min_size=1, max_size=24) | st.sampled_from([b"\xff" * 8, bytes(8), b"\xff" * 4]),
)
shares = st.floats(0, 1, exclude_max=True)
row_changes = st.lists(
    st.tuples(st.sampled_from(DATABASES), shares, changes), min_size=1, max_size=3
)


def change_rows(template, tmp_path_factory, spoilt):
    def spoil(path):
        for database, at, change in spoilt:
            with suppress(TierStoreError):
                spoil_row(path, database, at, change)

    use(template, tmp_path_factory, spoil)


@FEW
@given(spoilt=row_changes)
@example(spoilt=[("floors", 0.0, ("put", b"\xa2" * 8))])
def test_rows_of_any_bytes_bring_no_wrong_byte(template, tmp_path_factory, spoilt):
    change_rows(template, tmp_path_factory, spoilt)


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@MANY
@given(spoilt=row_changes)
def test_many_rows_of_any_bytes_bring_no_wrong_byte(template, tmp_path_factory, spoilt):
    change_rows(template, tmp_path_factory, spoilt)


NAMES = [
    "catalog/seal.bin", "catalog/distrust", "catalog/opening.lock", "catalog/lock.mdb",
    "owners/1.lock", "owners/7.lock", "owners/x.lock", "rank0/payload/distrust",
    "rank0/payload/seal.bin", "rank0/00000002.seg", "rank0/0000ffff.seg", "rank0/x.seg",
]  # fmt: skip


@FEW
@given(name=st.sampled_from(NAMES), content=st.binary(max_size=5000))
def test_small_files_of_any_bytes_bring_no_wrong_byte(template, tmp_path_factory, name, content):
    def spoil(path):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)

    use(template, tmp_path_factory, spoil)


@FEW
@given(at=shares, content=st.binary(min_size=1, max_size=600), is_zero=st.booleans())
def test_header_pages_of_any_bytes_bring_no_wrong_byte(
    template, tmp_path_factory, at, content, is_zero
):
    def spoil(path):
        files = sorted(path.rglob("*.seg")) or sorted(path.rglob("payload/data.mdb"))
        file = files[int(at * len(files))]
        page = int(at * file.stat().st_size) // 4096
        with file.open("r+b") as opened_file:
            opened_file.seek(page * 4096)
            opened_file.write(bytes(len(content)) if is_zero else content)

    use(template, tmp_path_factory, spoil)
