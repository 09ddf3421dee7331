"""Faults of the kernel and of the file system below the file backend."""

import errno
import logging
import math
import os
import threading
from pathlib import Path

import pytest
from opened_backend import MODES, opened

from tierstore.backend.failure import reason_of
from tierstore.backend.segments.backend import FileBackend
from tierstore.codec.record import EXTENT_RECORDS_MAX, HEADER_BYTES
from tierstore.device.system import SystemCalls
from tierstore.errors import BackendError
from tierstore.layout import PAGE_BYTES
from tierstore.testing.extents import (
    SEGMENT_BYTES,
    Extent,
    descriptor_count,
    disk_bytes,
    write_extent,
)
from tierstore.testing.faults import FaultSchedule, FaultySystem, ShortIoSystem
from tierstore.transfer import FailureReason

FULL = {errno.ENOSPC, errno.EDQUOT}


def faulty(directory, code, fail_at, **options):
    """Open a backend whose system calls fail from call `fail_at` after the opening."""
    schedule = FaultSchedule(1 << 60)
    backend = opened(directory, system=FaultySystem(schedule, code), **options)
    schedule._fail_at = schedule.call_count + fail_at
    return backend, schedule


@pytest.mark.parametrize("code", sorted(errno.errorcode))
def test_every_error_of_the_system_has_a_reason(code):
    expected = FailureReason.IO_ERROR
    if code == errno.ENOENT:
        expected = FailureReason.ABSENT
    elif code in FULL:
        expected = FailureReason.FULL
    assert reason_of(OSError(code, os.strerror(code))) is expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bytes_max", [PAGE_BYTES, 3 * PAGE_BYTES])
def test_short_reads_and_writes_are_continued(tmp_path, mode, bytes_max):
    extents = Extent(5, 9000), Extent(3, 9000, page=100)
    backend = opened(tmp_path, mode=mode, system=ShortIoSystem(bytes_max))
    write_extent(backend, *extents)
    for extent in extents:
        assert extent.served(backend) == [None] * len(extent)
    backend.close()
    with_plain_system = opened(tmp_path, mode=mode)
    for extent in extents:
        assert extent.served(with_plain_system) == [None] * len(extent)
    with_plain_system.close()


class StalledSystem(SystemCalls):
    """A device that takes no more bytes, without an error."""

    def pwritev(self, fd, buffers, offset):
        return 0


def test_a_write_that_stalls_fails(tmp_path):
    backend = opened(tmp_path)
    backend._files._system = StalledSystem()
    assert set(backend.write(Extent(3, 9000).to_write()).values()) == {FailureReason.IO_ERROR}
    backend.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_every_system_call_of_a_life_may_fail(tmp_path, mode, code):
    """Fail the n-th call for n = 1, 2, ... until none is left: no wrong byte, no descriptor left,
    and whatever was written without a failure is served by a healthy backend afterwards."""
    for fail_at in range(1, 60):
        directory = tmp_path / str(fail_at)
        extents = Extent(4, 9000), Extent(4, 9000, page=64), Extent(4, 9000, segment=1)
        before = descriptor_count()
        backend, schedule = faulty(directory, code, fail_at, mode=mode)
        written = []
        for extent in extents:
            failed = backend.write(extent.to_write())
            assert len(failed) in {0, len(extent)}, "an extent fails as a whole"
            assert set(failed.values()) <= {reason_of(OSError(code, ""))}
            if not failed:
                written.append(extent)
        for extent in extents:
            served = extent.served(backend)
            allowed = {
                None,
                FailureReason.ABSENT,
                FailureReason.CORRUPT,
                reason_of(OSError(code, "")),
            }
            assert set(served) <= allowed
        try:
            backend.sync()
        except BackendError:
            assert schedule.has_struck
            backend.sync()  # what was not flushed is flushed now
        if backend.release([], [1]) is not None:
            assert backend.release([], [1]) is None
        assert not (directory / "00000001.seg").exists()
        backend.close()
        assert descriptor_count() == before
        healthy = opened(directory, mode=mode)
        for extent in written:
            expected = FailureReason.ABSENT if extent.segment else None
            assert set(extent.served(healthy)) == {expected}
        healthy.close()
        if not schedule.has_struck:
            return
    pytest.fail("a fault still struck at call 59")


