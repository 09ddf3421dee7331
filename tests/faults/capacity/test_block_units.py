"""Units of a file system: refused when too large, kept with the path, the same for all ranks."""

import errno
import logging
import random
import shutil

import numpy as np
import pytest
from catalog_harness import CountedDisk, Harness
from filesystems import mounted, sampled
from store_kit import MIB, Chunks, config_of, du

from tierstore import TierStore
from tierstore.backend.segments.backend import FileBackend
from tierstore.catalog.messages import Evict, RemoveKeys, TouchKeys
from tierstore.device.system import SystemCalls
from tierstore.errors import BackendError, ConfigError
from tierstore.testing.extents import Extent, write_extent
from tierstore.tier_events import Placed
from tierstore.transfer import PageRun


class NoHoles(SystemCalls):
    """A file system that takes back whole files only."""

    def punch_hole(self, fd, offset, size_bytes):
        raise OSError(errno.EOPNOTSUPP, "refused")


class NothingAhead(NoHoles):
    """One that gives out blocks with the bytes, too."""

    def allocate(self, fd, offset, size_bytes):
        raise OSError(errno.EOPNOTSUPP, "refused")


@pytest.mark.parametrize("chunk_bytes", [5000, 262_144])
@pytest.mark.parametrize("system", [NoHoles, NothingAhead])
def test_a_tier_whose_file_system_frees_whole_files_keeps_its_capacity(
    tmp_path, system, chunk_bytes
):
    chunks = Chunks(chunk_bytes)
    path = tmp_path / "tier"
    path.mkdir()
    config = config_of(path, capacity="32MiB", io={"deadline": "60s"})
    batch = 2 * MIB // chunk_bytes
    written = 0
    with sampled(path) as usage:
        for _ in range(2):
            with TierStore.open(config, chunks.manifest, open_system=lambda _: system()) as store:
                for _ in range(24):
                    chunks.put(store, range(written, written + batch))
                    written += batch
                    chunks.found(store, range(max(0, written - 8 * batch), written, 3))
                store.flush()
                assert store.check() == []
                stats = store.stats().secondary["disk"]
                assert stats.payload_bytes * -(-chunk_bytes // 4096) * 4096 >= (
                    0.7 * 32 * MIB * chunk_bytes
                )
                newest = range(written - batch, written)
                assert chunks.found(store, newest) == list(newest)
    assert usage.bytes_max <= 32 * MIB


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_a_capacity_of_a_few_units_is_refused_with_the_least_that_works(tmp_path, backend):
    chunks = Chunks(65_536)
    with mounted("tmpfs-huge", 256 * MIB, below=tmp_path) as mount:
        path = mount / "tier"
        with pytest.raises(
            ConfigError, match=rf"{8 * MIB} bytes .* {2 * MIB} bytes at once"
        ) as told:
            chunks.open(config_of(path, backend=backend, capacity="8MiB"))
        least = int(str(told.value).split()[-1])
        config = config_of(path, backend=backend, capacity=f"{least}B")
        path.mkdir(exist_ok=True)
        with sampled(path) as usage, chunks.open(config) as store:
            for first in range(0, 800, 16):
                chunks.put(store, range(first, first + 16))
            store.flush()
            assert store.check() == []
            assert chunks.found(store, range(784, 800)) == list(range(784, 800))
        assert usage.bytes_max <= least


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_a_path_that_was_copied_to_a_file_system_of_larger_units_stays_within_its_capacity(
    tmp_path, caplog, backend
):
    chunks = Chunks(65_536)
    source = tmp_path / "tier"
    with chunks.open(config_of(source, backend=backend, capacity="48MiB")) as store:
        for first in range(0, 1600, 16):
            chunks.put(store, range(first, first + 16))
    with mounted("ext4-bigalloc", 512 * MIB, below=tmp_path) as mount:
        path = mount / "tier"
        shutil.copytree(source, path)
        config = config_of(path, backend=backend, capacity="64MiB")
        with caplog.at_level(logging.WARNING), chunks.open(config) as store:
            for first in range(0, 1600, 16):
                chunks.put(store, range(first, first + 16))
            store.flush()
            assert store.check() == []
            assert chunks.found(store, range(1584, 1600)) == list(range(1584, 1600))
            assert du(path) <= 64 * MIB
        assert "gives out and takes back" in caplog.text


def test_a_path_keeps_its_larger_units_on_a_file_system_of_smaller_ones(tmp_path):
    chunks = Chunks(65_536)
    target = tmp_path / "tier"
    with mounted("ext4-bigalloc", 512 * MIB, below=tmp_path) as mount:
        path = mount / "tier"
        with chunks.open(config_of(path)) as store:
            for first in range(0, 1600, 16):
                chunks.put(store, range(first, first + 16))
            store.flush()
            kept = chunks.found(store, range(1600))
        shutil.copytree(path, target)
    with chunks.open(config_of(target)) as store:
        assert store.check() == []
        assert chunks.found(store, range(1600)) == kept
        for first in range(1600, 3200, 16):
            chunks.put(store, range(first, first + 16))
        store.flush()
        assert store.check() == []
        assert du(target) <= 64 * MIB


def pages_of(raw):
    """Return the segment of a place, the pages of its record, header first, and of its file."""
    segment, header_page, index, stride, _, file_pages = np.frombuffer(raw, np.uint32).tolist()
    first = header_page + 1 + index * stride
    return segment, [header_page, *range(first, first + stride)], file_pages


