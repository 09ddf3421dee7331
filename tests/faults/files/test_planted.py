"""What somebody else put below a tier's path: mended, or refused by name; nothing else is touched.

Black box: stores are opened, used and opened again, with something planted before the first
opening, or between two.
"""

import fcntl
import os
import struct

import pytest
from planted import plant
from small_tier import (
    BACKENDS,
    CAPACITY_BYTES,
    CHUNKS,
    FEW,
    configured,
    fill,
    is_refused,
    store_and_find,
)
from store_kit import du

KINDS = ["link", "dangling link", "hard link", "pipe", "socket", "empty directory", "device"]
NAMES = [
    ".tierstore",
    "catalog/data.mdb",
    "catalog/lock.mdb",
    "catalog/seal.bin",
    "catalog/distrust",
    "catalog/opening.lock",
    "owners/1.lock",
    "owners/2.lock",
    "owners/3.lock",
]
PAYLOAD = [f"rank0/payload/{name}" for name in ("data.mdb", "lock.mdb", "opening.lock", "distrust")]
SEGMENTS = [f"rank0/{number:08x}.seg" for number in (1, 2, 3, 9)]
DIRECTORIES = ["catalog", "owners", "rank0", "rank7"]
PRECIOUS = b"of somebody else" * 10_000


def names_of(backend):
    return NAMES + (PAYLOAD if backend == "lmdb" else SEGMENTS)


def plan():
    for backend in BACKENDS:
        for name in names_of(backend):
            for kind in KINDS:
                yield pytest.param(backend, name, kind, id=f"{backend}-{name}-{kind}")


@pytest.mark.parametrize(("backend", "name", "kind"), list(plan()))
def test_what_takes_the_name_of_a_file_between_two_runs_gives_way(tmp_path, backend, name, kind):
    path, aim = tmp_path / "tier", tmp_path / "precious"
    config = configured(path, backend)
    fill(config)
    aim.write_bytes(PRECIOUS)
    (path / name).unlink(missing_ok=True)
    plant(path / name, kind, aim)
    store_and_find(config, path)
    assert aim.read_bytes() == PRECIOUS
    assert aim.stat().st_nlink == 1 or kind == "hard link"
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [*KINDS, "file"])
@pytest.mark.parametrize("name", DIRECTORIES)
def test_what_takes_the_name_of_a_directory_gives_way(tmp_path, backend, name, kind):
    path, aim = tmp_path / "tier", tmp_path / "precious"
    config = configured(path, backend)
    fill(config)
    aim.mkdir() if kind == "link" else aim.write_bytes(PRECIOUS)
    if (path / name).exists():
        (path / name).rename(tmp_path / "away")
    plant(path / name, kind, aim)
    store_and_find(config, path)
    assert not aim.is_dir() or list(aim.iterdir()) == []
    assert aim.is_dir() or aim.read_bytes() == PRECIOUS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_followed_before_the_first_opening(tmp_path, backend, kind):
    """A marked path, as if the process had been killed behind the first step of its opening."""
    path, aim = tmp_path / "tier", tmp_path / "precious"
    config = configured(path, backend)
    path.mkdir()
    (path / ".tierstore").touch()
    for directory in ("catalog", "owners", "rank0", "rank0/payload"):
        if directory != "rank0/payload" or backend == "lmdb":
            (path / directory).mkdir()
    aim.write_bytes(PRECIOUS)
    for name in names_of(backend)[1:]:
        plant(path / name, kind, aim)
    store_and_find(config, path)
    assert aim.read_bytes() == PRECIOUS


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_directory_with_content_in_the_place_of_a_file_is_refused_by_name(tmp_path, backend):
    path = tmp_path / "tier"
    config = configured(path, backend)
    fill(config)
    for name in names_of(backend):
        theirs, kept = path / name, tmp_path / "kept"
        if theirs.exists():
            theirs.rename(kept)
        theirs.mkdir()
        (theirs / "notes").write_bytes(b"x")
        refused = is_refused(config, theirs.name, "move it away")
        assert (theirs / "notes").read_bytes() == b"x"
        # Those are of no use to anybody: a payload is opened later, and an owner's id is not ours.
        assert refused or "payload" in name or "owners" in name
        (theirs / "notes").unlink()
        theirs.rmdir()
        if kept.exists():
            kept.rename(theirs)
    store_and_find(config, path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_links_that_come_while_a_store_runs_are_not_followed(tmp_path, backend):
    path, aim = tmp_path / "tier", tmp_path / "precious"
    aim.write_bytes(PRECIOUS)
    config = configured(path, backend)
    with CHUNKS.open(config) as store:
        CHUNKS.put(store, FEW)
        store.flush()
        for number in range(1, 64):
            segment = path / "rank0" / f"{number:08x}.seg"
            if backend == "file" and not segment.exists():
                segment.hardlink_to(aim) if number == 20 else segment.symlink_to(aim)
        for name in ("seal.bin", "distrust"):
            (path / "catalog" / name).unlink(missing_ok=True)
            (path / "catalog" / name).symlink_to(aim)
        for start in range(0, 400, 20):
            CHUNKS.put(store, range(start, start + 20))
            store.flush()
            assert du(path) <= CAPACITY_BYTES + len(PRECIOUS)
        store.reset()
        assert store.check() == []
    store_and_find(config, path)
    assert aim.read_bytes() == PRECIOUS


def test_a_read_lock_of_somebody_else_does_not_keep_a_damaged_catalog_alive(tmp_path):
    path = tmp_path / "tier"
    config = configured(path, "file")
    fill(config)
    data = path / "catalog" / "data.mdb"
    content = data.read_bytes()
    data.write_bytes(content[:8192] + b"\xff" * (len(content) - 8192))
    with (path / "catalog" / "lock.mdb").open("rb") as reader:
        wanted = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(reader, fcntl.F_OFD_SETLK, wanted)
        store_and_find(config, path)
