"""The rules of segment files: who makes one, what a hole gives back, when a descriptor closes."""

import errno
import mmap
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from tierstore.backend.names import segment_name
from tierstore.backend.segments.files import SegmentFiles
from tierstore.device.system import SystemCalls
from tierstore.layout import PAGE_BYTES
from tierstore.testing.extents import descriptor_count

SEGMENT = 5
PAGES = 16
SEGMENT_BYTES = PAGES * PAGE_BYTES


class CountingSystem(SystemCalls):
    """Notes what is allocated and punched; refuses what a test names."""

    def __init__(self):
        self.allocated: list[tuple[int, int]] = []
        self.punched: list[tuple[int, int]] = []
        self.refusals: dict[str, int] = {}

    def allocate(self, fd, offset, size_bytes):
        self._refuse("allocate")
        self.allocated.append((offset, size_bytes))
        super().allocate(fd, offset, size_bytes)

    def punch_hole(self, fd, offset, size_bytes):
        self._refuse("punch_hole")
        self.punched.append((offset, size_bytes))
        super().punch_hole(fd, offset, size_bytes)

    def flush(self, fd):
        self._refuse("flush")
        super().flush(fd)

    def open(self, path, flags, directory=None):
        if str(path).endswith(".seg"):
            self._refuse("open")
        return super().open(path, flags, directory)

    def _refuse(self, name):
        code = self.refusals.get(name)
        if code is not None:
            raise OSError(code, os.strerror(code))


class Rank:
    """The segment files of one rank, and what lies in its directory."""

    def __init__(self, path: Path):
        path.mkdir()
        self.path = path
        self.system = CountingSystem()
        self.files = SegmentFiles(path, system=self.system)
        self.files.open(direct=False, mapped=False)

    def path_of(self, segment: int = SEGMENT) -> Path:
        return self.path / segment_name(segment)

    def write(self, page: int = 0, byte: int = 7, *, segment: int = SEGMENT) -> None:
        offset = page * PAGE_BYTES
        held = self.files.acquire_for_write(segment, SEGMENT_BYTES, offset=offset)
        assert self.files.write(held, [page_of(byte)], offset) == PAGE_BYTES
        self.files.release(held)

    def read(self, page: int = 0, *, segment: int = SEGMENT) -> bytes:
        held = self.files.acquire(segment)
        try:
            buffer = page_of(0xEE)
            done = self.files.read(held, [buffer], page * PAGE_BYTES)
            return bytes(buffer[:done])
        finally:
            self.files.release(held)


@pytest.fixture
def rank(tmp_path):
    rank = Rank(tmp_path / "rank0")
    yield rank
    rank.files.close()


def page_of(byte: int) -> memoryview:
    page = memoryview(mmap.mmap(-1, PAGE_BYTES))
    page[:] = bytes([byte]) * PAGE_BYTES
    return page


def test_a_read_makes_no_segment(rank) -> None:
    with pytest.raises(FileNotFoundError):
        rank.files.acquire(SEGMENT)
    assert list(rank.path.iterdir()) == []


def test_a_segment_is_made_whole_with_the_blocks_behind_its_first_write(rank) -> None:
    rank.write(page=3)
    assert rank.path_of().stat().st_size == SEGMENT_BYTES
    assert rank.system.allocated == [(3 * PAGE_BYTES, SEGMENT_BYTES - 3 * PAGE_BYTES)]
    rank.write(page=9)
    assert len(rank.system.allocated) == 1, "its blocks were given to it before"


def test_a_segment_of_an_earlier_run_that_is_shorter_grows(rank) -> None:
    rank.path_of().write_bytes(b"\3" * PAGE_BYTES)
    rank.path_of().chmod(0o600)
    rank.write(page=2)
    assert rank.path_of().stat().st_size == SEGMENT_BYTES
    assert rank.system.allocated == [(2 * PAGE_BYTES, SEGMENT_BYTES - 2 * PAGE_BYTES)]
    assert rank.read(0) == b"\3" * PAGE_BYTES


def test_a_device_without_room_keeps_nothing_of_a_new_segment(rank) -> None:
    rank.system.refusals["allocate"] = errno.ENOSPC
    before = descriptor_count()
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        rank.files.acquire_for_write(SEGMENT, SEGMENT_BYTES, offset=0)
    assert not rank.path_of().exists()
    assert descriptor_count() == before
    assert rank.files.take_lost() == set(), "what was never made is not lost"


def test_a_file_system_that_gives_no_blocks_ahead_gets_the_size_only(rank) -> None:
    rank.system.refusals["allocate"] = errno.EOPNOTSUPP
    rank.write()
    assert rank.path_of().stat().st_size == SEGMENT_BYTES


def test_a_read_behind_the_end_is_short_and_one_in_a_hole_is_zeros(rank) -> None:
    rank.write()
    assert rank.read(1) == bytes(PAGE_BYTES)
    assert rank.read(PAGES) == b""
    held = rank.files.acquire(SEGMENT)
    assert rank.files.reaches(held, SEGMENT_BYTES)
    assert not rank.files.reaches(held, SEGMENT_BYTES + 1)
    rank.files.release(held)