class UnitDisk(CountedDisk):
    """Segments on a file system that gives out and takes back units."""

    def write(self, places):
        unit = self.geometry.units.unit_pages
        for raw in places:
            segment, pages, file_pages = pages_of(raw)
            payload = {(segment, page) for page in pages[1:]}
            assert not payload & self.written, "a page was given out twice"
            assert pages[-1] < file_pages, "the file is too short"
            self.written |= payload
            kept = self.segments.setdefault(segment, set())
            kept |= {unit * (page // unit) + at for page in pages for at in range(unit)}

    def release(self, freed):
        unit = self.geometry.units.unit_pages
        for run in freed.runs:
            assert not run.first_page % unit
            assert not run.page_count % unit
        super().release(freed)

    def pages(self):
        return sum(map(len, self.segments.values()))


def test_what_is_evicted_is_told_where_it_gives_nothing_back_yet(tmp_path):
    """Goal: records of a file go in many transactions, and the last of them frees it."""
    harness = Harness(tmp_path, capacity=96 * MIB, chunk=4096, open_system=lambda _: NoHoles())
    harness.disk = UnitDisk(harness.catalog.geometry)
    kept = {}
    for first in range(0, 40_000, 800):
        assert isinstance(harness.store(*range(first, first + 800)), Placed)
        kept.update(dict.fromkeys(harness.keys(*range(first, first + 800))))
    for key in harness.evicted:
        del kept[key]
    assert len(harness.evicted) == harness.catalog.stats().evicted_count > 10_000
    assert None not in harness.catalog.locate(list(kept))
    assert harness.catalog.check() == []
    harness.catalog.close()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", ["ext4-bigalloc", "tmpfs-huge"])
def test_units_add_up_whatever_comes_and_goes(tmp_path, kind, ranks):
    """Goal: no page is given out or freed twice, and no unit goes that holds something."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    with mounted(kind, 512 * MIB, below=tmp_path) as mount:
        harness = Harness(mount / "tier", capacity=64 * MIB, ranks=ranks)
        harness.disk = UnitDisk(harness.catalog.geometry)
        numbers = range(2000)
        placed = 0
        for step in range(400):
            chosen = dice.sample(numbers, dice.randrange(1, 40))
            harness.chunk = dice.choice([4096, 65_536, 200_000, 1 << 20])
            choice = dice.random()
            if choice < 0.7:
                failed = range(len(chosen)) if dice.random() < 0.1 else chosen[:0]
                placed += isinstance(harness.store(*chosen, failed=failed), Placed)
            elif choice < 0.8:
                harness.writer.handle([TouchKeys(tuple(harness.keys(*chosen)))])
            elif choice < 0.9:
                harness.writer.handle([RemoveKeys(tuple(harness.keys(*chosen)))])
            elif choice < 0.95:
                harness.writer.handle([Evict(dice.randrange(1, 2000))])
            else:
                harness.reopen()
            harness.take()
            harness.release()
            if step % 10 == 0:
                assert harness.catalog.check() == []
            harness.check_capacity()
        assert harness.catalog.check() == []
        for raw in filter(None, harness.catalog.locate(harness.keys(*numbers))):
            segment, pages, _ = pages_of(raw)
            assert harness.disk.segments[segment].issuperset(pages), "given back, and recorded"
        assert placed > 100
        harness.catalog.close()


def fill(path):
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(65_536))


def store_all(chunks, store, numbers):
    for first in numbers[::16]:
        chunks.put(store, range(first, first + 16))
        store.flush()


@pytest.mark.parametrize("kind", ["ext4-bigalloc", "ext4-no-extents", "tmpfs-huge"])
def test_a_device_of_large_units_that_was_full_is_used_again(tmp_path, kind):
    chunks = Chunks(65_536)
    with mounted(kind, 96 * MIB, below=tmp_path) as mount:
        path, filler = mount / "tier", mount / "filler"
        path.mkdir()
        with sampled(path) as usage:
            with chunks.open(config_of(path, capacity="40MiB", primary="4MiB")) as store:
                for first in range(0, 160, 16):
                    chunks.put(store, range(first, first + 16))
                store.flush()
                with pytest.raises(OSError, match="space"):
                    fill(filler)
                with pytest.raises(BackendError, match="could not be written"):
                    store_all(chunks, store, range(1000, 1400))
                assert store.check() == []
            with chunks.open(config_of(path, capacity="40MiB", primary="4MiB")) as store:
                assert chunks.found(store, range(160)) == list(range(160))
                filler.unlink()
                for first in range(2000, 2800, 16):
                    chunks.put(store, range(first, first + 16))
                store.flush()
                assert chunks.found(store, range(2784, 2800)) == list(range(2784, 2800))
                assert store.check() == []
        assert usage.bytes_max <= 40 * MIB


@pytest.mark.parametrize("mode", ["direct", "mmap"])
@pytest.mark.parametrize("kind", ["tmpfs", "tmpfs-huge"])
def test_a_late_read_brings_no_blocks_back(tmp_path, kind, mode):
    """Goal: what was given back stays so, though a reader still has the place of what was there."""
    extent = Extent(8, 65_536)
    with mounted(kind, 64 * MIB, below=tmp_path) as mount:
        backend = FileBackend(mount, rank=0, mode=mode)
        backend.open()
        write_extent(backend, extent)
        assert extent.served(backend) == [None] * len(extent)
        assert backend.release([PageRun(segment=0, first_page=0, page_count=512)], []) is None
        before = du(mount)
        assert None not in extent.served(backend)
        assert du(mount) == before
        backend.close()
