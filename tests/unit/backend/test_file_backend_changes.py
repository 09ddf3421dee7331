"""The file backend while others change, move or remove its segments."""

import errno
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from opened_backend import MODES, opened

from tierstore.backend.opening import leftover_directories
from tierstore.backend.segments.backend import FileBackend
from tierstore.device.marker import claim
from tierstore.device.system import SystemCalls
from tierstore.layout import PAGE_BYTES
from tierstore.testing.extents import (
    SEGMENT_BYTES,
    SEGMENT_PAGES,
    Extent,
    descriptor_count,
    disk_bytes,
    write_extent,
)
from tierstore.transfer import FailureReason, PageRun


def test_a_segment_that_somebody_cut_off_is_whole_again_before_it_is_written(tmp_path):
    backend = opened(tmp_path)
    first = Extent(2, 100)
    write_extent(backend, first)
    os.truncate(tmp_path / "00000000.seg", PAGE_BYTES)
    write_extent(backend, Extent(2, 100, page=first.run.page_count))
    assert (tmp_path / "00000000.seg").stat().st_size == SEGMENT_BYTES
    backend.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_segment_truncated_under_the_reader_is_absent(tmp_path, mode):
    """In mmap mode the process must survive, which a plain access to the mapping would not."""
    extent = Extent(8, 9000)
    backend = opened(tmp_path, mode=mode)
    write_extent(backend, extent)
    assert extent.served(backend) == [None] * 8
    os.truncate(tmp_path / "00000000.seg", (1 + 3 * extent.stride_pages) * PAGE_BYTES)
    assert extent.served(backend) == [None] * 3 + [FailureReason.ABSENT] * 5
    os.truncate(tmp_path / "00000000.seg", 0)
    assert extent.served(backend) == [FailureReason.ABSENT] * 8
    backend.close()


@pytest.mark.parametrize("mode", MODES)
def test_segments_that_were_swapped_are_refused(tmp_path, mode):
    extents = Extent(4, 9000), Extent(4, 9000, segment=1)
    backend = opened(tmp_path, mode=mode)
    write_extent(backend, *extents)
    backend.close()
    (tmp_path / "00000000.seg").rename(tmp_path / "spare")
    (tmp_path / "00000001.seg").rename(tmp_path / "00000000.seg")
    (tmp_path / "spare").rename(tmp_path / "00000001.seg")
    backend = opened(tmp_path, mode=mode)
    for extent in extents:
        assert extent.served(backend) == [FailureReason.CORRUPT] * 4
    backend.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_segment_unlinked_by_another_process_is_absent_and_its_descriptor_goes(tmp_path, mode):
    extent, other = Extent(4, 9000), Extent(4, 9000, segment=1)
    backend, remover = opened(tmp_path, mode=mode), opened(tmp_path)
    write_extent(backend, extent)
    count = descriptor_count()
    assert remover.release([], [0]) is None
    assert extent.served(backend) == [FailureReason.ABSENT] * 4
    assert descriptor_count() < count
    write_extent(backend, other)
    assert extent.served(backend) == [FailureReason.ABSENT] * 4
    assert other.served(backend) == [None] * 4
    backend.close()
    remover.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_vanished_directory_is_absent_and_in_use_again_when_it_is_back(tmp_path, mode):
    path = tmp_path / "tier" / "rank0"
    extent, later = Extent(4, 9000), Extent(4, 9000, page=64)
    backend = opened(path, mode=mode)
    write_extent(backend, extent)
    shutil.rmtree(path.parent)
    assert set(extent.served(backend)) <= {None, FailureReason.ABSENT}  # right bytes, or none
    assert len(backend.write(later.to_write())) == 4
    assert backend.release([extent.run], [0]) is None
    path.parent.mkdir()
    write_extent(backend, later)
    assert later.served(backend) == [None] * 4
    backend.close()