def test_a_hole_gives_back_what_lies_within_the_file(rank) -> None:
    rank.write(page=PAGES - 1)
    rank.files.punch(SEGMENT, (PAGES - 1) * PAGE_BYTES, 5 * PAGE_BYTES)
    assert rank.system.punched == [((PAGES - 1) * PAGE_BYTES, PAGE_BYTES)]
    assert rank.path_of().stat().st_size == SEGMENT_BYTES
    rank.files.punch(SEGMENT, PAGES * PAGE_BYTES, PAGE_BYTES)
    assert len(rank.system.punched) == 1, "there is nothing behind the end"


def test_what_is_given_back_of_an_absent_segment_stays_a_hole_when_it_is_made(rank) -> None:
    rank.files.punch(SEGMENT, 2 * PAGE_BYTES, PAGE_BYTES)
    assert not rank.path_of().exists()
    rank.write(page=0)
    assert rank.system.punched == [(2 * PAGE_BYTES, PAGE_BYTES)]


def test_a_removed_segment_forgets_what_was_given_back_of_it(rank) -> None:
    rank.files.punch(SEGMENT, 2 * PAGE_BYTES, PAGE_BYTES)
    rank.files.remove(SEGMENT)
    rank.write(page=0)
    assert rank.system.punched == []


def test_a_removal_is_idempotent_and_is_no_loss(rank) -> None:
    rank.write()
    for _ in range(2):
        rank.files.remove(SEGMENT)
    assert not rank.path_of().exists()
    assert rank.files.take_lost({SEGMENT + 1}) == {SEGMENT + 1}
    assert rank.files.unflushed == []


def test_a_removal_empties_the_file_first_for_those_who_have_it_open(rank) -> None:
    rank.write()
    with rank.path_of().open("rb") as other:
        rank.files.remove(SEGMENT)
        assert os.fstat(other.fileno()).st_blocks == 0


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EIO])
def test_without_holes_a_removal_still_removes_and_a_failing_device_is_told(rank, code) -> None:
    rank.write()
    rank.system.refusals["punch_hole"] = code
    if code == errno.EIO:
        with pytest.raises(OSError, match=os.strerror(code)):
            rank.files.remove(SEGMENT)
    else:
        rank.files.remove(SEGMENT)
    assert rank.path_of().exists() == (code == errno.EIO)


def test_a_segment_in_use_can_be_read_after_its_removal(rank) -> None:
    before = descriptor_count()
    rank.write(byte=9)
    held = rank.files.acquire(SEGMENT)
    rank.path_of().unlink()
    rank.files.forget_unlinked()
    buffer = page_of(0)
    assert rank.files.read(held, [buffer], 0) == PAGE_BYTES
    assert set(buffer) == {9}
    rank.files.release(held)
    assert descriptor_count() == before


def test_a_segment_in_use_can_be_read_after_close(rank) -> None:
    before = descriptor_count()
    rank.write(byte=9)
    held = rank.files.acquire(SEGMENT)
    rank.files.close()
    assert rank.files.read(held, [page_of(0)], 0) == PAGE_BYTES
    rank.files.release(held)
    assert descriptor_count() == before


@pytest.mark.parametrize("change", ["removed", "replaced", "moved", "cut"])
def test_what_is_written_goes_to_the_file_that_has_the_name(rank, change) -> None:
    rank.write(page=1)
    path = rank.path_of()
    if change == "cut":
        os.truncate(path, PAGE_BYTES)
    elif change == "moved":
        path.rename(rank.path / "aside")
    else:
        path.unlink()
        if change == "replaced":
            path.touch(mode=0o600)
    rank.write(page=4, byte=6)
    assert path.stat().st_size == SEGMENT_BYTES
    assert path.read_bytes()[4 * PAGE_BYTES :][:PAGE_BYTES] == b"\6" * PAGE_BYTES
    assert rank.files.take_lost() == {SEGMENT}
    assert rank.files.take_lost() == set()


@pytest.mark.parametrize("kind", ["symbolic", "hard"])
def test_a_link_with_the_name_of_a_segment_gives_way(rank, tmp_path, kind) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"precious")
    target.chmod(0o600)
    if kind == "symbolic":
        rank.path_of().symlink_to(target)
    else:
        rank.path_of().hardlink_to(target)
    rank.write()
    assert target.read_bytes() == b"precious"
    assert rank.path_of().stat().st_nlink == 1
    assert rank.read() == b"\7" * PAGE_BYTES


def test_a_directory_with_the_name_of_a_segment_is_refused_and_not_touched(rank) -> None:
    rank.path_of().mkdir()
    (rank.path_of() / "precious").touch()
    with pytest.raises(IsADirectoryError):
        rank.files.acquire_for_write(SEGMENT, SEGMENT_BYTES, offset=0)
    rank.files.punch(SEGMENT, 0, PAGE_BYTES)
    rank.files.remove(SEGMENT)
    assert (rank.path_of() / "precious").exists()


