"""A call that moves bytes looks itself whether paths still lead to the files that it knows.

What it finds is compared with what the interpreted looks find, which tell why.
"""

import os

import pytest
from native_library import ScriptedKernel, native
from opened_backend import opened

from tierstore.native.known_file import KnownFile
from tierstore.testing.extents import SEGMENT_BYTES, Extent, write_extent
from tierstore.transfer import FailureReason


def known(path):
    status = path.stat()
    return KnownFile.of(path, status.st_dev, status.st_ino)


def replace(path):
    """Put another file of this length in the place of one."""
    content = path.read_bytes()
    path.rename(path.with_name("before"))
    path.write_bytes(content)


def unlink(path):
    path.rename(path.with_name("before"))


def name_twice(path):
    os.link(path, path.with_name("second"))


def cut_off(path):
    os.truncate(path, SEGMENT_BYTES // 2)


def put_behind_a_link(path):
    path.rename(path.with_name("before"))
    path.symlink_to("before")


def leave_alone(path):
    pass


@pytest.fixture
def stage(tmp_path):
    """A backend with one extent on disk, and a file that is somebody else's."""
    (tmp_path / "rank").mkdir()
    (tmp_path / "owner").write_bytes(b"")
    backend = opened(tmp_path / "rank", library=native)
    extent = Extent(2, 9000)
    write_extent(backend, extent)
    yield backend, extent, tmp_path
    backend.close()


SECOND = {"segment": 0, "page": 10}


@pytest.mark.parametrize("change", [replace, unlink, name_twice, cut_off, put_behind_a_link])
def test_a_segment_that_is_not_in_its_place_is_not_written_by_one_call(stage, change):
    backend, _, folder = stage
    (path,) = (folder / "rank").glob("*.seg")
    change(path)
    files = {p.name: p.read_bytes() for p in (folder / "rank").iterdir()}
    second = Extent(2, 9000, **SECOND)
    assert backend.write_while(second.to_write(), (), kept_count=0) is None
    assert {p.name: p.read_bytes() for p in (folder / "rank").iterdir()} == files


@pytest.mark.parametrize("change", [replace, unlink])
@pytest.mark.parametrize("position", [0, 1])
def test_without_a_known_file_nothing_is_moved(stage, change, position):
    backend, extent, folder = stage
    files = [known(folder / "owner"), known(folder / "rank")]
    change(folder / "owner") if position == 0 else (folder / "rank").rename(folder / "away")
    second = Extent(2, 9000, **SECOND)
    assert backend.write_while(second.to_write(), files, kept_count=1) is None
    records = extent.to_read()
    assert backend.read_while(records, files) is None
    assert {bytes(record.slot) for record in records} == {bytes([0xEE]) * len(records[0].slot)}


@pytest.mark.parametrize("change", [leave_alone, put_behind_a_link])
def test_with_all_known_files_in_their_places_one_call_does_as_the_others_do(stage, change):
    """What leads to a known file may be a link, as the path of a tier may."""
    backend, extent, folder = stage
    files = [known(folder / "owner"), known(folder / "rank")]
    change(folder / "owner")
    second = Extent(2, 9000, **SECOND)
    written = backend.write_while(second.to_write(), files, kept_count=1)
    assert (written.failed, written.is_kept) == ({}, True)
    assert second.served(backend) == [None, None]
    records = [*second.to_read(), *extent.to_read(), *Extent(1, 9000, page=20).to_read()]
    assert backend.read_while(records, files) == {4: FailureReason.ABSENT}
    payloads = [*second.payloads, *extent.payloads]
    assert [bytes(r.slot[:9000]) for r in records[:4]] == payloads


def test_a_file_that_leaves_its_place_during_a_write_is_noticed(tmp_path):
    kernel = ScriptedKernel()
    for name in ("owner", "other", "rank"):
        (tmp_path / name).mkdir()
    backend = opened(tmp_path / "rank", library=kernel.native)
    write_extent(backend, Extent(2, 9000))
    files = [known(tmp_path / "owner"), known(tmp_path / "other")]
    kernel.rename(tmp_path / "other", tmp_path / "gone")
    written = backend.write_while(Extent(2, 9000, **SECOND).to_write(), files, kept_count=1)
    assert (written.failed, written.is_kept) == ({}, True), "only the first one has to stay"
    files.pop()
    kernel.rename(tmp_path / "owner", tmp_path / "gone")
    written = backend.write_while(Extent(2, 9000, **SECOND).to_write(), files, kept_count=1)
    assert (written.failed, written.is_kept) == ({}, False)
    backend.close()


def test_a_segment_that_is_not_open_or_must_be_flushed_is_left_to_the_other_calls(tmp_path):
    first = Extent(2, 9000)
    backend = opened(tmp_path, library=native)
    assert backend.write_while(first.to_write(), (), kept_count=0) is None
    write_extent(backend, first)
    backend.close()
    assert backend.write_while(first.to_write(), (), kept_count=0) is None
    assert backend.read_while(first.to_read(), [known(tmp_path)]) is None
    backend = opened(tmp_path, library=native, durable=True)
    assert backend.read_while(first.to_read(), [known(tmp_path)]) is None
    assert first.served(backend) == [None, None]
    assert backend.write_while(first.to_write(), (), kept_count=0) is None
    assert backend.read_while(first.to_read(), [known(tmp_path)]) == {}
    backend.close()
