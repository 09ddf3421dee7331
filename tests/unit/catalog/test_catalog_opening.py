"""What a catalog says when it is opened on a path that does not fit."""

import dataclasses
import struct

import pytest
from catalog_harness import MIB, Harness

from tierstore.catalog.catalog import Catalog
from tierstore.catalog.opening import enter_owner
from tierstore.catalog.owners import OwnerLock
from tierstore.catalog.rows import CATALOG_VERSION, StateRow
from tierstore.device.system import DatabasePoint, SystemCalls
from tierstore.errors import CatalogError, ConfigError, ManifestError
from tierstore.layout import PAGE_BYTES
from tierstore.manifest import Manifest


def open_with(harness, manifest):
    Catalog.open(harness.config, manifest, rank_count=harness.ranks).close()


def test_a_model_that_starts_cold_on_a_path_with_its_chunks_is_told_why(tmp_path, caplog):
    harness = Harness(tmp_path)
    first = harness.manifest
    with harness.catalog._env.write() as txn:
        txn.put(b"no json!", b"{", db=harness.catalog._databases.namespaces)
    harness.catalog.close()
    open_with(harness, Manifest.simple("another model", first.chunk_bytes(0)))
    assert caplog.messages == []
    extra = (("dtype", "bfloat16"), ("load_format", "auto"))
    second = dataclasses.replace(first, revision="v2", extra=extra)
    open_with(harness, second)
    third = dataclasses.replace(second, extra=(("dtype", "float16"), ("load_format", "auto")))
    open_with(harness, third)
    open_with(harness, third)
    cold = "chunks of the same model are stored under another identity and will not be found: "
    revised, retyped = caplog.messages
    assert revised == (
        f"{cold}secondary=t extra.dtype: stored None, ours 'bfloat16'; "
        "extra.load_format: stored None, ours 'auto'; revision: stored '', ours 'v2'"
    )
    assert retyped == f"{cold}secondary=t extra.dtype: stored 'bfloat16', ours 'float16'"


def test_another_manifest_under_the_same_namespace_is_refused(tmp_path):
    harness = Harness(tmp_path)
    config, namespace = harness.catalog._config, harness.manifest.namespace
    harness.catalog.close()
    forged = Manifest.simple("forged", harness.chunk)
    vars(forged)["namespace"] = namespace
    with pytest.raises(ManifestError, match="model"):
        Catalog.open(config, forged, rank_count=1)


def test_a_path_of_another_backend_is_refused(tmp_path):
    Harness(tmp_path).catalog.close()
    with pytest.raises(ConfigError, match="another backend"):
        Harness(tmp_path, backend="lmdb")


def test_a_capacity_below_one_segment_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="raise it by at least"):
        Harness(tmp_path, capacity=MIB)


def test_a_file_that_is_no_catalog_is_started_anew(tmp_path):
    (tmp_path / "catalog").mkdir()
    (tmp_path / "catalog" / "data.mdb").write_bytes(b"x" * 65536)
    harness = Harness(tmp_path)
    assert harness.catalog.damage
    harness.store(*range(8))
    harness.reopen()
    assert harness.located(*range(8)) == [True] * 8
    assert not harness.catalog.damage
    harness.catalog.close()


class WatchedFile(SystemCalls):
    """Notes how long a file is whenever a transaction that writes begins."""

    def __init__(self, file):
        self._file = file
        self.sizes = []

    def reach(self, point):
        if point is DatabasePoint.WRITE:
            self.sizes.append(self._file.stat().st_size)

    def at_database(self, directory):
        del directory
        return self


def test_what_no_row_is_charged_for_is_cut_off_before_others_would_wait_for_it(tmp_path):
    harness = Harness(tmp_path / "tier")
    harness.store(1)
    (segment,) = harness.disk.segments
    page_count = harness.disk.lengths[segment]
    harness.catalog.close()
    file = tmp_path / "tier" / "rank0" / f"{segment:08x}.seg"
    file.parent.mkdir(mode=0o700)
    with file.open("wb") as opened:
        opened.truncate((page_count + 5) * PAGE_BYTES)
    system = WatchedFile(file)
    Catalog.open(harness.config, harness.manifest, rank_count=1, system=system).close()
    assert system.sizes[-1] == page_count * PAGE_BYTES


def test_an_owner_who_cannot_be_entered_locks_no_number(tmp_path):
    """Goal: the next try, which is given the same number, is not kept out by the first one."""
    harness = Harness(tmp_path)
    catalog, config = harness.catalog, harness.catalog._config
    number = 1 << 32  # no row has room for it
    state = StateRow(CATALOG_VERSION, 0, 1, next_owner=number)
    with pytest.raises(struct.error), catalog._env.write() as txn:
        enter_owner(txn, catalog._databases, config, harness.manifest, state)
    lock = OwnerLock.create(config.path / "owners", number)
    lock.close()
    catalog.close()


@pytest.mark.parametrize("version", [1, 2, CATALOG_VERSION + 1])
def test_rows_of_another_release_are_refused_and_not_removed(tmp_path, version):
    """Whatever follows the version: a checksum as ours, or what we cannot read."""
    for content in (StateRow(version, 0, 1).pack(), struct.pack("<13Q", version, *range(12))):
        harness = Harness(tmp_path / str(len(content)))
        with harness.catalog._env.write() as txn:
            txn.put(b"state", content, db=harness.catalog._databases.state)
        harness.catalog.close()
        for _ in range(2):
            with pytest.raises(
                CatalogError, match=f"catalog of version {version}.*remove the directory"
            ):
                open_with(harness, harness.manifest)


def test_rows_of_this_release_that_name_another_one_are_damaged(tmp_path):
    harness = Harness(tmp_path)
    with harness.catalog._env.write() as txn:
        row = bytes([CATALOG_VERSION + 1]) + StateRow(CATALOG_VERSION, 0, 1).pack()[1:]
        txn.put(b"state", row, db=harness.catalog._databases.state)
    harness.catalog.close()
    opened = Catalog.open(harness.config, harness.manifest, rank_count=harness.ranks)
    assert "version" in opened.damage
    opened.close()