@pytest.mark.parametrize("code", sorted(FULL))
def test_a_first_write_to_a_full_device_leaves_no_bytes(tmp_path, code):
    backend, _ = faulty(tmp_path, code, 1)
    backend._files._system = FullSystem(code)
    extent = Extent(4, 9000)
    assert set(backend.write(extent.to_write()).values()) == {FailureReason.FULL}
    assert disk_bytes(tmp_path) == 0
    assert list(tmp_path.iterdir()) == []
    backend._files._system = SystemCalls()
    write_extent(backend, extent)
    assert extent.served(backend) == [None] * 4
    backend.close()


class FullSystem(SystemCalls):
    """A device with room for half a segment."""

    def __init__(self, code):
        self.code = code

    def allocate(self, fd, offset, size_bytes):
        super().allocate(fd, offset, size_bytes // 2)
        raise OSError(self.code, os.strerror(self.code))


def test_a_segment_is_allocated_whole_by_its_first_write(tmp_path):
    backend = opened(tmp_path)
    write_extent(backend, Extent(1, 100))
    status = (tmp_path / "00000000.seg").stat()
    assert status.st_size == SEGMENT_BYTES
    assert status.st_blocks * 512 >= SEGMENT_BYTES
    backend.close()


def test_a_full_device_still_serves_what_it_holds(tmp_path):
    extent = Extent(4, 9000)
    backend = opened(tmp_path)
    write_extent(backend, extent)
    backend.close()
    full = FileBackend(tmp_path, rank=0, system=FullSystem(errno.ENOSPC))
    full.open()
    assert extent.served(full) == [None] * 4
    full.close()


class CountingSystem(SystemCalls):
    """Records the offset of every read and write."""

    def __init__(self):
        self.reads, self.writes = [], []

    def preadv(self, fd, buffers, offset):
        self.reads.append(offset)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd, buffers, offset):
        self.writes.append(offset)
        return super().pwritev(fd, buffers, offset)


def test_an_extent_is_one_write_and_adjacent_records_are_one_read(tmp_path):
    system = CountingSystem()
    backend = opened(tmp_path, mode="buffered", system=system)
    first = Extent(20, 8000)
    second = Extent(20, 8000, page=first.run.page_count)
    system.reads, system.writes = [], []
    write_extent(backend, first, second)
    assert len(system.writes) == 2
    assert backend.read(first.to_read() + second.to_read()) == {}
    assert len(system.reads) == 1
    system.reads.clear()
    assert backend.read(first.to_read()[5:] + second.to_read()[:5]) == {}
    assert len(system.reads) == 2, "the header page of a partial extent is one more read"
    backend.close()


def test_headers_that_an_extent_does_not_use_are_zero(tmp_path):
    backend = opened(tmp_path)
    first = Extent(EXTENT_RECORDS_MAX, 100)
    write_extent(backend, first)
    write_extent(backend, Extent(2, 100, page=first.run.page_count))
    page = (tmp_path / "00000000.seg").read_bytes()[first.run.page_count * PAGE_BYTES :][
        :PAGE_BYTES
    ]
    assert page.startswith(b"TSRECORD")
    assert page[HEADER_BYTES:].startswith(b"TSRECORD")
    assert not any(page[2 * HEADER_BYTES :])
    backend.close()


@pytest.mark.parametrize("durable", [False, True])
def test_a_durable_write_has_flushed_every_segment_when_it_returns(tmp_path, durable):
    flushes = []

    class FlushSystem(SystemCalls):
        def flush(self, fd):
            flushes.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
            super().flush(fd)

    backend = opened(tmp_path, durable=durable, system=FlushSystem())
    write_extent(backend, Extent(2, 100), Extent(2, 100, segment=1))
    names = ["00000000.seg", "00000001.seg"]
    assert flushes == [str(tmp_path / name) for name in names] * durable
    backend.sync()
    assert flushes == [str(tmp_path / name) for name in names], "once is enough"
    backend.close()


