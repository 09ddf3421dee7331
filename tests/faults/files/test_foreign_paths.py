"""Whose a path is: what is not the tier's is refused by name, and a marker says what is.

Black box: stores are opened on paths that hold something else, or lack the marker.
"""

import stat

import pytest
from small_tier import BACKENDS, CHUNKS, FEW, configured, fill, is_refused, store_and_find
from store_kit import MIB
from xxhash import xxh3_64_intdigest

from tierstore.errors import ConfigError

PRECIOUS = b"of somebody else" * 10_000
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