def test_leftovers_of_a_wider_run_are_released(tmp_path):
    """Four ranks before, two now: rank 0 also releases what rank 2 left, rank 1 what rank 3 left.
    Their segments were smaller or larger than ours."""
    extent = Extent(4, 9000, segment_pages=2 * SEGMENT_PAGES)
    for rank in range(4):
        backend = FileBackend(tmp_path / f"rank{rank}", rank=rank)
        backend.open()
        other = Extent(4, 9000, segment=1, segment_pages=2 * SEGMENT_PAGES)
        write_extent(backend, extent, other)
        backend.close()
    (tmp_path / "rankless").mkdir()
    backend = FileBackend(
        tmp_path / "rank0",
        rank=0,
        leftovers=lambda: leftover_directories(tmp_path, 0, 2),
    )
    backend.open()
    whole = PageRun(segment=0, first_page=0, page_count=2 * SEGMENT_PAGES)
    assert backend.release([whole], [1]) is None
    backend.close()
    assert [disk_bytes(tmp_path / f"rank{rank}") < SEGMENT_BYTES for rank in range(4)] == [
        True,
        False,
        True,
        False,
    ]
    assert leftover_directories(tmp_path, 1, 2) == [tmp_path / "rank3"]
    assert leftover_directories(tmp_path, 0, 4) == []


class ShortSystem(SystemCalls):
    """The kernel of a process that has no descriptor left, for a while."""

    is_short = False
    is_helped_by_closing = False

    def open(self, path, flags, directory=None):
        if self.is_short:
            self.is_short = not self.is_helped_by_closing
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().open(path, flags, directory)


@pytest.mark.parametrize("mode", MODES)
def test_a_record_that_cannot_be_opened_for_want_of_descriptors_was_not_tried(tmp_path, mode):
    system = ShortSystem()
    backend = FileBackend(tmp_path, rank=0, mode=mode, system=system)
    backend.open()
    extents = Extent(4, 9000), Extent(4, 9000, segment=1)
    write_extent(backend, *extents)
    backend.close()
    backend.open()
    system.is_short = True
    assert extents[0].served(backend) == [FailureReason.STALLED] * 4
    system.is_short = False
    assert extents[0].served(backend) == [None] * 4
    # The descriptor that is kept of the first segment gives way to that of the second.
    count = descriptor_count()
    system.is_short = system.is_helped_by_closing = True
    assert extents[1].served(backend) == [None] * 4
    assert descriptor_count() == count
    backend.close()


def test_a_segment_that_was_moved_away_with_its_path_is_not_written_any_more(tmp_path):
    path, away = tmp_path / "tier" / "rank0", tmp_path / "away"
    claim(path.parent).close()
    backend = FileBackend(path, rank=0, tier=path.parent)
    backend.open()
    first, later = Extent(4, 9000), Extent(4, 9000, page=64)
    write_extent(backend, first)
    path.parent.rename(away)
    path.parent.mkdir()
    before = (away / "rank0" / "00000000.seg").read_bytes()
    assert len(backend.write(later.to_write())) == 4
    assert list(path.parent.iterdir()) == [], "written before a store has opened the path"
    claim(path.parent).close()
    write_extent(backend, later)
    assert later.served(backend) == [None] * 4
    assert (path / "00000000.seg").exists()
    assert (away / "rank0" / "00000000.seg").read_bytes() == before
    backend.close()


def test_a_segment_is_as_long_as_its_places_say_and_nothing_is_written_behind(tmp_path):
    far = Extent(4, 9000, page=SEGMENT_PAGES, segment_pages=2 * SEGMENT_PAGES)
    backend = opened(tmp_path)
    write_extent(backend, far)
    assert far.served(backend) == [None] * 4
    assert (tmp_path / "00000000.seg").stat().st_size == 2 * SEGMENT_BYTES
    refused = Extent(4, 9000, segment=1, page=SEGMENT_PAGES - 2)
    assert set(backend.write(refused.to_write()).values()) == {FailureReason.LAYOUT}
    backend.close()


def test_a_segment_that_others_make_just_now_is_no_loss(tmp_path):
    """Many threads open each segment while the first of them gives it its length."""
    backend = opened(tmp_path, mode="buffered")
    seconds = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    step = Extent(1, 100).run.page_count
    with ThreadPoolExecutor(8) as threads:
        for segment in range(200):
            extents = [Extent(1, 100, segment=segment, page=step * n) for n in range(8)]
            list(threads.map(lambda extent: write_extent(backend, extent), extents))
    sys.setswitchinterval(seconds)
    assert backend.lost_segments() == set()
    backend.close()
