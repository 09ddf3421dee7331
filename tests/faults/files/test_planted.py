"""What somebody else put below a tier's path: mended, or refused by name; nothing else is touched.

Black box: stores are opened, used and opened again, with something planted before the first
opening, or between two.
"""

import fcntl
import os
import stat
import struct

import pytest
from planted import plant
from store_kit import MIB, Chunks, config_of, du
from xxhash import xxh3_64_intdigest

from tierstore import TierStoreError
from tierstore.errors import ConfigError

BACKENDS = ["file", "lmdb"]
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
CAPACITY = 16 * MIB
PRECIOUS = b"of somebody else" * 10_000

CHUNKS = Chunks(65_536)
FEW, NEW = range(40), range(100, 180)


def names_of(backend):
    return NAMES + (PAYLOAD if backend == "lmdb" else SEGMENTS)


def configured(path, backend):
    return config_of(path, backend=backend, primary="2MiB", capacity="16MiB")


def store_and_find(config, path):
    """Store, within the capacity, and find some of it again, also after a restart."""
    with CHUNKS.open(config) as store:
        for start in range(NEW.start, NEW.stop, 20):
            CHUNKS.put(store, range(start, start + 20))
            store.flush()
            assert du(path) <= CAPACITY
        assert store.check() == []
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, NEW)
        assert store.check() == []
        assert du(path) <= CAPACITY


def fill(config):
    with CHUNKS.open(config) as store:
        assert CHUNKS.put(store, FEW) == len(FEW)


def is_refused(config, *words):
    """Open; return whether it was refused by the right words."""
    try:
        CHUNKS.open(config).close()
    except TierStoreError as error:
        message = str(error)
    else:
        return False
    assert all(word in message for word in words), message
    return True


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


FOREIGN = [
    "notes.txt",
    "rank4000000000/00000001.seg",
    "rank٣/00000001.seg",
    "rank0/-1.seg",
    "rank0/1.seg",
    "rank0/00000000.seg.bak",
    "rank0/00000000.seg",
    "rank0/ffffffff.seg",
    "owners/77.lock/file",
    "rank4/payload/file",
    "rank0/sub/deep/file",
    "catalog/core",
    "owners/new\nline",
    "backup/" + "x" * 255,
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FOREIGN)
def test_much_that_is_not_the_tiers_is_refused_by_name_and_little_is_left_alone(
    tmp_path, backend, name
):
    path = tmp_path / "tier"
    config = configured(path, backend)
    fill(config)
    theirs = path / name
    theirs.parent.mkdir(parents=True, exist_ok=True)
    theirs.write_bytes(bytes(8 * MIB))
    assert is_refused(config, "move it away", str(path), ascii(theirs.parent.name)[1:-1])
    assert theirs.stat().st_size == 8 * MIB
    theirs.write_bytes(b"a note")
    store_and_find(config, path)
    assert theirs.read_bytes() == b"a note"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("directory", ["", "rank0", "owners", "catalog"])
def test_very_many_names_are_refused_by_name(tmp_path, backend, directory):
    path = tmp_path / "tier"
    config = configured(path, backend)
    fill(config)
    for number in range(10_001):
        (path / directory / f"{number:x}").touch()
    assert is_refused(config, str(path / directory), "move it away")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_directory_of_somebody_else_is_refused_and_untouched(tmp_path, backend):
    path = tmp_path / "theirs"
    (path / "rank0").mkdir(parents=True)
    (path / "rank0" / "00000001.seg").write_bytes(PRECIOUS)
    (path / "catalog").mkdir()
    (path / "catalog" / "index.html").write_bytes(b"theirs")
    path.chmod(0o755)
    before = sorted((file, file.lstat().st_mode, file.lstat().st_mtime) for file in path.rglob("*"))
    with pytest.raises(ConfigError, match=r"not empty and not a tier's directory, .*rank0"):
        CHUNKS.open(configured(path, backend))
    assert before == sorted(
        (file, file.lstat().st_mode, file.lstat().st_mtime) for file in path.rglob("*")
    )
    assert stat.S_IMODE(path.stat().st_mode) == 0o755