def test_a_dead_device_is_not_asked_for_every_record(tmp_path):
    backend, schedule = faulty(tmp_path, errno.EIO, 1 << 60, mode="buffered")
    extent = Extent(EXTENT_RECORDS_MAX, 100)
    write_extent(backend, extent)
    schedule._fail_count = math.inf
    schedule.fail_from_now()
    asked = schedule.call_count
    assert extent.served(backend) == [FailureReason.IO_ERROR] * EXTENT_RECORDS_MAX
    assert schedule.call_count - asked <= 4
    schedule.heal()
    assert extent.served(backend) == [None] * EXTENT_RECORDS_MAX
    backend.close()


def test_each_cause_is_logged_once(tmp_path, caplog):
    backend = opened(tmp_path)
    with caplog.at_level(logging.DEBUG):
        for _ in range(5):
            Extent(3, 9000).served(backend)
    assert len(caplog.records) == 1
    assert "no segment" in caplog.text
    backend.close()


class NoDirectSystem(SystemCalls):
    """A file system that refuses aligned direct reads, as some do."""

    def preadv(self, fd, buffers, offset):
        raise OSError(errno.EINVAL, "refused")

    def copy_mapped(self, address, buffers, offset):
        raise OSError(errno.EPERM, "refused")


@pytest.mark.parametrize("mode", ["direct", "mmap"])
def test_a_refused_mode_falls_back_to_buffered_with_one_warning(tmp_path, mode, caplog):
    system = NoDirectSystem()
    backend = FileBackend(tmp_path, rank=0, mode=mode, system=system)
    backend.open()
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 1
    assert f"io.mode {mode}" in caplog.text
    backend._files._system = SystemCalls()
    extent = Extent(3, 9000)
    write_extent(backend, extent)
    assert extent.served(backend) == [None] * 3
    backend.close()


def test_without_holes_and_without_blocks_ahead_whole_segments_are_given_back(tmp_path):
    class Plain(SystemCalls):
        def allocate(self, fd, offset, size_bytes):
            raise OSError(errno.EOPNOTSUPP, "refused")

        def punch_hole(self, fd, offset, size_bytes):
            raise OSError(errno.EOPNOTSUPP, "refused")

    backend = opened(tmp_path, system=Plain())
    extents = Extent(4, 9000), Extent(4, 9000, page=64), Extent(4, 9000, segment=1)
    write_extent(backend, *extents)
    assert backend.release([], [1]) is None
    assert [set(extent.served(backend)) for extent in extents] == [
        {None},
        {None},
        {FailureReason.ABSENT},
    ]
    assert not (tmp_path / "00000001.seg").exists()
    backend.close()


def test_what_was_given_back_before_its_segment_came_to_be_takes_no_blocks(tmp_path):
    """The first write finds the device full; its pages are free and charged no more."""

    class OnceFullSystem(SystemCalls):
        refusals = 0

        def allocate(self, fd, offset, size_bytes):
            if self.refusals:
                self.refusals -= 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().allocate(fd, offset, size_bytes)

    system = OnceFullSystem()
    backend = opened(tmp_path, system=system)
    system.refusals = 1
    refused = Extent(2, 40_000)
    assert backend.write(refused.to_write()) == dict.fromkeys(range(2), FailureReason.FULL)
    assert backend.release([refused.run], []) is None
    second = Extent(2, 40_000, page=refused.run.page_count)
    write_extent(backend, second)
    assert second.served(backend) == [None] * 2
    assert disk_bytes(tmp_path) <= SEGMENT_BYTES - refused.run.page_count * PAGE_BYTES
    assert backend.release([second.run], [0]) is None
    assert disk_bytes(tmp_path) == 0
    backend.close()


def test_writers_of_one_new_segment_allocate_it_once(tmp_path):
    class Allocations(SystemCalls):
        count = 0

        def allocate(self, fd, offset, size_bytes):
            self.count += 1
            super().allocate(fd, offset, size_bytes)

    system = Allocations()
    backend = opened(tmp_path, system=system)
    system.count = 0
    extents = [Extent(2, 9000, page=page) for page in range(0, 160, 20)]
    threads = [threading.Thread(target=write_extent, args=(backend, e)) for e in extents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert system.count == 1
    for extent in extents:
        assert extent.served(backend) == [None] * 2
    backend.close()
