"""One tier as the executor sees it: its writes, and the paths that they depend on."""

import os
import threading
from dataclasses import replace
from functools import partial

import pytest
from native_library import ScriptedKernel, interpreted, native
from store_kit import MIB, Chunks, config_of

from tierstore.backend.record_batch import RecordBatch
from tierstore.backend.segments.backend import FileBackend
from tierstore.catalog.owners import OwnerLock
from tierstore.config import load_config
from tierstore.device.marker import claim
from tierstore.executor.tier_io import TierIo
from tierstore.testing.extents import Extent
from tierstore.transfer import FailureReason

CHUNKS = Chunks(65_536)
OWNER = 7
REFUSED = {0: FailureReason.IO_ERROR, 1: FailureReason.IO_ERROR}


class Stage:
    """A tier on a path that an owner has open."""

    def __init__(self, path, library):
        self.path = path
        claim(path).close()
        (path / "catalog").mkdir()
        self.lock = OwnerLock.create(path / "owners", OWNER)
        (config,) = load_config(config_of(path)).secondary
        config = replace(config, io=replace(config.io, threads=1))
        self.tier = TierIo(
            config,
            CHUNKS.manifest,
            partial(self._open_backend, library),
            rank=0,
            rank_count=1,
            pool_bytes=MIB,
        )

    def _open_backend(self, library, config, manifest, *, rank, rank_count):
        backend = FileBackend(config.path / "rank0", rank=rank, tier=config.path, library=library)
        backend.open()
        return backend

    def write(self, extent):
        return self.tier.write(OWNER, RecordBatch.of(extent.to_write()))

    def segments(self):
        return sorted(path.name for path in (self.path / "rank0").glob("*.seg"))

    def close(self):
        self.tier.pool.close(60)
        self.tier.close()
        self.lock.close()


@pytest.fixture
def counted(monkeypatch):
    """Count the looks at paths from Python, of this thread."""
    looks = []
    stat, here = os.stat, threading.get_ident()

    def counting(*args, **options):
        if threading.get_ident() == here:
            looks.append(args[0])
        return stat(*args, **options)

    monkeypatch.setattr(os, "stat", counting)
    return looks


@pytest.mark.parametrize("library", [native, interpreted])
def test_what_an_open_tier_writes_and_reads_needs_no_look_at_a_path_from_python(
    tmp_path, library, counted
):
    """Each of them gives the interpreter away, which a busy thread may then keep for long."""
    stage = Stage(tmp_path / "tier", library)
    first, second = Extent(2, 9000), Extent(2, 9000, page=10)
    assert stage.write(first) == {}
    counted.clear()
    assert stage.write(second) == {}
    assert stage.tier.backend.read(RecordBatch.of(second.to_read())) == {}
    assert stage.tier.backend.read(RecordBatch.of(first.to_read())) == {}
    assert bool(counted) == (library is interpreted)
    stage.close()


@pytest.mark.parametrize("library", [native, interpreted])
def test_a_tier_whose_path_was_replaced_is_not_written(tmp_path, library):
    stage = Stage(tmp_path / "tier", library)
    assert stage.write(Extent(2, 9000)) == {}
    stage.path.rename(tmp_path / "away")
    claim(stage.path).close()
    (stage.path / "catalog").mkdir()
    (stage.path / "owners").mkdir()
    (stage.path / "rank0").mkdir()
    assert stage.write(Extent(2, 9000, page=10)) == REFUSED
    assert stage.segments() == []
    stage.close()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_what_was_written_while_the_owner_lost_its_path_is_taken_back(tmp_path, is_replaced):
    """The lock file leaves during the write, and perhaps another one comes in its place."""
    kernel = ScriptedKernel()
    stage = Stage(tmp_path / "tier", kernel.native)
    assert stage.write(Extent(2, 9000)) == {}
    name = stage.path / "owners" / f"{OWNER}.lock"
    other = tmp_path / "other"
    other.touch()
    kernel.rename(*((other, name) if is_replaced else (name, tmp_path / "gone")))
    assert stage.write(Extent(2, 9000, page=10)) == REFUSED
    assert stage.segments() == [], "it is in no account"
    stage.close()