@pytest.mark.parametrize("spelling", ["/", "/.", "/..", "/tmp/..", "/tmp", "~", "link"])
def test_directories_of_everybody_are_refused(tmp_path, monkeypatch, spelling):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    if spelling == "link":
        spelling = tmp_path / "link"
        spelling.symlink_to("/")
    with pytest.raises(ConfigError, match="a directory of the tier's own"):
        CHUNKS.open(configured(spelling, "file"))
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_path_that_is_a_link_is_the_choice_of_its_user(tmp_path, backend):
    (tmp_path / "device").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "device")
    store_and_find(configured(tmp_path / "link", backend), tmp_path / "device")


def marker_of(version):
    line = b"tierstore directory, version %d\n" % version
    return line + b"%016x\n" % xxh3_64_intdigest(line)


def test_an_empty_file_system_is_used_and_a_store_without_a_marker_is_known(tmp_path):
    path = tmp_path / "tier"
    (path / "lost+found").mkdir(parents=True)
    config = configured(path, "file")
    fill(config)
    (path / ".tierstore").unlink()
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, FEW) == list(FEW)
    assert (path / ".tierstore").read_bytes() == marker_of(1)


@pytest.mark.parametrize("content", [b"", b"tierst", bytes(31), b"\xff" * MIB])
def test_a_marker_that_was_not_finished_or_is_damaged_is_written_anew(tmp_path, content):
    path = tmp_path / "tier"
    path.mkdir()
    (path / ".tierstore").write_bytes(content)
    (path / "owners").mkdir()
    store_and_find(configured(path, "file"), path)
    assert (path / ".tierstore").read_bytes() == marker_of(1)


def test_a_directory_of_another_release_is_refused(tmp_path):
    (tmp_path / ".tierstore").write_bytes(marker_of(2))
    with pytest.raises(ConfigError, match="version 2"):
        CHUNKS.open(configured(tmp_path, "file"))


@pytest.mark.parametrize("content", [b"tierstore directory, version 2\n", None])
def test_a_marker_of_which_a_bit_is_wrong_is_not_of_another_release(tmp_path, content):
    path = tmp_path / "tier"
    config = configured(path, "file")
    fill(config)
    (path / ".tierstore").write_bytes(content or marker_of(1).replace(b"version 1", b"version 3"))
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, FEW) == list(FEW)
    assert (path / ".tierstore").read_bytes() == marker_of(1)


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
            assert du(path) <= CAPACITY + len(PRECIOUS)
        store.reset()
        assert store.check() == []
    store_and_find(config, path)
    assert aim.read_bytes() == PRECIOUS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", [0o000, 0o777, 0o022])
def test_modes_keep_others_out_whatever_the_mask(tmp_path, backend, mask):
    path = tmp_path / "deep" / "tier"
    before = os.umask(mask)
    try:
        config = configured(path, backend)
        fill(config)
    finally:
        os.umask(before)
    assert_closed_to_others(tmp_path / "deep")
    store_and_find(config, path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_modes_that_an_earlier_release_left_are_tightened(tmp_path, backend):
    path = tmp_path / "tier"
    config = configured(path, backend)
    fill(config)
    for file in [path, *path.rglob("*")]:
        file.chmod(0o755 if file.is_dir() else 0o644)
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, FEW) == list(FEW)
        assert_closed_to_others(path)
    assert_closed_to_others(path)


def assert_closed_to_others(path):
    for file in [path, *path.rglob("*")]:
        mode = 0o700 if file.is_dir() else 0o600
        assert stat.S_IMODE(file.lstat().st_mode) == mode, file


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_belongs_to_another_user_is_refused_by_name(tmp_path, backend):
    path = tmp_path / "tier"
    config = configured(path, backend)
    fill(config)
    names = ["", "catalog", "owners", "rank0", "catalog/data.mdb", ".tierstore"]
    names.append("rank0/payload" if backend == "lmdb" else next(path.glob("rank0/*.seg")).name)
    for name in names:
        theirs = path / ("rank0" if name.endswith(".seg") else "") / name
        os.chown(theirs, 12345, -1)
        assert is_refused(config, str(theirs), "12345", "chown"), name
        assert theirs.stat().st_uid == 12345
        os.chown(theirs, os.geteuid(), -1)
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, FEW) == list(FEW)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_user_without_privileges_works_under_any_mask(tmp_path, backend):
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == 0 and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgid(54321)
            os.setuid(54321)
            os.umask(0o777)
            path = tmp_path / "a" / "tier"
            store_and_find(configured(path, backend), path)
            assert_closed_to_others(tmp_path / "a")
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, "the child failed, see its output"


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
