"""The images of a crash recorder are those that a crash can leave."""

import os
import random

import pytest
from store_kit import Chunks, config_of, du

from tierstore import TierStore, load_config
from tierstore.testing.crash import CrashRecorder

CHUNKS = Chunks(65_536)
PAGE = 4096


@pytest.fixture
def recorded(tmp_path):
    """A recorder, its system calls, and an open file of two pages that was flushed."""
    recorder = CrashRecorder()
    system = recorder.open_system(load_config(config_of(tmp_path / "tier")).secondary[0])
    (tmp_path / "tier").mkdir()
    fd = system.open(tmp_path / "tier" / "1.seg", os.O_RDWR | os.O_CREAT)
    system.allocate(fd, 0, 2 * PAGE)
    system.pwritev(fd, [memoryview(b"a" * 2 * PAGE)], 0)
    system.flush(fd)
    yield recorder, system, fd
    os.close(fd)


def images(recorder, folder, count, length=None):
    """Return the contents of the file after power cuts; None: there is none."""
    found = []
    for seed in range(count):
        recorder.build(
            folder / str(seed), length or recorder.length, dice=random.Random(f"{folder}{seed}")
        )
        path = folder / str(seed) / "1.seg"
        found.append(path.read_bytes() if path.exists() else None)
    return found


def test_what_was_flushed_is_in_every_image(tmp_path, recorded):
    recorder, _, _ = recorded
    assert set(images(recorder, tmp_path / "cut", 20)) == {b"a" * 2 * PAGE}


def test_pages_that_were_not_flushed_come_in_any_mix(tmp_path, recorded):
    recorder, system, fd = recorded
    system.pwritev(fd, [memoryview(b"b" * PAGE), memoryview(b"c" * PAGE)], 0)
    mixes = {(one[:1], one[PAGE : PAGE + 1]) for one in images(recorder, tmp_path / "cut", 60)}
    assert mixes == {(a, c) for a in (b"a", b"b") for c in (b"a", b"c")}


def test_a_kill_leaves_all_that_was_written(tmp_path, recorded):
    recorder, system, fd = recorded
    before = recorder.length
    system.pwritev(fd, [memoryview(b"b" * PAGE)], PAGE)
    recorder.build(tmp_path / "before", before)
    recorder.build(tmp_path / "after", recorder.length)
    assert (tmp_path / "before" / "1.seg").read_bytes() == b"a" * 2 * PAGE
    assert (tmp_path / "after" / "1.seg").read_bytes() == b"a" * PAGE + b"b" * PAGE


def test_a_removal_or_a_hole_may_be_lost(tmp_path, recorded):
    recorder, system, fd = recorded
    system.punch_hole(fd, 0, PAGE)
    assert {one[:1] for one in images(recorder, tmp_path / "hole", 30)} == {b"a", b"\0"}
    system.unlink(tmp_path / "tier" / "1.seg")
    assert None in images(recorder, tmp_path / "gone", 30)
    assert any(images(recorder, tmp_path / "kept", 30))


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_the_last_image_is_the_directory_itself(tmp_path, backend):
    recorder = CrashRecorder()
    config = config_of(tmp_path / "tier", backend=backend, primary="2MiB", capacity="8MiB")
    with TierStore.open(config, CHUNKS.manifest, open_system=recorder.open_system) as store:
        for first in range(0, 160, 8):
            CHUNKS.put(store, range(first, first + 8))
        store.flush()
        recorder.mark("flushed")
    recorder.look(tmp_path / "tier")
    assert recorder.marks(recorder.length) == ["flushed"]
    recorder.build(tmp_path / "image", recorder.length)

    def content(root):
        return {
            path.relative_to(root): path.read_bytes()
            for path in root.rglob("*")
            if path.is_file() and path.name not in {"lock.mdb", "opening.lock"}
        }

    assert content(tmp_path / "image") == content(tmp_path / "tier")
    assert du(tmp_path / "image") <= du(tmp_path / "tier")
    with CHUNKS.open(config | {"secondary": [{**config["secondary"][0]}]}) as store:
        expected = CHUNKS.found(store, range(160))
    config["secondary"][0]["path"] = str(tmp_path / "image")
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, range(160)) == expected
        assert store.check() == []