def test_segments_stay_open_up_to_a_share_of_the_process_limit(rank) -> None:
    before = descriptor_count()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (320, limits[1]))
    try:
        rank.files.open(direct=False, mapped=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for segment in range(1, 101):
        rank.write(segment=segment)
    assert descriptor_count() - before == 320 // 8
    assert all(rank.read(segment=segment) for segment in range(1, 101))
    rank.files.close()
    assert descriptor_count() == before


def test_hundreds_of_segments_stay_open_where_the_limit_allows_it(rank) -> None:
    before = descriptor_count()
    for segment in range(1, 301):
        rank.write(segment=segment)
    assert descriptor_count() - before == 300
    rank.files.close()
    assert descriptor_count() == before


def test_an_opening_looks_at_a_few_other_files_however_many_are_open(rank, monkeypatch) -> None:
    """By counting: a first look at any file of a large tier costs the same."""
    looks = []
    fstat = os.fstat

    def counted(fd):
        looks.append(fd)
        return fstat(fd)

    monkeypatch.setattr(os, "fstat", counted)
    counts = []
    for segment in range(1, 101):
        looks.clear()
        rank.write(segment=segment)
        counts.append(len(looks))
    assert max(counts[50:]) == max(counts[20:50]) < 30


def test_files_that_others_removed_are_closed_in_the_course_of_later_openings(rank) -> None:
    before = descriptor_count()
    for segment in range(1, 41):
        rank.write(segment=segment)
    for segment in range(1, 41):
        rank.path_of(segment).unlink()
    for segment in range(41, 61):
        rank.write(segment=segment)
    assert descriptor_count() - before == 20


def test_files_that_others_removed_are_closed_in_the_course_of_evictions(rank) -> None:
    before = descriptor_count()
    for segment in range(1, 41):
        rank.write(segment=segment)
    for segment in range(2, 41):
        rank.path_of(segment).unlink()
    for _ in range(10):
        rank.files.forget_unlinked()
    assert descriptor_count() - before == 1


def test_a_process_without_descriptors_closes_what_it_can_open_again(rank) -> None:
    for segment in range(1, 31):
        rank.write(segment=segment)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 3, limits[1]))
    try:
        while True:  # all but one: a directory is opened first, then the file in it
            try:
                taken.append(os.open("/", os.O_RDONLY))
            except OSError:
                break
        os.close(taken.pop())
        rank.write(segment=99)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in taken:
            os.close(fd)
    assert rank.read(segment=99) == b"\7" * PAGE_BYTES


def test_what_was_written_is_unflushed_until_the_device_has_flushed_it(rank) -> None:
    rank.write()
    rank.write(segment=SEGMENT + 1)
    rank.system.refusals["flush"] = errno.EIO
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        rank.files.flush(SEGMENT)
    assert rank.files.unflushed == [SEGMENT, SEGMENT + 1]
    rank.system.refusals.clear()
    rank.files.flush(SEGMENT)
    rank.path_of(SEGMENT + 1).unlink()
    rank.files.forget_unlinked()
    rank.files.flush(SEGMENT + 1)
    assert rank.files.unflushed == []


def test_segments_whose_files_were_removed_or_cut_by_others_are_lost_once(rank) -> None:
    for segment in (1, 2, 3):
        rank.write(segment=segment)
    rank.path_of(1).unlink()
    os.truncate(rank.path_of(2), PAGE_BYTES)
    assert rank.files.take_lost({3, 8}) == {1, 2, 8}
    assert rank.files.take_lost() == set()


def test_a_mapped_segment_is_read_where_it_is_mapped_and_by_file_behind_that(tmp_path) -> None:
    rank = Rank(tmp_path / "rank0")
    rank.files.open(direct=False, mapped=True)
    rank.write(byte=4)
    assert rank.read() == b"\4" * PAGE_BYTES
    with rank.path_of().open("r+b") as file:
        file.seek(SEGMENT_BYTES)
        file.write(b"\5" * PAGE_BYTES)
    assert rank.read(PAGES) == b"\5" * PAGE_BYTES
    rank.files.close()


def test_many_buffers_are_moved_by_calls_of_bounded_length(rank) -> None:
    count = os.sysconf("SC_IOV_MAX") + 10
    held = rank.files.acquire_for_write(SEGMENT, count * PAGE_BYTES, offset=0)
    pool = memoryview(mmap.mmap(-1, count * PAGE_BYTES))
    np.frombuffer(pool, np.uint32)[:: PAGE_BYTES // 4] = range(count)
    pages = [pool[i * PAGE_BYTES : (i + 1) * PAGE_BYTES] for i in range(count)]
    assert rank.files.write(held, pages, 0) == len(pool)
    arrived = memoryview(mmap.mmap(-1, len(pool)))
    pages = [arrived[i * PAGE_BYTES : (i + 1) * PAGE_BYTES] for i in range(count)]
    assert rank.files.read(held, pages, 0) == len(pool)
    rank.files.release(held)
    assert arrived == pool
